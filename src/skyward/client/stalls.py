"""Whether the ranks of a broadcast still get anywhere, and what to say if not: pure functions of what was seen.

                        returned   waits in a collective,    uses no CPU,        uses CPU
                                   uses no CPU               no collective       or is unknown
    every other rank    stuck      stuck                     alone, if some      going on
                                                             rank has returned

A broadcast is *stuck* if every rank that has not returned waits in a collective and none of them uses CPU: nothing can
come of it. It is *alone* if ranks have returned and the others do nothing that can be seen: that may be a download.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skyward.api.stacks import Stack, Stacks
from skyward.client import collectives

__all__ = ["Finding", "Rank", "cause", "judge", "sentence", "stacks"]

Finding = Literal["going on", "alone", "stuck"]

_IDLE_SHARE = 0.02  # of a core; frameworks have threads that say now and then that they are alive


@dataclass(frozen=True)
class Rank:
    """What is known of a rank at one moment."""

    rank: int
    node: int
    returned: bool = False
    stack: Stack | None = None
    cpu: float | None = None
    """The share of a core that its process has used since it was looked at before; None if that is not known."""
    collectives: int | None = None
    """How many collectives its process has entered, where the framework counts them."""
    entered: bool = False
    """Whether it has entered another one since it was looked at before."""
    shard: tuple[int, ...] | None = None
    """What sky.shard gave it, if parts differ: length of the whole, number of parts, length of its part."""
    accelerators: bool = False

    @property
    def idle(self) -> bool:
        """Whether it is known to do nothing."""
        return self.stack is not None and self.cpu is not None and self.cpu < _IDLE_SHARE and not self.entered

    @property
    def collective(self) -> str | None:
        """The collective in which it can only be waiting for other ranks."""
        found = collectives.find(self.stack.frames) if self.stack is not None else None
        return found.name if found is not None and (found.certain or not self.accelerators) else None


def judge(ranks: Sequence[Rank]) -> Finding:
    """Whether a broadcast, or a call to one node, gets anywhere."""
    left = [rank for rank in ranks if not rank.returned]
    if not left or not all(rank.idle for rank in left):
        return "going on"
    if all(rank.collective is not None for rank in left):
        return "stuck"
    return "alone" if len(left) < len(ranks) else "going on"


def sentence(name: str, ranks: Sequence[Rank]) -> str:
    """Which ranks have returned, where the others stand, and what the likely cause is."""
    returned = [rank.rank for rank in ranks if rank.returned]
    parts = [f"{_listed(returned)} returned"] if returned else []
    places: dict[str, list[int]] = {}
    for rank in ranks:
        if not rank.returned:
            places.setdefault(_standing(rank), []).append(rank.rank)
    parts += [f"{_listed(numbers, 'stands', 'stand')} {where}" for where, numbers in places.items()]
    return f"{name}: {', '.join(parts)}. {cause(ranks)}".rstrip()


def cause(ranks: Sequence[Rank]) -> str:
    """Why ranks wait for each other, as far as it can be known; empty where nothing is."""
    left = [rank for rank in ranks if not rank.returned]
    if len(ranks) == 1:
        return (
            "The call was sent to one node, and the others do not take part in its collectives. Send it to all with "
            "`call() @ pool`."
        )
    waiting = any(rank.collective is not None for rank in left)
    places = {rank.stack.frames for rank in left if rank.stack is not None}
    texts: list[str] = []
    if waiting and len(left) < len(ranks):
        texts.append("Ranks have made different numbers of steps, so that some wait for others that never come.")
    elif waiting and len(places) > 1:
        texts.append("They wait at different places: all ranks must enter the same collectives in the same order.")
    counted = [rank for rank in ranks if rank.collectives is not None]
    if waiting and len({rank.collectives for rank in counted}) > 1:
        texts.append(f"{_counted(counted)}.")
    shards = [rank for rank in ranks if rank.shard is not None]
    if len({rank.shard for rank in shards}) > 1:
        given = ", ".join(f"rank {rank.rank} {rank.shard[2]}" for rank in shards if rank.shard)
        whole = next(rank.shard[0] for rank in shards if rank.shard)
        texts.append(
            f"sky.shard gave {given} of {whole} elements; sky.shard(..., drop_last=True) or pad=True makes parts equal."
        )
    return " ".join(texts)


def stacks(ranks: Sequence[Rank]) -> Stacks:
    """Where every rank of a broadcast stands."""
    return Stacks(
        Stack(rank.rank, rank.node, "returned")
        if rank.returned
        else rank.stack or Stack(rank.rank, rank.node, "running", problem="its node did not answer")
        for rank in ranks
    )


def _standing(rank: Rank) -> str:
    if rank.stack is None:
        return "where its node does not say"
    found = collectives.find(rank.stack.frames)
    place = rank.stack.place
    at = f"{place.short}:{place.line}" if place is not None else "an unknown place"
    where = f"in {found.name} ({at})" if found is not None else f"at {at} in {place.function}" if place else f"at {at}"
    return f"{where} without using CPU" if rank.idle else where


def _counted(ranks: Sequence[Rank]) -> str:
    first, *others = ranks
    text = f"Rank {first.rank} has entered {first.collectives} collectives"
    return ", ".join([text, *(f"rank {rank.rank} {rank.collectives}" for rank in others)])


def _listed(ranks: Sequence[int], one: str = "has", more: str = "have") -> str:
    """Numbers of ranks with their verb; long lists are cut short."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown} {one}" if len(ranks) == 1 else f"ranks {shown} {more}"
