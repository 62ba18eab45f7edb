"""Looking at processes that may end at any moment: one that ends while it is looked at is gone, and no error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import psutil

__all__ = ["family", "gone", "seen"]

Process = TypeVar("Process")
Found = TypeVar("Found")


def gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def seen(processes: Iterable[Process], look: Callable[[Process], Found]) -> list[tuple[Process, Found]]:
    """What `look` finds at each of the processes that have not ended."""
    found: list[tuple[Process, Found]] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            found.append((process, look(process)))
    return found
