"""The life of a pool: new, opening, open, closing, closed; and the process that it belongs to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal

from skyward.errors import ForkedPoolError, NestedPoolError, PoolClosed

__all__ = ["PAGE_NOTICE", "PoolState", "hear_of", "stopping_pools", "watching_pools"]

PAGE_NOTICE = "its page, for one browser: "
"""How the notice begins that has the address of the page: an address that works once, for whoever opened the pool."""

_heard: list[Callable[[object], None]] = []
_watching: list[Callable[[object], None]] = []


@contextmanager
def stopping_pools(heard: Callable[[object], None]) -> Generator[None]:
    """Has no pool of this process open inside the block: `heard` gets each, and its program ends there."""
    _heard.append(heard)
    try:
        yield
    finally:
        _heard.remove(heard)


@contextmanager
def watching_pools(watcher: Callable[[object], None]) -> Generator[None]:
    """Has `watcher` called with each pool that this process opens inside the block, before anything is done for it."""
    _watching.append(watcher)
    try:
        yield
    finally:
        _watching.remove(watcher)


def hear_of(pool: object) -> None:
    """Stops the program here, before anything is done for a pool, if pools are not to be opened."""
    for watcher in _watching:
        watcher(pool)
    if _heard:
        _heard[-1](pool)
        raise SystemExit(0)  # itself, no subclass: threads end without a word then


class PoolState:
    """Which calls of a pool's methods are allowed now; usable from many threads."""

    def __init__(self) -> None:
        self.now: Literal["new", "opening", "open", "closing", "closed"] = "new"
        self.pid = os.getpid()
        self.began = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._closer: threading.Thread | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this process opened the pool, and is not a fork of that one."""
        return os.getpid() == self.pid

    def begin_opening(self, allow_nested: bool) -> None:
        """The pool is opening now; raises if it must not be opened."""
        self.check_process()
        if "COMPUTE_POOL" in os.environ and not allow_nested:
            raise NestedPoolError(
                "this code runs on a node of a pool already; a body that opens a pool of its own can multiply machines "
                "without end. If it is meant, say ComputePool(..., allow_nested=True)."
            )
        with self._lock:
            if self.now not in ("new", "closed"):
                raise PoolClosed(f"the pool is {self.now} already; make another ComputePool for a second block.")
            self.now, self.pid, self.began = "opening", os.getpid(), time.time()

    def begin_closing(self, waits: bool) -> bool:
        """Whether the caller has to close the pool; if another thread does, and `waits`, this waits for it."""
        if not self.is_ours:
            return False  # a forked child: nothing here belongs to it
        with self._lock:
            if self.now == "open":
                self.now, self._closer = "closing", threading.current_thread()
                self._over.clear()
                return True
        if self.now == "closing" and waits and threading.current_thread() is not self._closer:
            self._over.wait()
        return False

    def end_closing(self) -> None:
        """The pool is closed."""
        self.now = "closed"
        self._over.set()

    def check_open(self) -> None:
        """Raises unless the pool takes calls from this process."""
        self.check_process()
        if self.now != "open":
            raise PoolClosed(
                f"the pool is {'not open yet' if self.now in ('new', 'opening') else self.now}; "
                "calls are sent inside `with sky.ComputePool(...) as pool:`."
            )

    def check_process(self) -> None:
        """Raises in a forked child of the process that opened the pool."""
        if not self.is_ours and self.now != "new":
            raise ForkedPoolError(
                f"this pool was opened by process {self.pid}, of which this one ({os.getpid()}) is a fork. "
                "Use it there, or open another pool here."
            )
