"""What a process can say of its part in a group: uneven shards that its bodies took, and collectives that it entered.

Nothing is written down as long as shards are even, and nothing is counted here: a framework's own counter is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyward.api.info import current_broadcast

__all__ = ["count_by", "facts", "note_shard", "stop_counting"]

_KEPT = 8

_shards: dict[str, list[int]] = {}
_counter: Callable[[], int] | None = None


def note_shard(length: int, ranks: int, own: int) -> None:
    """A body has taken `own` of `length` elements, and other ranks of its broadcast have taken more or fewer."""
    broadcast = current_broadcast()
    if broadcast is not None:
        _shards.pop(broadcast, None)
        _shards[broadcast] = [length, ranks, own]
        while len(_shards) > _KEPT:
            del _shards[next(iter(_shards))]


def count_by(counter: Callable[[], int] | None) -> None:
    """Says who knows how many collectives this process has entered since its group was formed."""
    global _counter
    _counter = counter


def stop_counting() -> None:
    """The group is about to end: what was counted stays known until the next one."""
    last = facts().get("collectives")
    count_by(None if last is None else lambda: last)


def facts() -> dict[str, Any]:
    """What is known, for the client."""
    found: dict[str, Any] = {"shards": dict(_shards)}
    if _counter is not None:
        try:
            found["collectives"] = _counter()
        except Exception:  # a group that has ended, or that counts nothing; then it is not known
            pass
    return found
