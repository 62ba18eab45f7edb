"""How far a group of calls is: counted as they end, told a few times a second."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from skyward.client.callbacks import when_done
from skyward.events import Event, GroupProgress
from skyward.transport.threads import run_in_thread

__all__ = ["GroupCounter", "Later"]

Later = Callable[[float, Callable[[], None]], None]
"""Has something done after so many seconds."""

_EVERY = 0.25
_numbers = itertools.count(1)


def _later(seconds: float, act: Callable[[], None]) -> None:
    def wait() -> None:
        time.sleep(seconds)
        act()

    run_in_thread(wait)


class GroupCounter:
    """Counts the calls of one group; `emit` hears of it, seldom enough to cost nothing, but always of the last state.

    `total` is None where it is not known yet, see `expect`. `flush` waits until what was told has been heard.
    """

    def __init__(
        self,
        pool: str,
        name: str,
        total: int | None,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
        later: Later = _later,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool, self._name, self._total, self._emit, self._clock = pool, name, total, emit, clock
        self._later, self._flush = later, flush
        self._follows = False
        self._group = next(_numbers)
        self._began = self._told = clock()
        self._done = self._failed = self._stopped = 0
        self._over = self._untold = self._late = False
        self._lock = threading.RLock()  # a signal handler may stop calls of the group in the thread that counts

    def follow(self, futures: Sequence[Future[Any]]) -> None:
        """Counts futures as they end, and is over when all have."""
        for future in futures:
            when_done(future, self.ended)

    def ended(self, future: Any) -> None:
        """One more future has ended, and it is over when all have; cheap, since it is told of every call of a group."""
        with self._lock:
            self._follows = self._untold = True
            if future._state != "FINISHED":
                self._stopped += 1
            elif future._exception is not None:  # it has ended: asking properly would take a lock, for every call
                self._failed += 1
            else:
                self._done += 1
            if not self._late or self._done + self._failed + self._stopped == self._total:
                self.add(0)

    def add(self, done: int, failed: int = 0, stopped: int = 0) -> None:
        """So many more have ended: well, with an error, or because they were stopped."""
        with self._lock:
            self._done += done
            self._failed += failed
            self._stopped += stopped
            if self._over:
                return
            complete = self._done + self._failed + self._stopped == self._total
            self._over = complete and self._follows
            if complete:
                self._tell()
            else:
                self._untold = True
                self._tell_soon()

    def expect(self, total: int) -> None:
        """So many there are: it was not known, or was wrong."""
        with self._lock:
            if total != self._total:
                self._total = total
                self.add(0)

    def end(self) -> None:
        """No more of them will be counted; listeners have heard so when this returns."""
        with self._lock:
            if not self._over:
                self._over = True
                self._tell()
        self._flush()

    def _tell_soon(self) -> None:
        """Tells now, or in a moment: the next call may take an hour to end."""
        wait = self._told + _EVERY - self._clock()
        if wait <= 0:
            self._tell()
        elif not self._late:
            self._late = True
            self._later(wait, self._tell_late)

    def _tell_late(self) -> None:
        with self._lock:
            self._late = False
            if not self._over and self._untold:
                self._tell_soon()

    def _tell(self) -> None:
        now = self._told = self._clock()
        self._untold = False
        seconds = now - self._began
        # with the lock held: nothing is told after the end
        self._emit(
            GroupProgress(
                self._pool, self._group, self._name, self._done, self._total, seconds, self._failed, self._over
            )
        )
