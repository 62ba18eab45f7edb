"""A place on the test network: a set of namespaces that lives as long as its first process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import HostsError, as_root, root

__all__ = ["SCRIPT", "Place"]

_FLAGS = {"mnt": "-m", "uts": "-u", "ipc": "-i", "net": "-n", "pid": "-p"}
SCRIPT = ("/usr/bin/python3", "-B", "-E", "-s", "-S")
_INIT = Path(__file__).with_name("init.py")


class Place:
    """Starts the first process of a place and speaks with it. `settle`, when its links are there, makes it ready."""

    def __init__(self, name: str, log: Path, new: Sequence[str], spec: Mapping[str, Any]) -> None:
        self.name = name
        self.pid = 0
        self._new = new
        self._log = log
        asked: dict[str, Any] = {
            "name": name,
            "owner": os.getpid(),
            "new": list(new),
            "sysctl": {},
            "ip": "link set lo up\n",
            **spec,
        }
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                as_root([*SCRIPT, str(_INIT)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        self._send(json.dumps(asked))

    @property
    def alive(self) -> bool:
        """Whether the first process is there."""
        return self._process.poll() is None and Path(f"/proc/{self.pid}").exists()

    def made(self) -> int:
        """Waits until the namespaces are there; the process, as this machine counts, by which they are entered."""
        self.pid = self._answer("pid")
        return self.pid

    def go(self) -> None:
        """Says that the links are there."""
        self._send("go")

    def ready(self) -> None:
        """Waits until everything is there."""
        self._answer("ready")

    def entered(self, argv: Sequence[str], kinds: Sequence[str] = ()) -> list[str]:
        """The command that runs this in the place, in all of its namespaces or some kinds of them."""
        flags = [_FLAGS[kind] for kind in (kinds or self._new)]
        return as_root(["nsenter", "-t", str(self.pid), *flags, "--", *argv])

    def run(self, argv: Sequence[str], data: str = "", kinds: Sequence[str] = (), check: bool = True) -> str:
        """Runs a command of this machine in the place, as root."""
        return root(
            ["nsenter", "-t", str(self.pid), *(_FLAGS[k] for k in (kinds or self._new)), "--", *argv], data, check
        )

    def kill(self) -> None:
        """Kills the first process and with it all others, and waits until they are gone; links stay until `close`."""
        if self.alive:
            root(["kill", "-KILL", str(self.pid)], check=False)
        while self.alive:
            time.sleep(0.001)

    def close(self) -> None:
        """Lets the place end, with everything that is still there, and waits for that."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait(120)
        self._process.stdout.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, key: str, seconds: float = 120.0) -> Any:
        assert self._process.stdout
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                raise HostsError(f"{self.name} did not come up within {seconds:.0f} s. It said: {self._said()}")
            read = os.read(self._process.stdout.fileno(), 4096)
            if not read:
                raise HostsError(f"{self.name} could not be made. It said: {self._said()}")
            line += read
        answer = json.loads(line.splitlines()[0])
        if "error" in answer:
            raise HostsError(f"{self.name} could not be made: {answer['error']}. It said: {self._said()}")
        return answer[key]

    def _said(self) -> str:
        return self._log.read_text()[-2000:].strip() or "nothing"
