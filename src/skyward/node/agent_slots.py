"""The life of a node's runner processes: starting, serving, leaving, replaced. Pure."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from skyward.node.orders import SCARCE
from skyward.node.protocol import AgentToClient, Header
from skyward.node.settings import SetupSettings
from skyward.transport.codec import Buffers, Described, Message
from skyward.transport.records import Record

__all__ = [
    "CALLS",
    "SLOTS",
    "UNBEGUN",
    "Action",
    "Drop",
    "Kill",
    "NodeCall",
    "Remove",
    "Row",
    "RunnerSlots",
    "Send",
    "Slot",
    "Spawn",
    "Tell",
    "misplaced",
    "next_pair",
    "sent_ahead",
]


class Send(Record):
    slot: Slot
    message: Message


class Tell(Record):
    message: Message


class Kill(Record):
    slot: Slot


class Spawn(Record):
    slot: Slot


class Drop(Record):
    digests: list[str]


class Remove(Record):
    paths: list[str]


Action = Send | Tell | Kill | Spawn | Drop | Remove

_SPAWN_ATTEMPTS = 3
_SPAWN_PATIENCE = 30.0  # where processes have been ready before, or the machine has too many at the moment
_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # between attempts; each is twice as long as the last
_OVERDUE = 5.0
_READ_SOON, _READ_AGAIN = 0.05, 0.25  # after a call was sent, and while it waits


class RunnerSlots:
    def __init__(self) -> None:
        self.all: dict[str, Slot] = {}
        self.processes, self.places, self.closing = 0, 1, False
        self._threads, self._generation, self._hooks = 1, 0, False
        self._failures, self._failing_since, self._next_try = 0, 0.0, 0.0
        self._worked = self._given_up = False
        self._ready_within = float("inf")
        self._names = itertools.count()

    def configure(self, settings: SetupSettings, hooks: bool) -> None:
        self.processes, self.places = settings["processes"], len(settings["places"])
        self._threads, self._generation, self._hooks = settings["threads"], settings["generation"], hooks
        self._ready_within = settings["ready_within"]
        if self._given_up:
            self._failures, self._next_try, self._given_up = 0, 0.0, False

    def spawn_missing(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while self.lacking(now) and (place := self._vacancy()) is not None:
            name = f"{self._generation}-{next(self._names)}"
            slot = self.all[name] = Slot(name, self._threads, now, place)
            actions.append(Spawn(slot))
        return actions

    def lacking(self, now: float) -> bool:
        return now >= self._next_try and not self.closing and not self._given_up and self._vacancy() is not None

    def end_late(self, now: float) -> list[Action]:
        starting = [slot for slot in self.all.values() if slot.state == "starting" and not slot.late]
        late = [slot for slot in starting if now >= slot.since + self._ready_within]
        for slot in late:
            slot.late = True
        return [Kill(slot) for slot in late]

    def due(self) -> float:
        first = self._next_try if self._next_try and self.lacking(self._next_try) else float("inf")
        for slot in self.all.values():  # one plain loop: it is asked before each wait
            if slot.page_due is not None and slot.page_due < first:
                first = slot.page_due
            if slot.state == "starting" and not slot.late and slot.since + self._ready_within < first:
                first = slot.since + self._ready_within
        return first

    def _vacancy(self) -> int | None:
        taken = [slot.place for slot in self._serving()]
        wanted = self.processes // self.places
        return next((place for place in range(self.places) if taken.count(place) < wanted), None)

    def give_up(self) -> None:
        """After failed hooks, which would fail again: the client decides."""
        self._given_up = True

    def move(self, slot: Slot, event: str, now: float, status: int = 0, stderr: str = "") -> list[Action] | None:
        """Applies the state table; None if the event changes nothing."""
        row = SLOTS.get((slot.state, event))
        if row is None:
            return None
        slot.state, names = row
        slot.since = now
        if slot.state == "gone":
            del self.all[slot.name]
        actions: list[Action] = []
        for name in names:
            if name == "kill":
                actions.append(Kill(slot))
            elif name == "tell ready":
                self._failures, self._next_try, self._worked = 0, 0.0, True
                actions += self.spawn_missing(now)  # those that a pause was for: nobody would think of them again
                if self._vacancy() is None and all(s.state == "ready" for s in self._serving()):
                    actions.append(Tell(AgentToClient.Ready(self._generation)))
            elif name == "tell replaced" and not self.closing:
                actions.append(Tell(AgentToClient.Replaced(self._generation, slot.place)))
            elif name == "count failure":
                actions += self._count_failure(slot, status, stderr, now)
            elif name == "spawn" or (name == "spawn beside" and slot.threads > 1 and not self._hooks):
                actions += self.spawn_missing(now)
        return actions

    def read_page_soon(self, slot: Slot, call: NodeCall, now: float) -> None:
        page_due = now + min(_READ_SOON, call.header.get("timeout") or _READ_SOON)
        slot.page_due = page_due if slot.page_due is None else min(slot.page_due, page_due)

    def read_page_again(self, slot: Slot, now: float) -> None:
        unknown = (c for c in slot.calls.values() if c.began is None or (c.header.get("timeout") and not c.entered))
        waits = [call.header.get("timeout") or _READ_AGAIN for call in unknown]
        slot.page_due = now + min(_READ_AGAIN, *waits) if waits else None

    def pages_due(self, now: float) -> list[str]:
        return [slot.name for slot in self.all.values() if slot.page_due is not None and slot.page_due <= now]

    def overdue(self, slot: Slot, now: float) -> str:
        late = [c for c in slot.calls.values() if c.state == "stopping" and now > c.asked + c.grace + _OVERDUE]
        if late:
            return f"call {late[0].id} kept running after its stop; its process was killed again"
        if slot.state in ("leaving", "retired") and not slot.calls and now > slot.since + _OVERDUE:
            return f"process {slot.name} had nothing to do and did not end; it was killed again"
        return ""

    def _count_failure(self, slot: Slot, status: int, stderr: str, now: float) -> list[Action]:
        """A node that has worked before gets more time, unlimited while bodies run."""
        if not self._failures:
            self._failing_since = now
        else:
            self._next_try = now + min(_LONGEST_PAUSE, _PAUSE * 2 ** (self._failures - 1))
        self._failures += 1
        patience = _SPAWN_PATIENCE if self._worked or status == SCARCE else 0.0
        early = not slot.late and (self._failures < _SPAWN_ATTEMPTS or now < self._failing_since + patience)
        if early or self.closing or any(other.calls for other in self.all.values()):
            return []
        self._given_up = True
        which = f" (local rank {slot.place})" if self.places > 1 else ""
        how = f"was not ready within {self._ready_within:g} s" if slot.late else f"ended with status {status}"
        text = f"a runner{which} {how}{'' if slot.late else ' before it was ready'}.\n{stderr}"
        error: Described = {"type": "", "message": text, "traceback": ""}
        return [Tell(AgentToClient.Failed(error, self._generation, [b""]))]

    def _serving(self) -> list[Slot]:
        """Including a leaving runner that must exit before its successor starts."""
        beside = ("leaving",) if self._hooks or self._threads == 1 else ()
        return [slot for slot in self.all.values() if slot.state in ("starting", "ready", "failed", *beside)]


def next_pair(queue: Mapping[str, NodeCall], runners: RunnerSlots, mean: float | None) -> tuple[NodeCall, Slot] | None:
    """The next call and a runner with room for it; `mean` is the average seconds of calls. Ranks of broadcasts keep
    their order.
    """
    slots, processes = runners.all.values(), runners.processes
    first = next(iter(queue.values()))
    if not first.missing and not first.header.get("gang"):  # as nearly always
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
    if len(slots) < 2:
        return []
    idle = sum(slot.state == "ready" and not slot.calls for slot in slots)
    if not idle:
        return []
    idle -= sum(call.state == "shifting" for slot in slots for call in slot.calls.values())
    waiting = (call for slot in slots for call in itertools.islice(slot.calls.values(), slot.threads, None))
    return list(itertools.islice((call for call in waiting if call.state == "sent"), max(0, idle)))


def _with_room(slots: Iterable[Slot]) -> Slot | None:
    """Where a broadcast's rank starts at once: queued, it might start after a later one."""
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
    """Whether an earlier call to the same rank is about to come back."""
    waiting = (c for slot in slots if slot.state != "ready" for c in slot.calls.values() if c.state in UNBEGUN)
    return any(c.place == call.place and c.order < call.order for c in waiting)


# The states of a call on its node, and of the runner processes there, as tables: (state, event) -> (state, actions).
#
# An event that a state has no row for changes nothing. `agent_calls` applies the tables; docs/architecture.md draws
# the usual ways through them.


CallEffect = Literal[
    "send call",
    "send recall",
    "send cancel",
    "queue",
    "start limit",
    "start grace",
    "kill process",
    "tell started",
    "tell recalled",
    "tell verdict",
    "tell crashed",
    "tell stopped",
    "tell lost",
]
SlotEffect = Literal["kill", "tell ready", "tell replaced", "count failure", "spawn", "spawn beside"]
Row = tuple[str, tuple[CallEffect, ...]]

_STOP: Row = ("stopping", ("send cancel", "start grace"))

CALLS: dict[tuple[str, str], Row] = {
    # waits here, for a runner or for its large buffers
    ("queued", "assign"): ("sent", ("send call",)),
    ("queued", "recall"): ("gone", ("tell recalled",)),
    ("queued", "cancel"): ("gone", ("tell stopped",)),
    ("queued", "no room"): ("gone", ("tell verdict",)),
    # with a runner, and not known to have begun
    ("sent", "began"): ("running", ("start limit", "tell started")),
    ("sent", "recall"): ("returning", ("send recall",)),
    ("sent", "shift"): ("shifting", ("send recall",)),
    ("sent", "cancel"): ("withdrawn", ("send cancel",)),
    ("sent", "returned"): ("queued", ("queue",)),
    ("sent", "ended"): ("gone", ("tell verdict",)),
    ("sent", "exited"): ("queued", ("queue",)),
    # the runner was asked to give it back, for the client
    ("returning", "began"): ("running", ("start limit", "tell started")),
    ("returning", "cancel"): ("withdrawn", ("send cancel",)),
    ("returning", "returned"): ("gone", ("tell recalled",)),
    ("returning", "ended"): ("gone", ("tell verdict",)),
    ("returning", "exited"): ("gone", ("tell recalled",)),
    # the runner was asked to give it back, for another runner of this node
    ("shifting", "began"): ("running", ("start limit", "tell started")),
    ("shifting", "recall"): ("returning", ()),
    ("shifting", "cancel"): ("withdrawn", ("send cancel",)),
    ("shifting", "returned"): ("queued", ("queue",)),
    ("shifting", "ended"): ("gone", ("tell verdict",)),
    ("shifting", "exited"): ("queued", ("queue",)),
    # to be stopped, and not known to have begun: the runner gives it back, or stops it
    ("withdrawn", "began"): ("stopping", ("start grace",)),
    ("withdrawn", "returned"): ("gone", ("tell stopped",)),
    ("withdrawn", "ended"): ("gone", ("tell stopped",)),
    ("withdrawn", "exited"): ("gone", ("tell stopped",)),
    # its body runs, or its function and arguments are being unpickled
    ("running", "entered"): ("running", ("start limit",)),
    ("running", "cancel"): _STOP,
    ("running", "limit"): _STOP,
    ("running", "ended"): ("gone", ("tell verdict",)),
    ("running", "exited"): ("gone", ("tell crashed",)),
    ("running", "process killed"): ("doomed", ()),
    # its body was asked to end
    ("stopping", "grace"): ("stopping", ("kill process",)),
    ("stopping", "ended"): ("gone", ("tell stopped",)),
    ("stopping", "exited"): ("gone", ("tell stopped",)),
    # its body runs in a process that is killed for another reason
    ("doomed", "ended"): ("gone", ("tell verdict",)),
    ("doomed", "exited"): ("gone", ("tell lost",)),
}

SLOTS: dict[tuple[str, str], tuple[str, tuple[SlotEffect, ...]]] = {
    ("starting", "ready"): ("ready", ("tell ready",)),
    ("starting", "failed"): ("failed", ()),
    ("starting", "exited"): ("gone", ("count failure", "tell replaced", "spawn")),
    ("starting", "retire"): ("retired", ("kill",)),
    ("ready", "leaving"): ("leaving", ("spawn beside",)),
    ("ready", "exited"): ("gone", ("tell replaced", "spawn")),
    ("ready", "retire"): ("retired", ("kill",)),
    ("leaving", "exited"): ("gone", ("tell replaced", "spawn")),
    ("leaving", "retire"): ("retired", ("kill",)),
    ("failed", "exited"): ("gone", ()),
    ("failed", "retire"): ("retired", ("kill",)),
    ("retired", "exited"): ("gone", ()),
}

UNBEGUN = frozenset(("sent", "returning", "shifting", "withdrawn"))
_AHEAD_SECONDS = 0.002
_AHEAD_ONE_SECONDS = 0.2
_AHEAD_MOST = 32


def sent_ahead(mean: float | None, threads: int) -> int:
    """Calls to queue in a runner beyond those it runs; none if calls are long."""
    if mean is None or mean > _AHEAD_ONE_SECONDS:
        return 0
    if mean > _AHEAD_SECONDS:
        return threads
    return threads * min(_AHEAD_MOST, int(_AHEAD_SECONDS / max(mean, 1e-6)))


class NodeCall:
    __slots__ = (
        *("header", "asked", "backlog", "began", "buffers", "digests", "entered", "grace", "id"),
        *("killed", "missing", "order", "reason", "slot", "state", "why"),
    )

    def __init__(self, call_id: str, header: Header, buffers: Buffers) -> None:
        self.id, self.header, self.buffers = call_id, header, buffers
        self.state = "queued"
        self.order = 0
        self.slot: Slot | None = None
        self.began: float | None = None
        self.entered = 0.0  # when its function was called; only known of calls with a time limit
        self.why = ""  # what is told when it was stopped: cancelled, timeout, gang
        self.reason = ""  # why its process is killed
        self.asked = self.grace = 0.0
        self.killed = False
        self.digests: list[str] = []
        self.missing: set[str] = set()
        self.backlog: list[Message] = []

    @property
    def place(self) -> int | None:
        return self.header.get("place", 0) if self.header.get("gang") else None

    @property
    def movable(self) -> bool:
        """False for ranks of broadcasts and calls with streaming arguments."""
        return not self.header.get("gang") and not self.header.get("streams")


class Slot:
    """`threads`: its number of concurrent calls; `place`: its local rank."""

    __slots__ = ("calls", "doom", "late", "name", "page_due", "place", "since", "state", "stops", "threads")

    def __init__(self, name: str, threads: int, now: float, place: int = 0) -> None:
        self.name, self.threads, self.since, self.place = name, threads, now, place
        self.state = "starting"
        self.calls: OrderedDict[str, NodeCall] = OrderedDict()
        self.page_due: float | None = None
        self.late = False  # it was not ready in time, and is killed
        self.doom = ""  # why it is killed, if that is no fault of the calls that run in it
        self.stops: set[str] = set()  # calls that may cost the process
