"""Which node gets which call: queues, slots and windows. Pure.

The node with the fewest calls for its slots is next; of several, the one that ended a call last, since its caches are
warm. Calls are sent ahead if they are shorter than a round trip. A call behind a long one is taken back when another
node is idle.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

__all__ = ["Dispatch"]

_HORIZON = 0.06
_AHEAD_MOST = 128
_STALE = 0.05
_LOOKED_AT = 1000


class Queued(Protocol):
    id: str
    node: int | None
    pinned: bool
    sent: float
    prefers: int | None
    until: float

    @property
    def movable(self) -> bool: ...


C = TypeVar("C", bound=Queued)


@dataclass
class _Node(Generic[C]):
    slots: int
    up: bool = False
    inflight: OrderedDict[str, C] = field(default_factory=OrderedDict[str, C])
    recalled: set[str] = field(default_factory=set[str])
    stopping: set[str] = field(default_factory=set[str])


class Dispatch(Generic[C]):
    """Not thread-safe."""

    def __init__(self, nodes: int, slots: int) -> None:
        self._nodes: list[_Node[C]] = [_Node(slots) for _ in range(nodes)]
        self._even = True  # whether all nodes have equally many slots
        self._queue: OrderedDict[str, C] = OrderedDict()
        self._mean: float | None = None
        self._last = 0  # where a call ended last: of idle nodes this one is warm
        self._choosy: set[str] = set()  # which of the queue prefer a node

    def set_slots(self, slots: Sequence[int]) -> None:
        for node, count in zip(self._nodes, slots, strict=True):
            node.slots = count
        self._even = len({count for count in slots if count}) == 1  # a node that is missing has none

    def up(self, node: int, is_up: bool) -> None:
        self._nodes[node].up = is_up

    def set_up(self, nodes: set[int]) -> None:
        for number, node in enumerate(self._nodes):
            node.up = number in nodes

    def is_up(self, node: int) -> bool:
        return self._nodes[node].up

    def busy(self, node: int) -> bool:
        return bool(self._nodes[node].inflight)

    def running(self) -> int:
        return sum(min(node.slots, len(node.inflight)) for node in self._nodes)

    def add(self, call: C, *, first: bool = False) -> None:
        self._queue[call.id] = call
        if call.prefers is not None:
            self._choosy.add(call.id)
        if first:
            self._queue.move_to_end(call.id, last=False)

    def pin(self, call: C, node: int, now: float = 0.0) -> None:
        """Regardless of its load."""
        call.node, call.pinned, call.sent = node, True, now
        self._nodes[node].inflight[call.id] = call

    def next(self, now: float) -> list[tuple[int, C]]:
        chosen: list[tuple[int, C]] = []
        while self._queue:
            node = self._roomiest()
            if node is None:
                break
            if not self._choosy:
                _, call = self._queue.popitem(last=False)
            else:
                found = self._suited(node, now)
                if found is None:
                    break
                node, call = found
                del self._queue[call.id]
                self._choosy.discard(call.id)
            call.node, call.sent = node, now
            self._nodes[node].inflight[call.id] = call
            chosen.append((node, call))
        return chosen

    def remove(self, call: C, seconds: float | None = None) -> None:
        if call.node is not None:
            node = self._nodes[call.node]
            node.inflight.pop(call.id, None)
            node.recalled.discard(call.id)
            node.stopping.discard(call.id)
            if seconds is not None:
                self._last = call.node
        else:
            self._queue.pop(call.id, None)
            self._choosy.discard(call.id)
        if seconds is not None:
            self._mean = seconds if self._mean is None else 0.9 * self._mean + 0.1 * seconds

    def stop(self, call: C) -> None:
        """Its slot counts as free: the node starts another process for the next call."""
        if call.node is not None:
            self._nodes[call.node].stopping.add(call.id)

    def at(self, node: int) -> list[C]:
        return list(self._nodes[node].inflight.values())

    def waiting(self) -> list[C]:
        return list(self._queue.values())

    def recallable(self, now: float) -> list[C]:
        """Calls that wait on a busy node while another has a free slot."""
        if self._queue or not self.has_backlog():
            return []
        idle = sum(max(0, n.slots - len(n.inflight)) for n in self._nodes if n.up)
        chosen: list[C] = []
        for number, node in enumerate(self._nodes):
            for call in itertools.islice(node.inflight.values(), node.slots, None):
                if len(chosen) >= idle:
                    break
                if call.prefers == number and now < call.until:
                    continue
                if call.movable and call.id not in node.recalled and now - call.sent > _STALE:
                    node.recalled.add(call.id)
                    chosen.append(call)
        return chosen

    def has_backlog(self) -> bool:
        for node in self._nodes:  # noqa: SIM110 - asked at every turn, and a generator takes longer
            if len(node.inflight) > node.slots:
                return True
        return False

    def has_pinned_waiters(self) -> bool:
        return bool(self._choosy)

    def load(self) -> tuple[int, int]:
        return len(self._queue), sum(len(n.inflight) for n in self._nodes)

    def queue_length(self) -> int:
        return len(self._queue) + sum(max(0, len(n.inflight) - n.slots) for n in self._nodes)

    def _suited(self, roomiest: int, now: float) -> tuple[int, C] | None:
        for call in itertools.islice(self._queue.values(), _LOOKED_AT):
            preferred = self._nodes[call.prefers] if call.prefers is not None else None
            if preferred is None or call.prefers is None or not preferred.up:
                return roomiest, call
            held = len(preferred.inflight) - len(preferred.stopping)
            if held < preferred.slots or (now < call.until and held < self._window(preferred.slots)):
                return call.prefers, call
            if now >= call.until:
                return roomiest, call
        return None

    def _roomiest(self) -> int | None:
        count, even = len(self._nodes), self._even
        window = self._window(self._nodes[0].slots)
        best: int | None = None
        least = 0.0
        for step in range(count):
            index = (self._last + step) % count
            node = self._nodes[index]
            held = load = len(node.inflight)
            if not even and node.slots:
                load, window = held / node.slots, self._window(node.slots)
            if node.up and held - len(node.stopping) < window and (best is None or load < least):
                best, least = index, load
                if not held:
                    break
        return best

    def _window(self, slots: int) -> int:
        if self._mean is None or self._mean >= _HORIZON * slots:
            return slots
        return slots + min(_AHEAD_MOST * slots, int(slots * _HORIZON / max(self._mean, 1e-6)))
