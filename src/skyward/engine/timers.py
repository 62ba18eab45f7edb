"""Things to do later, in a single-threaded loop."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

__all__ = ["Timers"]


class Timers:
    """A queue of acts by the moment they are due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Has `act` called once, `seconds` from now."""
        heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._count), act))

    def due(self) -> float:
        """When the next one is due, on the monotonic clock."""
        return self._heap[0][0] if self._heap else float("inf")

    def run(self) -> None:
        """Does what is due."""
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
