"""The system calls that make namespaces and mounts; Python has no names for them before 3.12, or none at all."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["BIND", "NODEV", "NOEXEC", "NOSUID", "PRIVATE", "RDONLY", "REC", "RELATIME", "REMOUNT"]
__all__ += ["bind", "detach", "die_with_parent", "enter", "mount", "unshare"]

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC = 1, 2, 4, 8, 32, 4096, 16384
PRIVATE, RELATIME = 1 << 18, 1 << 21
_NEW = {"mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000, "net": 0x40000000}
_DETACH = 2
_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kind: str) -> None:
    """Gives this process a namespace of its own (with "pid": to its children)."""
    _checked(_libc.unshare(_NEW[kind]), f"making a new {kind} namespace")


def enter(kind: str, path: str) -> None:
    """Moves this thread into a namespace."""
    with open(path) as namespace:
        _checked(_libc.setns(namespace.fileno(), _NEW[kind]), f"entering {path}")


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    result = _libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None)
    _checked(result, f"mounting {kind or source or 'anew'} on {target}")


def bind(source: int, target: str, flags: int = 0) -> None:
    """Shows what is held open under another path."""
    mount(f"/proc/self/fd/{source}", target, None, BIND | flags)


def detach(target: str) -> None:
    """Takes a mount away, now or when nobody uses it any more."""
    _libc.umount2(target.encode(), _DETACH)


def die_with_parent() -> None:
    """Has this process killed when its parent dies."""
    _libc.prctl(_PDEATHSIG, int(signal.SIGKILL))


def _checked(result: int, act: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{act}: {os.strerror(number)}")
