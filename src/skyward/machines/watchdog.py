"""A small process beside the client that releases what a pool has elsewhere if the client dies.

It gets orders over a pipe, as lines of JSON. If the pipe ends without a last message, or the parent process changes (a
forked child may hold the pipe open), the client is gone. Run by its path, with the standard library only.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

__all__ = ["Watchdog", "pauses"]

_GIVE_UP = 60.0
_TRY_TIMEOUT = 20.0
_ENDING_TIMEOUT = 5.0
_CHECK_PARENT = 1.0


def pauses(seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[float]:
    deadline, pause = clock() + seconds, 0.5
    while clock() + pause <= deadline:
        yield pause
        pause = min(pause * 2, 5.0)


class Watchdog:
    """The client's side; thread-safe. At the end of the with-block the remaining orders are carried out."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._orders: dict[str, dict[str, Any]] = {}
        self._handed_over = self._closed = False
        self._process: subprocess.Popen[bytes] | None = None  # started with the first order

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.hand_over()
        self.close()

    @property
    def pid(self) -> int:
        with self._lock:
            return self._started().pid

    def add(
        self,
        key: str,
        argv: Sequence[str],
        ending: Sequence[str] = (),
        directory: str | None = None,
        patience: float = _TRY_TIMEOUT,
    ) -> None:
        """A command to retry until it works, one to run once, a directory to remove.

        A try may take `patience` seconds.
        """
        from skyward.api.secret import ssh_environment  # the process that is started from this file has no skyward

        order = {
            "key": key,
            "argv": list(argv),
            "ending": list(ending),
            "directory": directory,
            "patience": patience,
            # The watchdog keeps the whole environment: what ends machines of a cloud logs in with it, and ssh does not.
            "withheld": sorted(os.environ.keys() - ssh_environment(os.environ).keys()),
        }
        with self._lock:
            if not self._closed:  # a thread may still be setting up a host that the pool has given up
                self._orders[key] = order
                self._tell({"add": order})

    def drop(self, key: str) -> None:
        with self._lock:
            if self._orders.pop(key, None) is not None:
                self._tell({"drop": key})

    def hand_over(self) -> None:
        with self._lock:
            if self._orders and not self._handed_over:
                self._tell({"now": True})
                self._handed_over = True

    def close(self) -> None:
        """Drops its orders, unless they were handed over; a forked child only closes its copy."""
        if os.getpid() != self._owner:
            self.after_fork()
            return
        with self._lock:
            self._closed, process = True, self._process
            if process is None:
                return
            stdin = process.stdin
            assert stdin is not None
            if stdin.closed:
                return
            if self._handed_over:
                process.returncode = 0  # it outlives us
            else:
                self._orders.clear()
                self._tell({"done": True})
            stdin.close()
        if not self._handed_over:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._orders.clear()
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.returncode = 0

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = _spawn()
        return self._process

    def _tell(self, message: dict[str, Any]) -> None:
        """A killed watchdog is replaced and gets all orders again."""
        process = self._started()
        try:
            _write(process, message)
        except BrokenPipeError:
            if self._handed_over or "done" in message:
                return
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
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
    orders: dict[str, dict[str, Any]] = {}
    heard = b""
    while True:
        readable, _, _ = select.select([0], [], [], _CHECK_PARENT)
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
    for pause in itertools.chain([0.0], pauses(_GIVE_UP)):
        time.sleep(pause)
        if not order["argv"] or _works(order["argv"], order["patience"], order["withheld"]):
            break
    if order["ending"]:
        _works(order["ending"], _ENDING_TIMEOUT, order["withheld"])
    if order["directory"]:
        shutil.rmtree(order["directory"], ignore_errors=True)


def _works(argv: list[str], seconds: float, withheld: Sequence[str]) -> bool:
    quiet = subprocess.DEVNULL
    secret = withheld if argv[0] == "ssh" else ()
    env = {name: value for name, value in os.environ.items() if name not in secret}
    env["SSH_ASKPASS_REQUIRE"] = "never"
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


def _ignore(_: int, __: FrameType | None) -> None:
    """Ignores a signal here; started programs get the default handler."""


def main() -> None:
    # Shutting down or closing a terminal sends these to all processes; the pipe says whether the client is gone.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _ignore)
    threads = [threading.Thread(target=_carry_out, args=(order,)) for order in _watch(int(sys.argv[1])).values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
