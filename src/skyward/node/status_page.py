"""A runner's status page: shared memory in which each of its threads records what it runs.

    entry = version (u64) | began (f64, monotonic clock) | entered (f64) | call id (12 bytes) | id of the thread (u32)
    after the entries: the stack of a thread that the agent has asked for one (stack_dump.py)

It survives the process, so after a crash the agent knows which calls had begun: before they are unpickled, which runs
user code. `entered` is for calls with a timeout only. An odd or changing version marks a write in progress.
"""

from __future__ import annotations

import mmap
import os
import struct

__all__ = ["ID_BYTES", "StatusPage", "page_size"]

ID_BYTES = 12

_VERSION = struct.Struct("=Q")
_ENTRY = struct.Struct(f"=dd{ID_BYTES}sI")
_ENTERED = struct.Struct("=d")
_STRIDE = 40
_READS = 5
_LONGEST_DUMP = 1 << 20


def page_size(threads: int) -> int:
    return -(-threads * _STRIDE // mmap.PAGESIZE) * mmap.PAGESIZE


class StatusPage:
    def __init__(self, fd: int, threads: int) -> None:
        self._map = mmap.mmap(fd, page_size(threads))
        self.fd, self._size = os.dup(fd), page_size(threads)
        self._threads = threads
        self._versions = [0] * threads

    def begin(self, thread: int, call_id: str, now: float, native_id: int = 0) -> None:
        at, version = thread * _STRIDE, self._versions[thread] + 2
        self._versions[thread] = version
        _VERSION.pack_into(self._map, at, version - 1)
        _ENTRY.pack_into(self._map, at + _VERSION.size, now, 0.0, call_id.encode(), native_id)
        _VERSION.pack_into(self._map, at, version)

    def enter(self, thread: int, now: float) -> None:
        at, version = thread * _STRIDE, self._versions[thread] + 2
        self._versions[thread] = version
        _VERSION.pack_into(self._map, at, version - 1)
        _ENTERED.pack_into(self._map, at + _VERSION.size + _ENTERED.size, now)
        _VERSION.pack_into(self._map, at, version)

    def read(self) -> list[tuple[str, float, float]]:
        """Each thread's latest call, when it began, and when it entered its body (or 0)."""
        return [(call_id, began, entered) for call_id, began, entered, _ in self._entries()]

    def native_ids(self) -> dict[str, int]:
        return {call_id: native_id for call_id, _, _, native_id in self._entries()}

    def clear_dump(self) -> None:
        """Rewinds for the next stack; the runner's descriptor shares our position."""
        os.ftruncate(self.fd, self._size)
        os.lseek(self.fd, self._size, os.SEEK_SET)

    def dump(self) -> str:
        return os.pread(self.fd, _LONGEST_DUMP, self._size).decode("utf-8", "replace")

    def _entries(self) -> list[tuple[str, float, float, int]]:
        found: list[tuple[str, float, float, int]] = []
        for at in range(0, self._threads * _STRIDE, _STRIDE):
            for _ in range(_READS):
                (before,) = _VERSION.unpack_from(self._map, at)
                began, entered, call_id, native_id = _ENTRY.unpack_from(self._map, at + _VERSION.size)
                (after,) = _VERSION.unpack_from(self._map, at)
                if before == after and before % 2 == 0:
                    if before:
                        found.append((call_id.decode("ascii", "replace"), began, entered, native_id))
                    break
        return found

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)
