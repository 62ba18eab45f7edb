"""Which waiting call goes to which runner of a node, and which calls are taken back for idle ones: pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

from skyward.node.agent_tables import UNBEGUN, NodeCall, Slot, sent_ahead

__all__ = ["misplaced", "next_pair"]


def next_pair(
    queue: Mapping[str, NodeCall], slots: Collection[Slot], processes: int, mean: float | None
) -> tuple[NodeCall, Slot] | None:
    """The call that is next, and the runner that has room for it; calls take `mean` seconds."""
    slot = _roomiest(slots, processes, mean) if queue else None
    call = _first(queue.values()) if slot is not None else None
    if slot is None or call is None:
        return None
    if call.about.get("gang") and (len(slot.calls) >= slot.threads or _overtakes(call, slots)):
        return None  # sent ahead it might begin after a later one, which found another runner idle
    return call, slot


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


def _first(queue: Iterable[NodeCall]) -> NodeCall | None:
    """The first call that has all it needs; ranks of broadcasts do not overtake each other."""
    held = False
    for call in queue:
        gang = bool(call.about.get("gang"))
        if not call.missing and not (held and gang):
            return call
        held = held or gang
    return None


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
    """Whether an earlier rank of a broadcast is about to come back from a runner that will not begin it."""
    waiting = (c for slot in slots if slot.state != "ready" for c in slot.calls.values() if c.state in UNBEGUN)
    return any(c.about.get("gang") and c.order < call.order for c in waiting)
