"""What is noticed by looking at all calls now and then: those that nothing is heard of, those that streams hold up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyward.client.call import Call

__all__ = ["held_by_streams", "unheard_of"]

_STREAM_WARNING = 5.0
_ASK = 30.0


def unheard_of(calls: Iterable[Call], connected: Callable[[int], bool], now: float) -> dict[int, list[Call]]:
    """Calls that nothing was heard of for long, by the node that has them and can be asked."""
    silent: dict[int, list[Call]] = {}
    for call in calls:
        waited = call.node is not None and call.state != "held" and now - call.heard > _ASK
        if waited and call.node is not None and connected(call.node):
            silent.setdefault(call.node, []).append(call)
    return silent


def held_by_streams(calls: Iterable[Call], now: float) -> str:
    """What to say when calls wait for slots that only half-read streams hold: the reader may be the one who waits."""
    all_calls = list(calls)
    if not any(call.stream for call in all_calls):
        return ""
    busy = [call for call in all_calls if call.announced]
    waiting = [call for call in all_calls if not call.announced and call.stream is None]
    if not waiting or not all(call.stream for call in busy):
        return ""
    if now - min(call.made for call in waiting) <= _STREAM_WARNING:
        return ""
    return (
        f"{waiting[0].name} waits for a slot, and all are held by streams that are not read to their end "
        f"({busy[0].name if busy else 'a generator'}). Close the stream, or give the pool more slots."
    )
