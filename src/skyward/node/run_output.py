"""What a detached run's program prints, as a file that does not fill the disk: its beginning and its end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from pathlib import Path

from skyward.node.run_folder import RESERVE

__all__ = ["OutputFile"]

_MOST = 256 << 20
_TAIL = 1 << 20
_RESERVE = 16 << 20
_SETTLING = 2.0  # for a process that the program left, and that holds its output open


class OutputFile:
    """Reserves room for the end of the journal and the last lines."""

    def __init__(self, path: Path, most: int = _MOST, tail: int = _TAIL, reserve: int = _RESERVE) -> None:
        self._most, self._longest_tail, self.size = most, tail, 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._reserve = path.with_name(RESERVE)
        with contextlib.suppress(OSError), open(self._reserve, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, reserve)
        self._tail: deque[bytes] = deque()
        self._left_out = self._tail_size = 0
        self._full = False
        self._follower: threading.Thread | None = None

    def follow(self, pipe: int) -> None:
        """Copies from the pipe, in a thread, until all its writers are gone."""
        self._follower = threading.Thread(target=self._copy, args=(pipe,), name="skyward-output", daemon=True)
        self._follower.start()

    def settle(self) -> None:
        """After the program's end: its last output is in the file."""
        if self._follower is not None:
            self._follower.join(_SETTLING)
        if self._tail:
            self.make_room()
            self._append(f"\n[{self._left_out - self._tail_size:,} bytes are left out here]\n".encode())
            self._append(b"".join(self._tail))
            self._tail.clear()

    def make_room(self) -> None:
        """If the disk is full, gives up the reserve for what is written next."""
        if self._full:
            self._reserve.unlink(missing_ok=True)
            self._full = False

    def end(self) -> None:
        """Nothing more is written: the reserve is of no use."""
        self._reserve.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        if self.size + len(data) <= self._most and not self._full and self._append(data):
            return
        self._tail.append(data)
        self._left_out += len(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) > self._longest_tail:
            self._tail_size -= len(self._tail.popleft())

    def _append(self, data: bytes) -> bool:
        try:
            self.size += os.write(self._fd, data)
        except OSError:
            self._full = True
            return False
        return True

    def _copy(self, pipe: int) -> None:
        with open(pipe, "rb", buffering=0) as file:
            while data := file.read(1 << 16):
                self.write(data)
