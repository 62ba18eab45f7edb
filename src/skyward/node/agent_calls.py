"""The calls of one node: which wait, run, or are being stopped, and in which runner. Pure."""

from __future__ import annotations

import heapq
import itertools
import signal
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import assert_never

from skyward.node.agent_slots import (
    CALLS,
    UNBEGUN,
    Action,
    Drop,
    Kill,
    NodeCall,
    Remove,
    RunnerSlots,
    Send,
    Slot,
    Tell,
    misplaced,
    next_pair,
)
from skyward.node.protocol import (
    AgentToClient,
    AgentToRunner,
    Cancelled,
    Crashed,
    GangStopped,
    Lost,
    NoRoom,
    Recall,
    Returned,
    Run,
    Stalled,
    Stopped,
    TimedOut,
    Verdict,
)
from skyward.node.settings import SetupSettings
from skyward.transport.codec import Message
from skyward.transport.records import replace

__all__ = ["AgentCalls"]


class AgentCalls:
    """Each method is an event at time `now` and returns actions."""

    def __init__(self) -> None:
        self.calls: dict[str, NodeCall] = {}
        self._runners = RunnerSlots()
        self.slots, self.pages_due = self._runners.all, self._runners.pages_due
        self.queue: OrderedDict[str, NodeCall] = OrderedDict()
        self.mean: float | None = None
        self.leaving = False
        self._grace = self._ready_within = 0.0
        self._orders = itertools.count()
        self._timers = CallTimers(self.calls)
        self._out: list[Action] = []
        self._audit = Audit(self._runners)
        self._mended: list[str] = []  # what was found since the last audit
        self._now = 0.0

    @property
    def closing(self) -> bool:
        return self._runners.closing

    # from the client

    def setup(self, settings: SetupSettings, hooks: bool, now: float) -> list[Action]:
        self._now = now
        self._grace, self._ready_within = settings["grace"], settings["ready_within"]
        self._runners.configure(settings, hooks)
        self._retire("the pool's processes were replaced")
        self._out += self._runners.spawn_missing(now)
        return self._dispatched()

    def take(self, call: NodeCall, now: float) -> list[Action]:
        """`missing` names the blobs that are not here yet."""
        self._now = now
        if self.leaving and call.movable:
            call.state = "gone"
            return [Tell(AgentToClient.Recalled(call.id)), Drop(call.digests)]
        call.order = next(self._orders)
        self.calls[call.id] = self.queue[call.id] = call
        return self._dispatched()

    def recall(self, call_id: str, now: float) -> list[Action]:
        self._now = now
        if (call := self.calls.get(call_id)) is not None:
            self._step(call, "recall")
        return self._dispatched()

    def cancel(self, call_id: str, why: str, grace: float, now: float) -> list[Action]:
        self._now = now
        if (call := self.calls.get(call_id)) is not None:
            self._stop(call, "cancel", why, grace)
        return self._dispatched()

    def stream(self, call_id: str, message: Message) -> list[Action]:
        call = self.calls.get(call_id)
        if call is None:
            return []
        if call.state == "queued" or call.state in UNBEGUN:
            call.backlog.append(message)  # should another runner get the call, it gets this too
        return [Send(call.slot, message)] if call.slot is not None else []

    def notice(self, now: float) -> list[Action]:
        self._now, self.leaving = now, True
        for call in list(self.calls.values()):
            if call.movable:
                self._step(call, "recall")
        return self._dispatched()

    def fence(self, now: float) -> list[Action]:
        self._now = now
        for call in list(self.calls.values()):
            self._leave(call, "gone")
        self._retire("the pool's processes were replaced")
        self._runners.processes = 0  # none is wanted before the next `setup`
        return self._taken()

    def close(self, now: float) -> list[Action]:
        self._now, self._runners.closing = now, True
        for call in list(self.queue.values()):
            self._leave(call, "gone")
        for slot in self.slots.values():
            idle = slot.state == "ready" and not slot.calls
            self._out.append(Send(slot, AgentToRunner.Exit()) if idle else Kill(slot))
        return self._taken()

    def states(self, call_ids: Iterable[str]) -> dict[str, str]:
        return {i: self.calls[i].state if i in self.calls else "unknown" for i in call_ids}

    # large buffers

    def arrived(self, blob: str, now: float) -> list[Action]:
        self._now = now
        for call in self.queue.values():
            call.missing.discard(blob)
        return self._dispatched()

    def no_room(self, blob: str, size: int, reason: str, now: float) -> list[Action]:
        self._now = now
        for call in [call for call in self.queue.values() if blob in call.missing]:
            self._step(call, "no room", NoRoom(id=call.id, size=size, reason=reason))
        return self._dispatched()

    # from runners

    def ready(self, name: str, now: float) -> list[Action]:
        self._now = now
        if (slot := self.slots.get(name)) is not None:
            self._move(slot, "ready")
        return self._dispatched()

    def failed(self, name: str, now: float) -> bool:
        """False if the runner was leaving anyway."""
        self._now = now
        slot = self.slots.get(name)
        if slot is None or not self._move(slot, "failed"):
            return False
        self._runners.give_up()
        return True

    def saw(self, name: str, page: Iterable[tuple[str, float, float]], now: float) -> list[Action]:
        self._now = now
        slot = self.slots.get(name)
        if slot is None:
            return []
        for call_id, began, entered in page:
            call = slot.calls.get(call_id)
            if call is not None and call.began is None:
                call.began = began
                self._step(call, "began")
            if call is not None and entered and not call.entered:
                call.entered = entered
                self._step(call, "entered")
        if slot.doom:
            self._doom(slot, slot.doom)  # of those that have begun since it was to be killed
        self._runners.read_page_again(slot, now)
        return self._taken()

    def returned(self, name: str, call_ids: Sequence[str], now: float) -> list[Action]:
        self._now = now
        self._return(name, call_ids)
        return self._dispatched()

    def left(self, name: str, call_ids: Sequence[str], now: float) -> list[Action]:
        """The runner starts no other body; its waiting calls are given back."""
        self._now = now
        if (slot := self.slots.get(name)) is not None:
            self._move(slot, "leaving")
            self._return(name, call_ids)
        return self._dispatched()

    def ended(self, name: str, verdict: Verdict, now: float) -> list[Action]:
        self._now = now
        if (call := self._of(name, verdict.id)) is not None:
            if call.began is None:
                call.began = now - (verdict.seconds or 0.0)
            self._step(call, "ended", verdict)
        else:
            self._discard(verdict)
        return self._dispatched()

    def exited(self, name: str, status: int, stderr: str, oom: bool, now: float) -> list[Action]:
        """Call after the runner's last messages and status page were handled."""
        self._now = now
        slot = self.slots.get(name)
        if slot is None:
            return []
        culprits = sum(call.state == "running" for call in slot.calls.values())
        oom = oom and status == -signal.SIGKILL
        for call in list(slot.calls.values()):
            crash = Crashed(id=call.id, code=status, stderr=stderr, oom=oom, shared=culprits - 1)
            self._step(call, "exited", crash)
        self._move(slot, "exited", status, stderr)
        return self._dispatched()

    # time

    def due(self) -> float:
        return min(self._timers.due(), self._runners.due())

    def tick(self, now: float) -> list[Action]:
        self._now = now
        self._out += self._runners.spawn_missing(now) + self._runners.end_late(now)
        for event, call in self._timers.over(now):
            if event == "limit" and now >= self._limit(call):
                self._stop(call, "limit", "timeout", self._grace)
            elif event == "grace":
                self._step(call, event)
        return self._dispatched()

    def audit(self, now: float, killable: bool = True) -> tuple[list[str], list[Action]]:
        """Finds and repairs states that must not exist. `killable` says whether kills have an effect."""
        self._now = now
        found = self._audit.find(self.next_pair() is not None, killable, now)
        for name in found:
            if name in self.slots:
                self._out.append(Kill(self.slots[name]))
            elif name == "spawn":
                self._out += self._runners.spawn_missing(now)
        actions = self._dispatched() if "queue" in found else self._taken()
        mended, self._mended = [*self._mended, *found.values()], []
        return mended, actions

    # the machinery: one place for each thing that happens to a call

    def _step(self, call: NodeCall, event: str, verdict: Verdict | None = None) -> bool:
        row = CALLS.get((call.state, event))
        if row is None:
            return False
        state, actions = row
        slot = call.slot
        if state in ("gone", "queued"):
            self._leave(call, state)
        else:
            call.state = state
            if slot is not None and state in ("stopping", "doomed"):
                slot.stops.add(call.id)
        for action in actions:
            match action:
                case "send call":
                    self._send_call(call)
                case "start limit":
                    self._start_limit(call)
                case "tell started":
                    self._tell(AgentToClient.Started(call.id, slot.place if slot is not None else 0))
                case "tell verdict" | "tell crashed":
                    self._tell_verdict(call, slot, verdict)
                case "tell stopped":  # whatever its body ended with
                    self._discard(verdict)
                    self._tell_verdict(call, slot, stopped(call, verdict))
                case "tell lost":
                    self._tell_verdict(call, slot, Lost(id=call.id, reason=call.reason))
                case "tell recalled":
                    self._tell(AgentToClient.Recalled(call.id))
                case "send recall":
                    self._send(slot, Recall(call.id))
                case "send cancel":
                    self._send(slot, AgentToRunner.Cancel(call.id))
                case "queue":
                    self._queue(call)
                case "start grace":
                    call.asked = self._now
                    self._timers.add(self._now + call.grace, "grace", call)
                case "kill process":
                    self._kill_process(call, slot)
                case _:
                    assert_never(action)
        return True

    def _leave(self, call: NodeCall, state: str) -> None:
        """The only place where a call leaves its slot, the queue, or the node."""
        call.state = state
        if call.slot is not None:
            call.slot.calls.pop(call.id, None)
            call.slot.stops.discard(call.id)
            call.slot = None
        if state == "gone":
            self.queue.pop(call.id, None)
            if self.calls.get(call.id) is call:
                del self.calls[call.id]
            if call.digests:
                self._out.append(Drop(call.digests))

    def _stop(self, call: NodeCall, event: str, why: str, grace: float) -> None:
        if (call.state, event) in CALLS:
            call.why, call.grace, call.asked = why, grace, self._now
            self._step(call, event)

    def _move(self, slot: Slot, event: str, status: int = 0, stderr: str = "") -> bool:
        actions = self._runners.move(slot, event, self._now, status, stderr)
        self._out += actions or ()
        return actions is not None

    def _retire(self, reason: str) -> None:
        for slot in list(self.slots.values()):
            self._doom(slot, reason)
            self._move(slot, "retire")

    def _doom(self, slot: Slot, reason: str) -> None:
        slot.doom = reason
        for call in slot.calls.values():
            if self._step(call, "process killed"):
                call.reason = reason

    def _return(self, name: str, call_ids: Sequence[str]) -> None:
        for call in filter(None, [self._of(name, call_id) for call_id in call_ids]):
            self._step(call, "returned")

    def _of(self, name: str, call_id: str) -> NodeCall | None:
        """None unless that runner has it: a replaced one may still report calls."""
        slot = self.slots.get(name)
        return slot.calls.get(call_id) if slot is not None else None

    def next_pair(self) -> tuple[NodeCall, Slot] | None:
        return next_pair(self.queue, self._runners, self.mean) if self.queue else None

    def _dispatched(self) -> list[Action]:
        while (pair := self.next_pair()) is not None:
            (call, slot), before = pair, pair[0].slot
            call.slot = slot
            if not self._step(call, "assign"):  # or this would never end
                call.slot = before
                self.queue.pop(call.id, None)
                self._mended.append(f"call {call.id} was {call.state}, and waited for a process; it no longer does")
        if not self.queue or self._runners.places > 1:  # a rank of a broadcast may wait beside idle runners
            for call in misplaced(self.slots.values()):
                self._step(call, "shift")
        return self._taken()

    def _taken(self) -> list[Action]:
        out, self._out = self._out, []
        return out

    def _discard(self, verdict: Verdict | None) -> None:
        if isinstance(verdict, Returned) and verdict.blobs:
            self._out.append(Remove([path for path, _ in verdict.blobs.values()]))

    def _tell(self, message: Message) -> None:
        self._out.append(Tell(message))

    def _send(self, slot: Slot | None, message: Message) -> None:
        assert slot is not None
        self._out.append(Send(slot, message))

    # what the table's actions are

    def _send_call(self, call: NodeCall) -> None:
        slot = call.slot
        assert slot is not None
        self.queue.pop(call.id, None)
        call.header["ahead"] = slot.threads == 1 and bool(slot.calls)  # the runner then marks its output
        slot.calls[call.id] = call
        self._out.append(Send(slot, Run(call.id, call.header, call.buffers)))
        self._out += [Send(slot, message) for message in call.backlog]
        self._runners.read_page_soon(slot, call, self._now)

    def _queue(self, call: NodeCall) -> None:
        call.began, call.entered = None, 0.0
        self.queue[call.id] = call
        if len(self.queue) > 1:
            self.queue = OrderedDict(sorted(self.queue.items(), key=lambda item: item[1].order))

    def _start_limit(self, call: NodeCall) -> None:
        call.backlog.clear()
        if call.header.get("timeout") is not None:
            self._timers.add(self._limit(call), "limit", call)

    def _limit(self, call: NodeCall) -> float:
        """When a call is stopped; before its body starts it has as long as a process to become ready."""
        timeout = call.header.get("timeout") or 0.0
        if call.entered:
            return call.entered + timeout
        return (call.began or 0.0) + max(timeout, self._ready_within)

    def _kill_process(self, call: NodeCall, slot: Slot | None) -> None:
        assert slot is not None
        call.killed = True
        self._doom(slot, "another call in its process had to be killed")
        self._out.append(Kill(slot))

    def _tell_verdict(self, call: NodeCall, slot: Slot | None, verdict: Verdict | None) -> None:
        assert verdict is not None
        seconds = verdict.seconds
        if seconds is None and call.began is not None:
            seconds = max(0.0, self._now - call.began)
        if seconds is not None:
            self.mean = seconds if self.mean is None else 0.8 * self.mean + 0.2 * seconds
        self._tell(completed(verdict, call, slot, seconds))
        call.buffers = []


class CallTimers:
    def __init__(self, calls: Mapping[str, NodeCall]) -> None:
        self._calls = calls
        self._heap: list[tuple[float, int, str, NodeCall]] = []
        self._count = itertools.count()

    def add(self, when: float, event: str, call: NodeCall) -> None:
        heapq.heappush(self._heap, (when, next(self._count), event, call))
        if len(self._heap) > 64 + 4 * len(self._calls):
            self._heap = [entry for entry in self._heap if self._waits(entry[3])]
            heapq.heapify(self._heap)

    def due(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def over(self, now: float) -> Iterator[tuple[str, NodeCall]]:
        while self._heap and self._heap[0][0] <= now:
            _, _, event, call = heapq.heappop(self._heap)
            if self._waits(call):
                yield event, call

    def _waits(self, call: NodeCall) -> bool:
        return self._calls.get(call.id) is call


class Audit:
    def __init__(self, runners: RunnerSlots) -> None:
        self._runners = runners
        self._seen: set[str] = set()

    def find(self, call_waits: bool, killable: bool, now: float) -> dict[str, str]:
        """Problems seen now and last time. Unkillable processes do not count while the fork server does not answer."""
        runners = self._runners
        slots = runners.all.values() if killable else ()
        found = {slot.name: text for slot in slots if (text := runners.overdue(slot, now))}
        if call_waits:
            found["queue"] = "a call waited beside a free slot; it was sent"
        if runners.lacking(now):
            found["spawn"] = "a process was missing; it was started"
        twice = {name: found[name] for name in sorted(found.keys() & self._seen)}
        self._seen = set(found)
        return twice


def stopped(call: NodeCall, verdict: Verdict | None) -> Verdict:
    seconds = verdict.seconds if verdict is not None else None
    if call.why == "timeout":
        stack = verdict.stack if isinstance(verdict, Stopped) else None
        limit, loading = call.header.get("timeout") or 0.0, not call.entered
        return TimedOut(id=call.id, seconds=seconds, limit=limit, killed=call.killed, loading=loading, stack=stack)
    return _STOPPED.get(call.why, Cancelled)(id=call.id, seconds=seconds)


_STOPPED: dict[str, type[Cancelled | Stopped | GangStopped | Stalled]] = {
    "stopped": Stopped,
    "gang": GangStopped,
    "stalled": Stalled,
}


def completed(verdict: Verdict, call: NodeCall, slot: Slot | None, seconds: float | None) -> Verdict:
    """If the runner is being replaced, the verdict says so: a group may be broken."""
    begun = slot is not None and call.began is not None
    replaced = isinstance(verdict, Crashed) or (begun and slot is not None and slot.state != "ready")
    place = slot.place if begun and slot is not None else 0
    if replaced or place or seconds != verdict.seconds:
        return replace(verdict, seconds=seconds, replaced=replaced, place=place)
    return verdict
