"""One host while it is checked: an ssh connection, and over it one program that answers; what it says is bounded.

check.sh ── facts ──► "done" ── "time N" ──► the time there, a few times ── "python N" ──► check_network.py
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from skyward.api.shell import Process, SshTarget
from skyward.errors import BootstrapError
from skyward.node import check_network
from skyward.setup.checks.facts import Facts, read
from skyward.setup.checks.findings import Clock
from skyward.setup.env.script import check_script
from skyward.setup.ssh.shell import SshShell

__all__ = ["Session"]

_STEP = "checking the host"
_NEED_KB = 300_000  # as a pool does: see setup/env/remote.py
_MOST = 256 << 10  # bytes that a host may say in all
_TIMES = 4
_ENDING = 2.0


class Session:
    """The check of one host; every wait has a deadline, and every answer a limit."""

    def __init__(self, target: SshTarget) -> None:
        self.shell = SshShell(target)
        self.name = self.shell.name
        self._token = secrets.token_hex(8)
        self._process: Process | None = None
        self._left, self._heard = b"", 0

    def connect(self, patience: float) -> float:
        """Logs in, with one try of so many seconds; returns how long it took."""
        began = time.monotonic()

        def no_more(why: str) -> None:
            self.shell.close()  # a pool would try again

        self.shell.connect(began + patience + 2.0, report=no_more)
        return time.monotonic() - began

    def facts(self, indexes: Sequence[str], python: tuple[int, int], patience: float) -> Facts:
        """What the host is, has and lacks."""
        from importlib import metadata

        version = f"{python[0]}.{python[1]}"
        argv = ["sh", "-c", check_script(metadata.version("uv")), "sky", self._token, str(_NEED_KB), "tar", version]
        late = threading.Timer(patience, self.shell.close)  # a shell that never comes to our script
        late.daemon = True
        late.start()
        try:
            with open(os.devnull, "wb") as nothing:
                self._process = self.shell.start(argv, {}, nothing)
        finally:
            late.cancel()
        self._write("".join(f"{index}\n" for index in indexes) + "\n")
        lines: list[tuple[str, str]] = []
        for word, rest in self._marked(time.monotonic() + patience):
            lines.append((word, rest))
            if word == "done":
                return read(lines)
        raise BootstrapError(_STEP, f"{self.name} did not answer as expected: its shell may print or do something else")

    def clock(self, patience: float) -> Clock | None:
        """The host's time against ours, from the shortest of a few round trips."""
        best: Clock | None = None
        for number in range(_TIMES):
            asked, began = time.time(), time.monotonic()
            self._write(f"time {number}\n")
            answer = next((rest for word, rest in self._marked(began + patience) if word == "time"), "")
            trip = time.monotonic() - began
            there = _time(answer.rpartition(" ")[2])
            if there is None:
                return best
            seconds, precise = there
            found = Clock(seconds - (asked + trip / 2), trip / 2 if precise else trip / 2 + 1.0)
            best = found if best is None or found.uncertain < best.uncertain else best
        return best

    def start_program(self) -> None:
        """Has the program for the network take over; `order` talks to it."""
        text = Path(check_network.__file__).read_bytes()
        self._write(f"python {len(text)}\n".encode() + text)

    def order(self, patience: float, **message: Any) -> dict[str, Any]:
        """What the program on the host answers to an order; an empty answer if it makes no sense."""
        self._write(json.dumps(message) + "\n")
        line = self._line(time.monotonic() + patience)
        try:
            answer: Any = json.loads(line or b"")
        except (ValueError, RecursionError):
            raise BootstrapError(_STEP, f"{self.name} gave no answer to a test of the network") from None
        return cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}

    def close(self) -> None:
        """Ends what runs there, and the connection."""
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                try:
                    if pipe is not None:
                        pipe.close()
                except OSError:
                    pass  # it has gone
            try:
                process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.shell.close()

    def _marked(self, deadline: float) -> Iterator[tuple[str, str]]:
        """The lines that are meant for us, as their first word and the rest, until it ends."""
        while (line := self._line(deadline)) is not None:
            mark, _, said = line.decode("utf-8", "replace").partition(" ")
            if mark == f"@{self._token}":
                word, _, rest = said.partition(" ")
                yield word, rest

    def _line(self, deadline: float) -> bytes | None:
        """The next line; None if there is no more."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._left:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise BootstrapError(
                        _STEP, f"{self.name} lets us in, and then does not answer in time. Is it busy?"
                    )
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    return None
                self._heard += len(piece)
                if self._heard > _MOST:
                    raise BootstrapError(
                        _STEP,
                        f"{self.name} prints more than {_MOST >> 10} kB where a few lines are wanted. Look at the "
                        "start-up files of its shell, and whether this host can be trusted.",
                    )
                self._left += piece
        line, _, self._left = self._left.partition(b"\n")
        return line

    def _write(self, data: str | bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data if isinstance(data, bytes) else data.encode())
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: whoever reads the answer finds out


def _time(text: str) -> tuple[float, bool] | None:
    """Seconds since 1970 as `date +%s.%N` says them, and whether it knows parts of a second: not every date does."""
    whole, _, part = text.strip().partition(".")
    if not (whole.isascii() and whole.isdigit() and len(whole) < 15):
        return None
    precise = part.isascii() and part.isdigit() and len(part) == 9
    return (float(f"{whole}.{part}"), True) if precise else (int(whole) + 0.5, False)
