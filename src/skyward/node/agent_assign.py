"""Which waiting call goes to which runner of a node, and which calls are taken back for idle ones: pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

from skyward.node.agent_slots import RunnerSlots
from skyward.node.agent_tables import UNBEGUN, NodeCall, Slot, sent_ahead

__all__ = ["misplaced", "next_pair"]


def next_pair(queue: Mapping[str, NodeCall], runners: RunnerSlots, mean: float | None) -> tuple[NodeCall, Slot] | None:
    """The call that is next, and the runner that has room for it; calls take `mean` seconds.

    A rank of a broadcast goes to its own place, in the order of arrival there; other calls go to any place that no
    earlier rank of a broadcast waits for.
    """
    slots, processes = runners.all.values(), runners.processes
    first = next(iter(queue.values()))
    if not first.missing and not first.about.get("gang"):  # as nearly always
        slot = _roomiest(slots, processes, mean)
        return (first, slot) if slot is not None else None
    each = processes // runners.places
    lacking: set[int] = set()  # places where a rank of a broadcast waits for its buffers: no other rank overtakes it
    awaited: set[int] = set()  # places where one waits for room: nothing overtakes it
    for call in queue.values():
        place = call.place
        if place in lacking:
            continue
        if call.missing:
            if place is not None:
                lacking.add(place)
            continue
        if place is None:
            free = [slot for slot in slots if slot.place not in awaited] if awaited else slots
            slot = _roomiest(free, processes - each * len(awaited), mean)
            return (call, slot) if slot is not None else None
        slot = _with_room([slot for slot in slots if slot.place == place])
        if slot is not None and not _overtakes(call, slots):
            return call, slot
        lacking.add(place)
        awaited.add(place)
        if len(awaited) == runners.places:
            return None
    return None


def misplaced(slots: Collection[Slot]) -> list[NodeCall]:
    """Calls that wait behind others while runners have nothing to do: as many as there are idle runners."""
    if len(slots) < 2:
        return []
    idle = sum(slot.state == "ready" and not slot.calls for slot in slots)
    if not idle:
        return []
    idle -= sum(call.state == "shifting" for slot in slots for call in slot.calls.values())
    waiting = (call for slot in slots for call in itertools.islice(slot.calls.values(), slot.threads, None))
    return list(itertools.islice((call for call in waiting if call.state == "sent"), max(0, idle)))


def _with_room(slots: Iterable[Slot]) -> Slot | None:
    """The runner that begins a rank of a broadcast at once: sent ahead, it might begin after a later one."""
    slot = _roomiest(slots, 0, None)
    return slot if slot is not None and len(slot.calls) < slot.threads else None


def _roomiest(slots: Iterable[Slot], processes: int, mean: float | None) -> Slot | None:
    best: Slot | None = None
    ready = 0
    for slot in slots:
        if slot.state == "ready" and not slot.stops:
            ready += 1
            if best is None or len(slot.calls) < len(best.calls):
                best = slot
    if best is None or len(best.calls) < best.threads:
        return best
    # nothing is sent ahead while another runner is about to be there
    spare = sent_ahead(mean, best.threads) if ready == processes else 0
    return best if len(best.calls) < best.threads + spare else None


def _overtakes(call: NodeCall, slots: Iterable[Slot]) -> bool:
    """Whether an earlier call to the same rank is about to come back from a runner that will not begin it."""
    waiting = (c for slot in slots if slot.state != "ready" for c in slot.calls.values() if c.state in UNBEGUN)
    return any(c.place == call.place and c.order < call.order for c in waiting)
