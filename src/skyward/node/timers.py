"""Timers of the agent, and of its calls."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping

from skyward.node.agent_slots import NodeCall

__all__ = ["CallTimers", "Timers"]


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


class CallTimers:
    def __init__(self, calls: Mapping[str, NodeCall]) -> None:
        self._calls = calls
        self._heap: list[tuple[float, int, str, NodeCall]] = []
        self._count = itertools.count()

    def add(self, when: float, event: str, call: NodeCall) -> None:
        heapq.heappush(self._heap, (when, next(self._count), event, call))
        if len(self._heap) > 64 + 4 * len(self._calls):
            self._heap = [entry for entry in self._heap if self._waits(entry[3])]
            heapq.heapify(self._heap)

    def due(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def over(self, now: float) -> Iterator[tuple[str, NodeCall]]:
        while self._heap and self._heap[0][0] <= now:
            _, _, event, call = heapq.heappop(self._heap)
            if self._waits(call):
                yield event, call

    def _waits(self, call: NodeCall) -> bool:
        return self._calls.get(call.id) is call
