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

__all__ = ["GroupCounter"]

_EVERY = 0.25
_numbers = itertools.count(1)


class GroupCounter:
    """Counts the calls of one group; `emit` hears of it, seldom enough to cost nothing."""

    def __init__(
        self,
        pool: str,
        name: str,
        total: int,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._name, self._total, self._emit, self._clock = pool, name, total, emit, clock
        self._group = next(_numbers)
        self._began = self._told = clock()
        self._done = 0
        self._lock = threading.Lock()

    def follow(self, futures: Sequence[Future[Any]]) -> None:
        """Counts futures that end well."""
        for future in futures:
            when_done(future, self._ended)

    def add(self, count: int) -> None:
        """So many more are done."""
        now = self._clock()
        with self._lock:
            self._done += count
            last = self._done == self._total
            if not last and now - self._told < _EVERY:
                return
            self._told = now
            event = GroupProgress(self._pool, self._group, self._name, self._done, self._total, now - self._began)
        self._emit(event)

    def _ended(self, future: Future[Any]) -> None:
        if not future.cancelled() and Future.exception(future) is None:
            self.add(1)
