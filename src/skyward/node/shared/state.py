"""The shared collections of a pool, as a state machine: it is told what is asked, who is gone and what time it is.

    ask, withdraw, gone, lost, tick, close  ->  answers

Every question gets exactly one answer, unless its asker is gone. No clock, socket or thread here, and nothing is
unpickled. An operation is done as a whole before the next one: all of them are atomic.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import Any

from skyward.node.receiver import Message
from skyward.node.shared.collection import Asker, Collection, Refused, Reply, Request, Surroundings
from skyward.node.shared.containers import Counter, Dict, Queue, Set
from skyward.node.shared.protocol import ServerToAsker
from skyward.node.shared.waits import Barrier, Event, Lock, Meeting

__all__ = ["KINDS", "ROOM", "Answer", "SharedState"]

_ALL = Dict, Set, Counter, Queue, Lock, Barrier, Event, Meeting
KINDS: dict[str, type[Collection]] = {kind.kind: kind for kind in _ALL}

ROOM = 1 << 30
"""How many bytes all collections of a pool may have."""
_REPEATED = 5.0
"""A loss that is told again within so many seconds is the same one."""

Answer = tuple[str, Message, list[bytes]]
"""Who gets it, the message, and its buffers."""


class SharedState:
    """Every method says what happened, at the time `now`, and returns the answers that are to be sent."""

    def __init__(self, epoch: str, ranks: int = 1) -> None:
        self.epoch = epoch
        """Another one means that everything was lost in between."""
        self.around = Surroundings(ranks)
        self._askers: dict[str, Asker] = {}
        self._collections: dict[str, Collection] = {}
        self._waiting: dict[tuple[str, int], tuple[Collection, Request]] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._count = itertools.count()
        self._size = 0
        self._ended: Refused | None = None

    @property
    def waiting(self) -> int:
        """How many questions have no answer yet."""
        return len(self._waiting)

    def open(self, asker: str, label: str, rank: int | None) -> None:
        """A process says who it is, perhaps again."""
        known = self._askers.setdefault(asker, Asker(asker))
        known.label, known.rank = label, rank

    def ask(
        self,
        asker: str,
        id: int,
        epoch: str,
        kind: str,
        name: str,
        operation: str,
        arguments: list[Any],
        timeout: float | None,
        values: list[bytes],
        now: float,
    ) -> list[Answer]:
        """A process asks something; it waits if it is not among those who are answered."""
        known = self._askers.get(asker)
        if known is None:
            known = self._askers[asker] = Asker(asker)
        request = Request(known, id, arguments, values, now, timeout)
        try:
            collection = self._find(epoch, kind, name, values)
            before = collection.size
            replies: list[Reply] = getattr(collection, "do_" + operation)(request)
            self._size += collection.size - before
        except Refused as exc:
            return [self._answer((request, exc.code, exc.text, []))]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
            return [self._answer((request, "argument", f"{kind} '{name}' cannot do {operation}: {exc!r}.", []))]
        answers = [self._answer(reply) for reply in replies]
        if all(reply[0] is not request for reply in replies):
            self._waiting[asker, id] = collection, request
            if timeout is not None:
                heapq.heappush(self._deadlines, (now + timeout, next(self._count), request))
                if timeout <= 0:
                    answers += self.tick(now)
        return answers

    def withdraw(self, asker: str, id: int) -> list[Answer]:
        """A process waits no longer; if it was answered already, nothing happens."""
        found = self._waiting.get((asker, id))
        if found is None:
            return []
        collection, request = found
        left = [(request, "withdrawn", "", list[bytes]())]
        return self._answers([*left, *collection.leave(request, "does not wait any more")])

    def gone(self, asker: str, why: str, now: float) -> list[Answer]:
        """A process has ended: it waits for nothing, holds no lock, and its rank is lost to barriers."""
        known = self._askers.pop(asker, None)
        if known is None:
            return []
        answers: list[Answer] = []
        for key in [key for key in self._waiting if key[0] == asker]:
            found = self._waiting.pop(key, None)
            if found is not None:
                answers += self._answers(found[0].leave(found[1], f"is lost: {why}"))
        for collection in list(self._collections.values()):
            answers += self._answers(collection.gone(known, now))
        if known.rank is not None:
            self.around.losses.pop(known.rank, None)
            answers += self.lost(known.rank, f"{known.label} is lost: {why}", now)
        return [answer for answer in answers if answer[0] != asker]

    def lost(self, rank: int, why: str, now: float) -> list[Answer]:
        """A rank is lost, whether it has used collections or not."""
        before = self.around.losses.get(rank)
        if before is not None and now - before[0] < _REPEATED:
            return []  # it was told by the process's own end
        self.around.losses[rank] = now, why
        answers: list[Answer] = []
        for collection in list(self._collections.values()):
            answers += self._answers(collection.lost(rank, why))
        return answers

    def due(self) -> float:
        """When the next time-out is over."""
        while self._deadlines and not self._is_waiting(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def tick(self, now: float) -> list[Answer]:
        """Answers those whose time-out is over."""
        answers: list[Answer] = []
        while self.due() <= now:
            request = heapq.heappop(self._deadlines)[2]
            collection = self._waiting[request.asker.name, request.id][0]
            text, replies = collection.late(request)
            answers += self._answers([(request, "timeout", text, []), *replies])
        return answers

    def end(self, code: str, text: str) -> list[Answer]:
        """The pool closes, or what is kept here does not count any more: nobody waits, nothing is done from now on."""
        self._ended = Refused(code, text)
        waiting = [(request, code, text, list[bytes]()) for _, request in self._waiting.values()]
        return self._answers(waiting)

    def _find(self, epoch: str, kind: str, name: str, values: list[bytes]) -> Collection:
        if self._ended is not None:
            raise self._ended
        if epoch and epoch != self.epoch:
            raise Refused(
                "lost",
                "node 0, which keeps the shared collections of the pool, was lost or restarted since this process used "
                "them last: all of them are empty now. Asking again works.",
            )
        found = self._collections.get(name)
        if found is None:
            found = self._collections[name] = KINDS[kind](name, self.around)
        elif found.kind != kind:
            raise Refused(
                "argument", f"'{name}' is a {found.kind} in this pool, not a {kind}; use another name for the {kind}."
            )
        if values and self._size + sum(map(len, values)) > ROOM:
            raise Refused(
                "too large",
                f"{found} takes no more: the shared collections of the pool have {self._size >> 20:,} of "
                f"{ROOM >> 20:,} MiB. Remove what is not needed, or pass large data as arguments and results of calls.",
            )
        return found

    def _is_waiting(self, request: Request) -> bool:
        found = self._waiting.get((request.asker.name, request.id))
        return found is not None and found[1] is request

    def _answers(self, replies: Iterable[Reply]) -> list[Answer]:
        return [self._answer(reply) for reply in replies]

    def _answer(self, reply: Reply) -> Answer:
        request, code, result, values = reply
        asker = request.asker.name
        found = self._waiting.pop((asker, request.id), None)
        if found is not None and not found[0].lasting and not found[0].waiting:
            self._collections.pop(found[0].name, None)
        return asker, ServerToAsker.answer(request.id, self.epoch, code, result, len(values)), values
