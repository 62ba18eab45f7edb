"""Unix sockets between processes of one user, with the peer's user checked."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["check_peer", "connect", "listen", "peer_pid"]

_LONGEST_PATH = 103  # of what every kernel takes: 107 bytes on Linux, 103 on macOS
_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_SIZE, _LOCAL_PEERPID = 0, 1, 76, 2  # macOS, sys/un.h


def listen(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as short:
            sock.bind(short)
        os.chmod(path, 0o600)
        sock.listen(64)
    except BaseException:
        sock.close()
        raise
    return sock


def connect(path: str, timeout: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout)
        with _short(path) as short:
            sock.connect(short)
        check_peer(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def check_peer(sock: socket.socket) -> None:
    uid = _peer_uid(sock)
    if uid != os.geteuid():
        raise PermissionError(f"the process at the other end belongs to user {uid}, not to {os.geteuid()}.")


def peer_pid(sock: socket.socket) -> int:
    """0 if the process cannot be seen from here."""
    if hasattr(socket, "SO_PEERCRED"):
        return struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return struct.unpack("i", sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, 4))[0]


def _peer_uid(sock: socket.socket) -> int:
    if hasattr(socket, "SO_PEERCRED"):
        _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return uid
    _, uid = struct.unpack_from("II", sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_SIZE))
    return uid


@contextmanager
def _short(path: str) -> Generator[str]:
    """A way through an open directory if the path is too long for a socket."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    directory, name = os.path.split(path)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
