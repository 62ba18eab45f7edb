"""The folder of a detached run on another machine, read by a small program of the standard library there.

viewer --lines of JSON--> ssh --> node/run_folder.py on the machine --> folder, steward's socket
"""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from skyward.api.shell import Process, Shell
from skyward.errors import HostUnreachable, InvalidArgument
from skyward.node import run_folder
from skyward.node.run_folder import RunFolder
from skyward.setup.local_shell import end_program
from skyward.transport import journal

__all__ = ["RemoteFolder", "find"]

_LOGIN = 20.0
_HEAD = 100
_MOST_SAID = 1000
# the run's own Python may have been removed with its environment
_START = 'test -x "$1" || set -- python3 "$2"; exec "$1" -I -S -c "$2"'


# the folder of each run, and the first line of its journal
_LIST = 'for at in "${SKYWARD_CACHE:-$HOME/.cache/skyward}"/runs/*/; do echo "$at"; head -n 1 "$at/journal"; done'


def find(shell: Shell, name: str) -> tuple[str, dict[str, Any]]:
    """Of the last run of this name, and how its journal begins."""
    shell.connect(time.monotonic() + _LOGIN)
    lines = shell.run(["sh", "-c", _LIST], timeout=_LOGIN).out.split(b"\n")
    pairs = [(path.decode().rstrip("/"), journal.parsed(head)) for path, head in itertools.pairwise(lines)]
    heads = [(path, head) for path, head in pairs if head is not None]
    if found := [(path, head) for path, head in heads if head.get("name") == name]:
        return max(found, key=lambda each: each[1]["time"])
    there = ", ".join(sorted({str(head.get("name")) for _, head in heads})) or "none"
    raise InvalidArgument(f"{shell.name} is not the first host of a run {name}. It keeps these runs: {there}.")


class RemoteFolder(RunFolder):
    """HostUnreachable if the machine cannot be reached."""

    def __init__(
        self,
        shell: Shell,
        python: str,
        path: str,
        steward: str,
        way: Callable[[Sequence[str]], Sequence[str]] = list,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`way` makes a command of the shell run where the folder is."""
        super().__init__(path, steward)
        self._shell, self._python, self._place = shell, python, (path, steward)
        self._way, self._env = way, env or {}
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._steps = ExitStack()
        self._steps.callback(shell.close)
        self._errors = self._steps.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - with the steps
        weakref.finalize(self, self._steps.close)

    def piece(self, name: str, offset: int) -> bytes:
        return self._asked("piece", name, offset)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._asked("ask", question))
        return answer

    def listing(self) -> dict[str, Any]:
        listed: dict[str, Any] = json.loads(self._asked("listing"))
        return listed

    def histories(self) -> list[str]:
        names: list[str] = json.loads(self._asked("histories"))
        return names

    def remove(self) -> None:
        self._asked("remove")

    def sky(self, *words: str) -> bytes:
        """What this command prints there, with the run's own Skyward."""
        with tempfile.TemporaryFile() as errors:
            process = self._shell.start(self._way([self._python, "-P", "-m", "skyward", *words]), self._env, errors)
            assert process.stdout is not None
            try:
                return process.stdout.read()
            finally:
                end_program(process, _LOGIN)

    def _asked(self, word: str, *rest: Any) -> bytes:
        line = json.dumps([word, *self._place, *rest]).encode() + b"\n"
        with self._lock:
            # once more if the connection broke since, perhaps while this computer slept
            for _ in range(1 if self._process is None else 2):
                with suppress(EOFError):
                    return self._exchange(line)
                self._process = None
        self._errors.seek(0)
        said = self._errors.read()[-_MOST_SAID:].decode("utf-8", "replace").strip() or self._shell.said()
        text = f"{self._shell.name} lets us in, and Python does not start there. {said}"
        raise HostUnreachable("looking at a run", text.strip())

    def _exchange(self, line: bytes) -> bytes:
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        word, _, size = process.stdout.readline(_HEAD).partition(b" ")
        if word not in (b"ok", b"failed"):
            raise EOFError
        content = process.stdout.read(int(size))
        if len(content) < int(size):
            raise EOFError
        if word == b"failed":
            raise OSError(content.decode("utf-8", "replace"))
        return content

    def _started(self) -> Process:
        self._shell.connect(time.monotonic() + _LOGIN)
        program = Path(run_folder.__file__).read_text()
        argv = self._way(["sh", "-c", _START, "sh", self._python, program])
        self._errors.seek(0)
        self._errors.truncate()
        process = self._shell.start(argv, self._env, self._errors)
        self._steps.callback(end_program, process, None)
        return process
