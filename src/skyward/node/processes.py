"""Processes that a body left behind. A runner is a "subreaper": it adopts orphans."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import termios
import time
from collections.abc import Iterator

__all__ = [
    "adopt_orphans",
    "children",
    "die_with_parent",
    "end_children",
    "ended_children",
    "leave_terminal",
    "prefer_for_oom",
    "rename",
]

_INFRASTRUCTURE = (
    b"multiprocessing.resource_tracker",
    b"multiprocessing.forkserver",
    b".loky.",
    b"_inductor/compile_worker",
)
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Exits at once if the parent is already dead."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def rename(name: str) -> None:
    """At most 15 characters, for ps and top."""
    _prctl(_PR_SET_NAME, name.encode())


def leave_terminal() -> None:
    """As a process in a session of its own has none, so that user code can neither ask there nor be stopped by it."""
    if os.getsid(0) == os.getpid():
        return
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return
    fcntl.ioctl(terminal, termios.TIOCNOTTY)
    os.close(terminal)


def prefer_for_oom() -> None:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
    except OSError:
        pass


def children() -> list[int]:
    found: list[int] = []
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:
        return found
    for task in tasks:
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found += [int(pid) for pid in file.read().split()]
        except OSError:
            continue  # the thread has ended meanwhile
    return found


def ended_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def end_children(spare: set[int] | None = None, seconds: float = 2.0) -> None:
    """Kills every child and what it orphans, except library helpers and `spare`."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return  # the usual case, one system call
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        doomed = [pid for pid in children() if pid not in (spare or ()) and not _is_infrastructure(pid)]
        if not doomed:
            return
        for pid in doomed:
            _end(pid)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # somebody else has reaped it


def _is_infrastructure(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return any(name in command for name in _INFRASTRUCTURE)


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
