"""A small process beside the client that ends what a pool has on its hosts if the client dies before doing so.

The client tells it, over a pipe and in JSON lines, what there is to do. The end of the pipe without a last word means
that the client is gone; so does another parent, for a forked child of the client may hold the pipe open.
It is run as a program, by its path: it needs the standard library only, and starts whatever the client's sys.path is.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

__all__ = ["Watchdog", "pauses"]

_GIVE_UP = 60.0
_ONE_TRY = 20.0
_LETTING_GO = 5.0
_GLANCE = 1.0


def pauses(seconds: float) -> list[float]:
    """The pauses between tries, from half a second to five, that fit into `seconds`."""
    found, pause = [0.5], 0.5
    while sum(found) < seconds:
        pause = min(pause * 2, 5.0)
        found.append(pause)
    return found[:-1] or found


class Watchdog:
    """The client's side: what is to be done on the hosts if this process dies. Usable from many threads."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._orders: dict[str, dict[str, Any]] = {}
        self._handed_over = False
        self._process = _spawn()

    @property
    def pid(self) -> int:
        """The process id of the watchdog."""
        return self._process.pid

    def add(
        self,
        key: str,
        argv: Sequence[str],
        ending: Sequence[str] = (),
        directory: str | None = None,
        patience: float = _ONE_TRY,
    ) -> None:
        """Notes a command to be tried until it works, then one to run once, then a directory to remove.

        `ending` and `directory` are `SshShell.ending()`; `argv` may be empty, if there is nothing on the host. A try
        that takes more than `patience` seconds has failed.
        """
        order = {
            "key": key,
            "argv": list(argv),
            "ending": list(ending),
            "directory": directory,
            "patience": patience,
        }
        with self._lock:
            self._orders[key] = order
            self._tell({"add": order})

    def drop(self, key: str) -> None:
        """Forgets a command: it has been done, or must not be."""
        with self._lock:
            if self._orders.pop(key, None) is not None:
                self._tell({"drop": key})

    def hand_over(self) -> None:
        """Has it do everything now, although this process lives; does not wait, and there is no way back."""
        with self._lock:
            if self._orders and not self._handed_over:
                self._tell({"now": True})
                self._handed_over = True

    def close(self) -> None:
        """Ends it without doing anything, unless it was told to; a fork of the process that made it only forgets it."""
        if os.getpid() != self._owner:
            self.after_fork()
            return
        with self._lock:
            stdin = self._process.stdin
            assert stdin is not None
            if stdin.closed:
                return
            if self._handed_over:
                self._process.returncode = 0  # it outlives us
            else:
                self._orders.clear()
                self._tell({"done": True})
            stdin.close()
        if not self._handed_over:
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def after_fork(self) -> None:
        """For a forked child: closes its copy of the pipe, so that the end of the parent is seen."""
        self._lock = threading.Lock()
        self._orders.clear()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.returncode = 0

    def _tell(self, message: dict[str, Any]) -> None:
        """Says it; if the watchdog itself was killed, to a new one that hears everything again."""
        try:
            _write(self._process, message)
        except BrokenPipeError:
            if self._handed_over or "done" in message:
                return
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = _spawn()
            for order in self._orders.values():
                _write(self._process, {"add": order})
            if "now" in message:
                _write(self._process, message)


def _spawn() -> subprocess.Popen[bytes]:
    # Its own session: no signal of our terminal reaches it. None of our files: whoever waits for our output to end
    # must not wait for it.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=os.sep,
        bufsize=0,
    )


def _write(process: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    left = memoryview(json.dumps(message).encode() + b"\n")
    while left:
        left = left[process.stdin.write(left) :]


def _watch(parent: int) -> dict[str, dict[str, Any]]:
    """Listens until the client is done, gone, or hands over; what is to be done then."""
    orders: dict[str, dict[str, Any]] = {}
    heard = b""
    while True:
        readable, _, _ = select.select([0], [], [], _GLANCE)
        if not readable:
            if os.getppid() != parent:
                return orders
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return orders
        *lines, heard = (heard + chunk).split(b"\n")
        for line in lines:
            match json.loads(line):
                case {"add": order}:
                    orders[order["key"]] = order
                case {"drop": key}:
                    orders.pop(key, None)
                case {"now": _}:
                    return orders
                case _:
                    return {}


def _carry_out(order: dict[str, Any]) -> None:
    """Does what is to be done for one host: the command until it works or time is up, then the rest."""
    for pause in [0.0, *pauses(_GIVE_UP)]:
        time.sleep(pause)
        if not order["argv"] or _works(order["argv"], order["patience"]):
            break
    if order["ending"]:
        _works(order["ending"], _LETTING_GO)
    if order["directory"]:
        shutil.rmtree(order["directory"], ignore_errors=True)


def _works(argv: list[str], seconds: float) -> bool:
    """Runs a command; whether it ended well and in time."""
    quiet = subprocess.DEVNULL
    env = {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}
    try:
        process = subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, env=env, start_new_session=True)
    except OSError:
        return False
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def _unmoved(_: int, __: FrameType | None) -> None:
    """Ignores a signal, and leaves it to programs that are started to do otherwise."""


def main() -> None:
    """The watchdog's own program; its argument is the client's process id."""
    # Who shuts a computer down or closes a terminal sends these to all; whether the client is gone is seen otherwise.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _unmoved)
    threads = [threading.Thread(target=_carry_out, args=(order,)) for order in _watch(int(sys.argv[1])).values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
