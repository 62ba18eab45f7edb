"""The shared collections of a pool as a state machine. Pure; nothing is unpickled.

    ask, withdraw, gone, lost, tick, close  ->  answers

Every request gets exactly one answer, unless its asker is gone.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

from skyward.node.shared.handles import (
    Asker,
    Collection,
    GroupState,
    Refused,
    Reply,
    Request,
    done,
    operation,
    seconds,
)
from skyward.node.shared.protocol import COUNTER_END, ServerToAsker, joined_keys, split_keys
from skyward.transport.codec import Raw

__all__ = ["KINDS", "ROOM", "Answer", "Barrier", "Counter", "Event", "Lock", "Meeting", "Queue", "Set", "SharedState"]


# Shared collections that keep values: dict, set, counter, queue.
#
# No clock, socket or thread here; keys are texts, values are bytes.


_MOST_ITEMS = 1_000_000  # in one answer: a frame has a limit


class Dict(Collection):
    """Each value has a version, which grows with every change."""

    kind = "dict"

    def __init__(self, name: str, group: GroupState) -> None:
        super().__init__(name, group)
        self._items: dict[str, tuple[int, bytes]] = {}
        self._count = 0

    @operation("get")
    def do_get(self, request: Request) -> list[Reply]:
        """[key] -> its version and the value; 0 if there is none."""
        found = self._items.get(request.arguments[0])
        return [done(request, 0) if found is None else done(request, found[0], [found[1]])]

    @operation("set")
    def do_set(self, request: Request) -> list[Reply]:
        """[key], value"""
        self._put(request.arguments[0], request.values[0])
        return [done(request)]

    @operation("update")
    def do_update(self, request: Request) -> list[Reply]:
        """keys, joined, and values: all at once."""
        keys, *values = request.values
        for key, value in list(zip(split_keys(keys), values, strict=True)):
            self._put(key, value)
        return [done(request)]

    @operation("setdefault")
    def do_setdefault(self, request: Request) -> list[Reply]:
        """[key], value -> whether it was set, else the present value."""
        found = self._items.get(request.arguments[0])
        if found is not None:
            return [done(request, False, [found[1]])]
        self._put(request.arguments[0], request.values[0])
        return [done(request, True)]

    @operation("swap")
    def do_swap(self, request: Request) -> list[Reply]:
        """[key, version], value -> whether it was set: only over this version."""
        key, number = request.arguments
        same = self._items.get(key, (0, b""))[0] == number
        if same:
            self._put(key, request.values[0])
        return [done(request, same)]

    @operation("pop")
    def do_pop(self, request: Request) -> list[Reply]:
        """[key] -> whether it was there, and its value."""
        found = self._items.pop(request.arguments[0], None)
        if found is None:
            return [done(request, False)]
        self.size -= len(found[1]) + len(request.arguments[0])
        return [done(request, True, [found[1]])]

    @operation("contains")
    def do_contains(self, request: Request) -> list[Reply]:
        return [done(request, request.arguments[0] in self._items)]

    @operation("len")
    def do_len(self, request: Request) -> list[Reply]:
        return [done(request, len(self._items))]

    @operation("keys")
    def do_keys(self, request: Request) -> list[Reply]:
        return [done(request, None, [joined_keys(self._items)])]

    @operation("items")
    def do_items(self, request: Request) -> list[Reply]:
        if len(self._items) > _MOST_ITEMS:
            raise Refused(
                "too large",
                f"{self} has {len(self._items):,} items, and values are read {_MOST_ITEMS:,} at a time: take its "
                "keys(), and get them one by one.",
            )
        return [done(request, None, [joined_keys(self._items), *(value for _, value in self._items.values())])]

    @operation("clear")
    def do_clear(self, request: Request) -> list[Reply]:
        self._items.clear()
        self.size = 0
        return [done(request)]

    def _put(self, key: str, value: bytes) -> None:
        old = self._items.get(key)
        self.size += len(value) + (len(key) if old is None else -len(old[1]))
        self._count += 1
        self._items[key] = self._count, value


class Set(Collection):
    kind = "set"

    def __init__(self, name: str, group: GroupState) -> None:
        super().__init__(name, group)
        self._members: dict[str, None] = {}

    @operation("add")
    def do_add(self, request: Request) -> list[Reply]:
        """members, joined -> how many were new."""
        new = [key for key in dict.fromkeys(split_keys(request.values[0])) if key not in self._members]
        self._members.update(dict.fromkeys(new))
        self.size += sum(map(len, new))
        return [done(request, len(new))]

    @operation("discard")
    def do_discard(self, request: Request) -> list[Reply]:
        """[member] -> whether it was there."""
        there = request.arguments[0] in self._members
        if there:
            self._remove(request.arguments[0])
        return [done(request, there)]

    @operation("pop")
    def do_pop(self, request: Request) -> list[Reply]:
        """-> a list of the oldest member, which is removed; empty if there is none."""
        found = next(iter(self._members), None)
        if found is None:
            return [done(request, [])]
        self._remove(found)
        return [done(request, [found])]

    @operation("contains")
    def do_contains(self, request: Request) -> list[Reply]:
        return [done(request, request.arguments[0] in self._members)]

    @operation("len")
    def do_len(self, request: Request) -> list[Reply]:
        return [done(request, len(self._members))]

    @operation("keys")
    def do_keys(self, request: Request) -> list[Reply]:
        return [done(request, None, [joined_keys(self._members)])]

    @operation("clear")
    def do_clear(self, request: Request) -> list[Reply]:
        self._members.clear()
        self.size = 0
        return [done(request)]

    def _remove(self, key: str) -> None:
        del self._members[key]
        self.size -= len(key)


class Counter(Collection):
    kind = "counter"

    def __init__(self, name: str, group: GroupState) -> None:
        super().__init__(name, group)
        self._value = 0

    @operation("add")
    def do_add(self, request: Request) -> list[Reply]:
        """[number] -> the new value."""
        self._value = self._checked(self._value + request.arguments[0])
        return [done(request, self._value)]

    @operation("set")
    def do_set(self, request: Request) -> list[Reply]:
        """[number] -> the value before."""
        before, self._value = self._value, self._checked(request.arguments[0])
        return [done(request, before)]

    def _checked(self, value: int) -> int:
        if value.__class__ is not int or not -COUNTER_END <= value < COUNTER_END:
            raise Refused("argument", f"{self} was not changed: it takes whole numbers of up to 64 bits.")
        return value


class Queue(Collection):
    """Values in order of arrival, each for one asker."""

    kind = "queue"

    def __init__(self, name: str, group: GroupState) -> None:
        super().__init__(name, group)
        self._values: deque[bytes] = deque()
        self._limit: int | None = None  # 0: none; None: nobody has said

    @operation("put")
    def do_put(self, request: Request) -> list[Reply]:
        """[limit], value; waits while the queue is full. The limit is 0 for none, None for what it is."""
        self._agree(request.arguments[0])
        if self._limit and len(self._values) >= self._limit:
            self.waiting.append(request)
            return []
        return [done(request), *self._add(request.values[0])]

    @operation("get")
    def do_get(self, request: Request) -> list[Reply]:
        """[limit] -> the oldest value; waits while there is none."""
        self._agree(request.arguments[0])
        if not self._values:
            self.waiting.append(request)
            return []
        value = self._values.popleft()
        self.size -= len(value)
        replies = [done(request, None, [value])]
        if self.waiting and self._limit and len(self._values) < self._limit:
            putter = self.waiting.popleft()  # whoever waits while there are values wants to put
            self._values.append(putter.values[0])
            self.size += len(putter.values[0])
            replies.append(done(putter))
        return replies

    @operation("unget")
    def do_unget(self, request: Request) -> list[Reply]:
        """value: puts back in front what was given to somebody who no longer waited."""
        return [done(request), *self._add(request.values[0], first=True)]

    @operation("len")
    def do_len(self, request: Request) -> list[Reply]:
        return [done(request, len(self._values))]

    @operation("clear")
    def do_clear(self, request: Request) -> list[Reply]:
        """-> how many were removed; whoever waits to put continues."""
        count = len(self._values)
        if not count:
            return [done(request, 0)]  # whoever waits wants to get
        self._values.clear()
        self.size = 0
        replies = [done(request, count)]
        while self.waiting and (not self._limit or len(self._values) < self._limit):
            putter = self.waiting.popleft()
            replies += [done(putter), *self._add(putter.values[0])]
        return replies

    def late(self, request: Request) -> tuple[str, list[Reply]]:
        others = len(self.waiting) - 1
        also = f"; {others} others are waiting, too" if others > 0 else ""
        self.waiting.remove(request)
        within = seconds(request.timeout or 0)
        if request.values:
            return f"{self} was full for {within}: it has {len(self._values)} of {self._limit} items{also}.", []
        return f"{self} was empty for {within}{also}.", []

    def _agree(self, limit: int | None) -> None:
        if limit is None:
            return
        if self._limit is not None and limit != self._limit:
            raise Refused(
                "argument", f"{self} has maxsize={self._limit} already; say maxsize={self._limit}, or leave it out."
            )
        self._limit = limit

    def _add(self, value: bytes, *, first: bool = False) -> list[Reply]:
        if not self._values and self.waiting:
            return [done(self.waiting.popleft(), None, [value])]
        (self._values.appendleft if first else self._values.append)(value)
        self.size += len(value)
        return []


class Lock(Collection):
    """Each acquisition has a larger token."""

    kind = "lock"

    def __init__(self, name: str, group: GroupState) -> None:
        super().__init__(name, group)
        self._holder: Request | None = None
        self._token = 0
        self._since = 0.0

    @operation("acquire")
    def do_acquire(self, request: Request) -> list[Reply]:
        """-> the token; waits while somebody holds the lock."""
        if self._holder is not None:
            self.waiting.append(request)
            return []
        return [self._grant(request, request.since)]

    @operation("release")
    def do_release(self, request: Request) -> list[Reply]:
        """[token]"""
        holder = self._holder
        if holder is None or holder.asker is not request.asker or self._token != request.arguments[0]:
            now = "nobody holds it now" if holder is None else f"{holder.asker.label} holds it now"
            raise Refused(
                "lock lost", f"{self} is no longer held by this process ({now}): it was given up as lost meanwhile."
            )
        return [done(request), *self._pass_on(request.since)]

    @operation("state")
    def do_state(self, request: Request) -> list[Reply]:
        """-> who holds it, and for how many seconds, or None."""
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
        return text + (f"; {others} others are waiting for it, too." if others else "."), []

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
    """Reusable: resets when all have arrived."""

    kind = "barrier"

    def __init__(self, name: str, group: GroupState) -> None:
        super().__init__(name, group)
        self._parties: int | None = None  # None: all ranks
        self._known = False
        self._ranks: set[int] = set()  # which have ever come

    @operation("wait")
    def do_wait(self, request: Request) -> list[Reply]:
        """[parties, age] -> how many came before. Parties: None for all ranks. Age: seconds that the asking call runs;
        a rank lost since then does not come.
        """
        parties, age = request.arguments
        if self._known and parties != self._parties:
            other = "all ranks" if self._parties is None else f"{self._parties} parties"
            raise Refused("argument", f"{self} is one of {other} already; use another name for another number.")
        self._parties, self._known = parties, True
        for rank, (when, why) in self.group.losses.items():
            if self._expects(rank) and when > request.since - age:
                return [self._broken(request, f"{why} since this call began", rank)]
        if request.asker.rank is not None:
            self._ranks.add(request.asker.rank)
        self.waiting.append(request)
        if len(self.waiting) < self._needed:
            return []
        arrived, self.waiting = self.waiting, deque()
        return [done(each, index) for index, each in enumerate(arrived)]

    @operation("waiting")
    def do_waiting(self, request: Request) -> list[Reply]:
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
        return self.group.ranks if self._parties is None else self._parties

    def _expects(self, rank: int) -> bool:
        return self._parties is None or rank in self._ranks

    def _progress(self) -> str:
        labels = [each.asker.label for each in self.waiting]
        text = f"{len(labels)} of {self._needed} have arrived ({listed(labels)})"
        if self._parties is not None:
            return text
        here = {each.asker.rank for each in self.waiting}
        missing = [f"rank {rank}" for rank in range(self._needed) if rank not in here]
        return f"{text}; {listed(missing)} did not arrive" if missing else text

    def _break(self, why: str, cause: Request | None, rank: int | None = None) -> list[Reply]:
        left, self.waiting = self.waiting, deque()
        return [self._broken(each, why, cause.asker.rank if cause is not None else rank) for each in left]

    def _broken(self, request: Request, why: str, rank: int | None) -> Reply:
        return request, "broken", [f"{self} is broken: {why}. The next wait begins again.", rank], []


class Event(Collection):
    kind = "event"

    def __init__(self, name: str, group: GroupState) -> None:
        super().__init__(name, group)
        self._set = False

    @operation("set")
    def do_set(self, request: Request) -> list[Reply]:
        self._set = True
        waiting, self.waiting = self.waiting, deque()
        return [done(request), *map(done, waiting)]

    @operation("clear")
    def do_clear(self, request: Request) -> list[Reply]:
        self._set = False
        return [done(request)]

    @operation("is_set")
    def do_is_set(self, request: Request) -> list[Reply]:
        return [done(request, self._set)]

    @operation("wait")
    def do_wait(self, request: Request) -> list[Reply]:
        if self._set:
            return [done(request)]
        self.waiting.append(request)
        return []

    def late(self, request: Request) -> tuple[str, list[Reply]]:
        self.waiting.remove(request)
        return f"{self} was not set within {seconds(request.timeout or 0)}.", []


class Meeting(Collection):
    """Where the ranks of a group meet once: all get rank 0's value."""

    kind = "meeting"
    lasting = False

    def __init__(self, name: str, group: GroupState) -> None:
        super().__init__(name, group)
        self._came: set[int] = set()

    @operation("join")
    def do_join(self, request: Request) -> list[Reply]:
        """[value] -> rank 0's value; waits for all ranks. On timeout the error lists the missing ones."""
        rank = request.asker.rank
        if rank is None or any(each.asker.rank == rank for each in self.waiting):
            who = f"{request.asker.label} is none" if rank is None else f"rank {rank} is there already"
            raise Refused("argument", f"{self} takes one process for each rank of the pool, and {who}.")
        self._came.add(rank)
        self.waiting.append(request)
        if len(self.waiting) < self.group.ranks:
            return []
        arrived, self.waiting = self.waiting, deque()
        value = next(each.arguments[0] for each in arrived if each.asker.rank == 0)
        return [done(each, value) for each in arrived]

    def late(self, request: Request) -> tuple[list[int], list[Reply]]:
        self.waiting.remove(request)
        here = {request.asker.rank, *(each.asker.rank for each in self.waiting)}
        never = [rank for rank in range(self.group.ranks) if rank not in self._came]
        return never or [rank for rank in range(self.group.ranks) if rank not in here], []


def listed(labels: Iterable[str]) -> str:
    *most, last = labels
    return f"{', '.join(most)} and {last}" if most else last


_ALL = Dict, Set, Counter, Queue, Lock, Barrier, Event, Meeting
KINDS: dict[str, type[Collection]] = {kind.kind: kind for kind in _ALL}

ROOM = 1 << 30
_REPEATED = 5.0

Answer = tuple[str, Raw, list[bytes]]
"""Recipient, message, buffers."""


class SharedState:
    """Each method is an event at time `now` and returns answers to send."""

    def __init__(self, epoch: str, ranks: int = 1) -> None:
        self.epoch = epoch
        """A new epoch means that all data was lost."""
        self.group = GroupState(ranks)
        self._askers: dict[str, Asker] = {}
        self._collections: dict[str, Collection] = {}
        self._waiting: dict[tuple[str, int], tuple[Collection, Request]] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._count = itertools.count()
        self._size = 0
        self._ended: Refused | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def open(self, asker: str, label: str, rank: int | None) -> None:
        """May be repeated."""
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
        """If there is no answer yet, the process waits."""
        known = self._askers.get(asker)
        if known is None:
            known = self._askers[asker] = Asker(asker)
        request = Request(known, id, arguments, values, now, timeout)
        try:
            collection = self._find(epoch, kind, name, values)
            before = collection.size
            replies: list[Reply] = collection.operations[operation](collection, request)
            self._size += collection.size - before
        except Refused as exc:
            return [self._answer((request, exc.code, exc.text, []))]
        except (IndexError, KeyError, TypeError, ValueError) as exc:
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
        found = self._waiting.get((asker, id))
        if found is None:
            return []
        collection, request = found
        left = [(request, "withdrawn", "", list[bytes]())]
        return self._answers([*left, *collection.leave(request, "does not wait any more")])

    def gone(self, asker: str, why: str, now: float) -> list[Answer]:
        """Its requests and locks end, and barriers lose its rank."""
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
            self.group.losses.pop(known.rank, None)
            answers += self.lost(known.rank, f"{known.label} is lost: {why}", now)
        return [answer for answer in answers if answer[0] != asker]

    def lost(self, rank: int, why: str, now: float) -> list[Answer]:
        before = self.group.losses.get(rank)
        if before is not None and now - before[0] < _REPEATED:
            return []  # it was told by the process's own end
        self.group.losses[rank] = now, why
        answers: list[Answer] = []
        for collection in list(self._collections.values()):
            answers += self._answers(collection.lost(rank, why))
        return answers

    def due(self) -> float:
        while self._deadlines and not self._is_waiting(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def tick(self, now: float) -> list[Answer]:
        answers: list[Answer] = []
        while self.due() <= now:
            request = heapq.heappop(self._deadlines)[2]
            collection = self._waiting[request.asker.name, request.id][0]
            text, replies = collection.late(request)
            answers += self._answers([(request, "timeout", text, []), *replies])
        return answers

    def end(self, code: str, text: str) -> list[Answer]:
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
                "them last: all of them are empty now. Try it again.",
            )
        found = self._collections.get(name)
        if found is None:
            found = self._collections[name] = KINDS[kind](name, self.group)
        elif found.kind != kind:
            raise Refused(
                "argument", f"'{name}' is a {found.kind} in this pool, not a {kind}; use another name for the {kind}."
            )
        if values and self._size + sum(map(len, values)) > ROOM:
            raise Refused(
                "too large",
                f"{found} cannot take more: the shared collections of the pool have {self._size >> 20:,} of "
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
        answer = ServerToAsker.Answer(request.id, self.epoch, code, result, values)
        return asker, answer.encoded()[0], values
