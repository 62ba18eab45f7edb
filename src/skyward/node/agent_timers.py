"""When the time limits and graces of a node's calls are over. No clock here: the time is passed in."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping

from skyward.node.agent_tables import NodeCall

__all__ = ["CallTimers"]


class CallTimers:
    """Events of calls by the time they are due; those of calls that have ended are dropped."""

    def __init__(self, calls: Mapping[str, NodeCall]) -> None:
        self._calls = calls
        self._heap: list[tuple[float, int, str, NodeCall]] = []
        self._count = itertools.count()

    def add(self, when: float, event: str, call: NodeCall) -> None:
        """Has `event` happen to a call at the time `when`."""
        heapq.heappush(self._heap, (when, next(self._count), event, call))
        if len(self._heap) > 64 + 4 * len(self._calls):
            self._heap = [entry for entry in self._heap if self._waits(entry[3])]
            heapq.heapify(self._heap)

    def due(self) -> float:
        """When the next event is due."""
        return self._heap[0][0] if self._heap else float("inf")

    def over(self, now: float) -> Iterator[tuple[str, NodeCall]]:
        """The events that are due, in order."""
        while self._heap and self._heap[0][0] <= now:
            _, _, event, call = heapq.heappop(self._heap)
            if self._waits(call):
                yield event, call

    def _waits(self, call: NodeCall) -> bool:
        return self._calls.get(call.id) is call
