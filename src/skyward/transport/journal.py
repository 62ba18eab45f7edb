"""Append-only files of checksummed lines; a line that was cut off by a crash is skipped.

    7d6f0b1c2a394e5f {"fact":"open","time":1763490000.5}     checksum, space, one JSON object, line end

A journal is locked while its writer lives. Nodes load this file: it needs the standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

__all__ = ["Journal", "Tail", "content", "line", "parsed", "read"]

LONGEST_LINE = 4 << 20
_CHUNK = 1 << 20
_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


def line(body: Mapping[str, Any]) -> bytes:
    text = _encode(dict(body)).encode()
    return _checksum(text) + b" " + text + b"\n"


def parsed(line: bytes, longest: int = LONGEST_LINE) -> dict[str, Any] | None:
    checksum, _, text = line.partition(b" ")
    if len(text) > longest or checksum != _checksum(text):
        return None
    try:
        body: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def read(content: bytes) -> tuple[list[dict[str, Any]], int]:
    bodies = [parsed(each) for each in content.split(b"\n") if each]
    facts = [body for body in bodies if body is not None]
    return facts, len(bodies) - len(facts)


def content(path: Path, most: int = -1) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{path} is not a plain file, or not this user's alone")
        return file.read(most)


class Tail:
    """The complete lines of a file that others may be writing."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset, self._rest = path, offset, b""

    def lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while chunk := file.read(_CHUNK):
                self.offset += len(chunk)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                yield from lines
                if len(self._rest) > LONGEST_LINE:
                    self._rest = b""  # of no file of ours


class Journal:
    """In a forked child it is closed: all copies of a descriptor share the lock."""

    def __init__(self, path: Path, create: bool) -> None:
        """Raises BlockingIOError if another process holds the lock, FileNotFoundError if the file was removed."""
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        self._lock = threading.Lock()
        try:
            if create:
                os.fchmod(self._fd, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not create and os.fstat(self._fd).st_ino != os.stat(path).st_ino:
                raise FileNotFoundError(path)  # it was removed, and perhaps made again, while we waited
        except BaseException:
            os.close(self._fd)
            raise
        _HELD.add(self)

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def append(self, *bodies: Mapping[str, Any], sync: bool = True) -> None:
        """With `sync`, the facts are on disk when it returns. OSError if there is no room."""
        self.append_lines(b"".join(map(line, bodies)), sync)

    def append_lines(self, lines: bytes, sync: bool = True) -> None:
        with self._lock:
            if self._fd < 0:
                raise ValueError(f"the journal {self.path} is closed")
            # a line that was cut off by a crash must not swallow this one
            size = os.fstat(self._fd).st_size
            start = b"\n" if size and os.pread(self._fd, 1, size - 1) != b"\n" else b""
            content = start + lines
            if os.write(self._fd, content) != len(content):
                raise OSError(f"the journal {self.path} could not be written to its end")
            if sync:
                os.fsync(self._fd)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        _HELD.discard(self)
        if fd >= 0:
            os.close(fd)

    def _forked(self) -> None:
        self._lock = threading.Lock()
        self.close()


# Strongly: a journal is held until it is closed, whoever keeps the object.
_HELD: set[Journal] = set()


def _in_child() -> None:
    # A child that outlives us must not make us look alive.
    for journal in list(_HELD):
        journal._forked()  # pyright: ignore[reportPrivateUsage] - same module


os.register_at_fork(after_in_child=_in_child)


def _checksum(text: bytes) -> bytes:
    return blake2b(text, digest_size=8).hexdigest().encode()
