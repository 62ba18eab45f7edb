"""Processes that a body left behind: found through the kernel's list of children, and ended.

A runner adopts what its bodies orphan (it is a "subreaper"), so nothing escapes by forking twice.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

__all__ = ["adopt_orphans", "children", "die_with_parent", "end_children"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent has died."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent dies; exits at once if that is so already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def children() -> list[int]:
    """The pids of this process's direct children."""
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


def end_children(spare: set[int] | None = None, seconds: float = 2.0) -> None:
    """Kills every child and whatever those orphan, but the ones that Python keeps for itself and `spare`."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return  # the usual case, one system call
    keep = (spare or set()) | _infrastructure()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        doomed = [pid for pid in children() if pid not in keep]
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


def _infrastructure() -> set[int]:
    """Helper processes that libraries start once and use for as long as the process lives."""
    pids: set[int] = set()
    for module, path in (
        ("multiprocessing.resource_tracker", ("_resource_tracker", "_pid")),
        ("multiprocessing.forkserver", ("_forkserver", "_forkserver_pid")),
        ("joblib.externals.loky.backend.resource_tracker", ("_resource_tracker", "_pid")),
    ):
        value = sys.modules.get(module)
        for name in path:
            value = getattr(value, name, None)
        if isinstance(value, int):
            pids.add(value)
    return pids


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
