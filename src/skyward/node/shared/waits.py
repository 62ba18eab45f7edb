"""Shared collections that processes wait at: lock, barrier, event, meeting. No clock, socket or thread here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from skyward.node.shared.collection import Asker, Collection, Refused, Reply, Request, Surroundings, done, seconds

__all__ = ["Barrier", "Event", "Lock", "Meeting"]


class Lock(Collection):
    """Held by one process at a time; each time with a larger token."""

    kind = "lock"

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around)
        self._holder: Request | None = None
        self._token = 0
        self._since = 0.0

    def do_acquire(self, request: Request) -> list[Reply]:
        """-> the token; waits while somebody holds the lock."""
        if self._holder is not None:
            self.waiting.append(request)
            return []
        return [self._grant(request, request.since)]

    def do_release(self, request: Request) -> list[Reply]:
        """[token]"""
        holder = self._holder
        if holder is None or holder.asker is not request.asker or self._token != request.arguments[0]:
            now = "nobody holds it now" if holder is None else f"{holder.asker.label} holds it now"
            raise Refused(
                "lock lost", f"{self} is not held by this process any more ({now}): it was given up for lost meanwhile."
            )
        return [done(request), *self._pass_on(request.since)]

    def do_state(self, request: Request) -> list[Reply]:
        """-> who holds it, and for how many seconds; None if nobody does."""
        holder = self._holder
        return [done(request, holder and [holder.asker.label, request.since - self._since])]

    def late(self, request: Request) -> tuple[str, list[Reply]]:
        self.waiting.remove(request)
        holder, timeout = self._holder, request.timeout or 0
        assert holder is not None
        held = seconds(max(0.0, request.since + timeout - self._since))
        text = f"{self} was not free within {seconds(timeout)}: {holder.asker.label} has held it for {held}"
        if holder.asker is request.asker:
            return f"{text}, and that is this process itself; a lock cannot be acquired twice.", []
        others = len(self.waiting)
        return text + (f"; {others} others wait for it, too." if others else "."), []

    def gone(self, asker: Asker, now: float) -> list[Reply]:
        held = self._holder is not None and self._holder.asker is asker
        return self._pass_on(now) if held else []

    def _pass_on(self, now: float) -> list[Reply]:
        self._holder = None
        return [self._grant(self.waiting.popleft(), now)] if self.waiting else []

    def _grant(self, request: Request, now: float) -> Reply:
        self._holder, self._since = request, now
        self._token += 1
        return done(request, self._token)


class Barrier(Collection):
    """A place where processes wait until all have arrived; then it begins again."""

    kind = "barrier"

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around)
        self._parties: int | None = None  # None: all ranks
        self._known = False
        self._ranks: set[int] = set()  # which have ever come

    def do_wait(self, request: Request) -> list[Reply]:
        """[parties, age] -> how many came before; waits for the others. Parties: None for all ranks. Age: since how
        many seconds the call runs that asks; a rank that was lost since then does not come."""
        parties, age = request.arguments
        if self._known and parties != self._parties:
            other = "all ranks" if self._parties is None else f"{self._parties} parties"
            raise Refused("argument", f"{self} is one of {other} already; use another name for another number.")
        self._parties, self._known = parties, True
        for rank, (when, why) in self.around.losses.items():
            if self._expects(rank) and when > request.since - age:
                return [self._broken(request, f"{why} since this call began", rank)]
        if request.asker.rank is not None:
            self._ranks.add(request.asker.rank)
        self.waiting.append(request)
        if len(self.waiting) < self._needed:
            return []
        arrived, self.waiting = self.waiting, deque()
        return [done(each, index) for index, each in enumerate(arrived)]

    def do_waiting(self, request: Request) -> list[Reply]:
        """-> how many wait."""
        return [done(request, len(self.waiting))]

    def late(self, request: Request) -> tuple[str, list[Reply]]:
        text = f"{self}: within {seconds(request.timeout or 0)} {self._progress()}."
        self.waiting.remove(request)
        return text, self._break(f"{request.asker.label} has given up after {seconds(request.timeout or 0)}", request)

    def leave(self, request: Request, why: str) -> list[Reply]:
        self.waiting.remove(request)
        return self._break(f"{request.asker.label} {why}", request)

    def lost(self, rank: int, why: str) -> list[Reply]:
        return self._break(why, None, rank) if self._expects(rank) else []

    @property
    def _needed(self) -> int:
        return self.around.ranks if self._parties is None else self._parties

    def _expects(self, rank: int) -> bool:
        return self._parties is None or rank in self._ranks

    def _progress(self) -> str:
        labels = [each.asker.label for each in self.waiting]
        text = f"{len(labels)} of {self._needed} have arrived ({listed(labels)})"
        if self._parties is not None:
            return text
        here = {each.asker.rank for each in self.waiting}
        missing = [f"rank {rank}" for rank in range(self._needed) if rank not in here]
        return f"{text}; {listed(missing)} did not come" if missing else text

    def _break(self, why: str, cause: Request | None, rank: int | None = None) -> list[Reply]:
        left, self.waiting = self.waiting, deque()
        return [self._broken(each, why, cause.asker.rank if cause is not None else rank) for each in left]

    def _broken(self, request: Request, why: str, rank: int | None) -> Reply:
        return request, "broken", [f"{self} is broken: {why}. The next wait begins again.", rank], []


class Event(Collection):
    """A flag that can be waited for."""

    kind = "event"

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around)
        self._set = False

    def do_set(self, request: Request) -> list[Reply]:
        """Sets the flag; whoever waits goes on."""
        self._set = True
        waiting, self.waiting = self.waiting, deque()
        return [done(request), *map(done, waiting)]

    def do_clear(self, request: Request) -> list[Reply]:
        """Takes the flag back."""
        self._set = False
        return [done(request)]

    def do_is_set(self, request: Request) -> list[Reply]:
        """-> whether it is set."""
        return [done(request, self._set)]

    def do_wait(self, request: Request) -> list[Reply]:
        """Waits until the flag is set."""
        if self._set:
            return [done(request)]
        self.waiting.append(request)
        return []

    def late(self, request: Request) -> tuple[str, list[Reply]]:
        self.waiting.remove(request)
        return f"{self} was not set within {seconds(request.timeout or 0)}.", []


class Meeting(Collection):
    """Where the ranks of a group come together, once each: all of them get what rank 0 brings."""

    kind = "meeting"
    lasting = False

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around)
        self._came: set[int] = set()

    def do_join(self, request: Request) -> list[Reply]:
        """[value] -> the value of rank 0; waits for all ranks. The time-out has a list of those that never came."""
        rank = request.asker.rank
        if rank is None or any(each.asker.rank == rank for each in self.waiting):
            who = f"{request.asker.label} is none" if rank is None else f"rank {rank} is there already"
            raise Refused("argument", f"{self} takes one process for each rank of the pool, and {who}.")
        self._came.add(rank)
        self.waiting.append(request)
        if len(self.waiting) < self.around.ranks:
            return []
        arrived, self.waiting = self.waiting, deque()
        value = next(each.arguments[0] for each in arrived if each.asker.rank == 0)
        return [done(each, value) for each in arrived]

    def late(self, request: Request) -> tuple[list[int], list[Reply]]:
        self.waiting.remove(request)
        here = {request.asker.rank, *(each.asker.rank for each in self.waiting)}
        never = [rank for rank in range(self.around.ranks) if rank not in self._came]
        return never or [rank for rank in range(self.around.ranks) if rank not in here], []


def listed(labels: Iterable[str]) -> str:
    """Names in a sentence: "rank 1, rank 2 and the client"."""
    *most, last = labels
    return f"{', '.join(most)} and {last}" if most else last
