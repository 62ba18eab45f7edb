"""Timers of a loop."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

__all__ = ["Timers"]


class Timers:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int]] = []
        self._acts: dict[int, Callable[[], None]] = {}
        self._count = itertools.count()

    def after(self, seconds: float, act: Callable[[], None]) -> int:
        number = next(self._count)
        self._acts[number] = act
        heapq.heappush(self._heap, (self.clock() + seconds, number))
        return number

    def cancel(self, number: int) -> None:
        self._acts.pop(number, None)
        if len(self._heap) > 64 + 2 * len(self._acts):
            self._heap = [entry for entry in self._heap if entry[1] in self._acts]
            heapq.heapify(self._heap)

    def due(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def run(self) -> None:
        now = self.clock()
        while self._heap and self._heap[0][0] <= now:
            act = self._acts.pop(heapq.heappop(self._heap)[1], None)
            if act is not None:
                act()
