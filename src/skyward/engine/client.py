"""The client's side of the engine: sends calls to nodes, settles them, and starts again what was lost with a node.

A broadcast is queued on all nodes under one lock, so two broadcasts run in the same order everywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

from skyward import events
from skyward.engine import verdicts
from skyward.engine.calls import Call, CallFuture, discard, unpacked
from skyward.engine.cargo import Cargo, Parts
from skyward.engine.dispatch import Dispatch
from skyward.engine.feed import feed
from skyward.engine.hub import Hub
from skyward.engine.lines import Transcript
from skyward.engine.muster import Muster
from skyward.engine.plan import Plan
from skyward.errors import NodeLost, PoolClosed, Preempted, SkywardError
from skyward.streams import Consumer, Stream

__all__ = ["Engine"]

_STOP_GRACE = 3.0
_SUSPICION = 0.5
_STREAM_WARNING = 5.0
_REPLACING = 30.0


class Engine:
    """Moves calls to nodes and results back."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._hub = Hub(plan.nodes, plan.reach, plan.context, plan.revive)
        self._lock, self._changed = self._hub.lock, self._hub.changed
        self._dispatch: Dispatch[Call] = Dispatch(plan.nodes, plan.slots)
        self._calls: dict[str, Call] = {}
        self._transcripts = [Transcript() for _ in range(plan.nodes)]
        self._byes: set[int] = set()
        self._cargo = Cargo(self._hub.post, lambda n: self._hub.peers[n].link.kept_bytes, plan.address)
        self._parts = Parts(plan.directory)
        self._muster = Muster(plan, self._hub, self._dispatch, self._cargo, self)
        self._hub.follow(self, self._muster)
        self._warned = False
        self.abouts = self._hub.abouts
        self.after_fork = self._hub.after_fork
        self.thread = self._hub.thread
        self.settled = 0

    # opening and closing

    def open(self, deadline: float) -> None:
        """Connects to every node and waits until each has its runners ready."""
        self._hub.open(deadline)
        with self._changed:
            self._muster.await_ready(deadline)

    def close(self, grace: float) -> None:
        """Fails what is open, has runners leave their hooks, and disconnects."""
        with self._changed:
            self._hub.closing = True
            for call in [*self._dispatch.drain_queue(), *self._calls.values()]:
                reason = PoolClosed(f"the pool was closed while {call.name} was waiting or running.")
                self._fail(call, reason, "cancelled")
            for number in self._connected():
                self._hub.post(number, [["bye", grace, 0]])
            end = time.monotonic() + grace + 1.5
            while not self._byes.issuperset(self._connected()) and time.monotonic() < end:
                self._changed.wait(0.05)
        self._muster.close(_REPLACING)
        self._cargo.close()
        self._hub.close()

    def abandon(self) -> None:
        """Drops all connections at once; what is on the nodes ends by itself."""
        self._cargo.close()
        self._hub.close()

    def _connected(self) -> list[int]:
        return [number for number in range(self._plan.nodes) if self._hub.connected(number)]

    # calls

    def send(self, calls: Sequence[Call]) -> None:
        """Queues calls for any node."""
        with self._lock:
            self._muster.check_open()
            self._muster.check_group()
            for call in calls:
                self._adopt(call)
                self._dispatch.add(call)
            self._pump()

    def send_to(self, calls: Sequence[tuple[int, Call]]) -> None:
        """Queues calls for certain nodes, all of them or none; more than one of them succeed or fail as one."""
        with self._changed:
            self._muster.await_up([number for number, _ in calls])
            gang = [call for _, call in calls]
            for number, call in calls:
                self._adopt(call)
                call.gang = gang if len(gang) > 1 else ()
                call.about["gang"] = True
                call.sent = time.monotonic()
                self._dispatch.pin(call, number)
                self._transmit(number, [call])

    def up(self) -> list[int]:
        """The numbers of the nodes that take calls now."""
        with self._lock:
            return [number for number in range(self._plan.nodes) if self._dispatch.is_up(number)]

    def stop(self, call: Call, why: str = "cancelled") -> None:
        """Ends a call wherever it is; its verdict comes as for any other call."""
        with self._lock:
            if call.id not in self._calls or call.stopping is not None:
                return
            call.stopping = why
            if self._dispatch.withdraw(call):
                self._fail(call, CancelledError(), "cancelled")
            elif call.node is not None:
                self._hub.post(call.node, [["cancel", call.id, why, _STOP_GRACE, 0]])

    def _adopt(self, call: Call) -> None:
        self._calls[call.id] = call
        call.future.on_cancel = lambda: self.stop(call)

    def _pump(self) -> None:
        """Sends what nodes have room for, one frame a node."""
        batches: dict[int, list[Call]] = {}
        for number, call in self._dispatch.next(time.monotonic()):
            batches.setdefault(number, []).append(call)
        for number, batch in batches.items():
            self._transmit(number, batch)

    def _transmit(self, number: int, calls: list[Call]) -> None:
        messages: list[Any] = []
        buffers: list[Any] = []
        for call in calls:
            call.about["attempt"] = call.attempt
            call.future.sent = True
            messages.append(["call", call.id, call.about, len(call.pieces)])
            buffers += call.pieces
            if call.cargo:
                self._cargo.load(number, call.cargo)
        self._hub.post(number, messages, buffers)
        for call in calls:
            for key, source in call.inputs.items():
                call.feeders[key] = feed(call, key, source, lambda m, b: self._hub.post(number, m, b))

    # verdicts

    def _forget(self, call: Call, seconds: float | None) -> bool:
        """Takes a call out of the books; False if it had left them already."""
        if self._calls.pop(call.id, None) is None:
            return False
        self._dispatch.settle(call, seconds)
        self._plan.release(list(call.cargo))
        for producer in call.feeders.values():
            producer.close()
        call.future.on_cancel = None  # future and call must not keep each other
        self.settled += 1
        return True

    def _fail(self, call: Call, error: BaseException, outcome: verdicts.Outcome, seconds: float = 0.0) -> None:
        if not self._forget(call, None):
            return
        others = [c for c in call.gang if c.id in self._calls]
        if call.gang and call.stopping is None:
            error.add_note(verdicts.gang_note(call, others, len(call.gang)))
        for other in others:
            if other.held is None:
                self.stop(other, "gang")
            else:
                other.stopping = "gang"
                self._release(other)
        self._tell_end(call, outcome, seconds)
        if call.stream is not None:
            call.stream.end(error)
        self._hub.defer(call.future.fail, error)

    def _hold(self, call: Call, *verdict: Any) -> None:
        """Keeps a rank's failure back for a moment: it may only have lost its peer, whose crash is about to be told."""
        call.held = verdict  # type: ignore[assignment] - the arguments of _fail
        self._release_later(call)

    def _release_later(self, call: Call) -> None:
        timer = threading.Timer(_SUSPICION, self._release, (call,))
        timer.daemon = True
        timer.start()

    def _release(self, call: Call) -> None:
        with self._lock:
            if call.held and any(self._in_doubt(other) for other in call.gang if other is not call):
                self._release_later(call)  # is that node lost, or only our connection? Its verdict tells the cause
                return
            held, call.held = call.held, None
            if held is not None:
                self._fail(call, *held)

    def _in_doubt(self, call: Call) -> bool:
        """Whether a call's node may be lost without our knowing it yet."""
        return call.node is not None and call.id in self._calls and self._muster.in_doubt(call.node)

    def _succeed(self, call: Call, about: dict[str, Any], pieces: list[Any]) -> None:
        wanted = self._forget(call, about["s"]) and not call.future.cancelled()
        self._tell_end(call, "ok", about["s"])
        if call.stream is not None:
            call.stream.end()
        elif wanted:
            self._hub.defer(call.future.settle, about, pieces)
        else:
            discard(about)

    def lost(self, call: Call, reason: str) -> None:
        """A call whose node is gone: started again elsewhere, if it may be."""
        node = -1 if call.node is None else call.node
        if call.stopping is not None:
            self._fail(call, CancelledError(), "cancelled")
        elif call.attempt < call.retries and call.stream is None and not call.pinned and not self._hub.closing:
            self._dispatch.settle(call)
            call.attempt += 1
            call.announced = False
            self._dispatch.add(call, first=True)
            text = (
                f"{call.name} was lost with node {node} ({reason}); attempt {call.attempt} of {call.retries} follows."
            )
            self._emit(events.Notice(self._plan.pool, text, "warning"))
        else:
            self._fail(call, NodeLost(node, call.name, reason, call.attempt + 1, call.pinned), "lost")

    def forsaken(self, number: int, reason: str) -> None:
        """There is no node for calls that wait, and none is coming."""
        for call in self._dispatch.drain_queue():
            self._fail(call, NodeLost(number, call.name, reason, call.attempt), "lost")

    def _tell_end(self, call: Call, outcome: verdicts.Outcome, seconds: float) -> None:
        node = -1 if call.node is None else call.node
        if call.node is not None:
            self._on_started(node, call.id, call)
        self._emit(events.CallEnded(self._plan.pool, call.id, call.name, node, outcome, seconds))

    def _emit(self, event: events.Event) -> None:
        self._hub.defer(self._plan.emit, event)

    # what nodes say; called by the hub with its lock held

    def heed(self, number: int, kind: str, body: list[Any], buffers: list[Any]) -> None:
        """A message of a node."""
        act = getattr(self, f"_on_{kind}", None) or getattr(self._muster, f"on_{kind}", None)
        if act is not None:
            act(number, *body, *([buffers] if buffers else []))
            return
        call = self._calls.get(body[0])
        if self._plan.lease:
            self._parts.place(body[1])
        if call is None:
            discard(body[1])
            return
        self._muster.gang = self._muster.gang or (body[1].get("group", False) and self._plan.nodes > 1)
        if self._muster.gang and body[1].get("replaced") and not self._hub.closing:
            self._muster.taint()
        for stream, text, progress in self._transcripts[number].end(call.id):
            self._emit(events.Output(self._plan.pool, number, stream, text, call.id, progress))
        if kind == "done":
            self._succeed(call, body[1], buffers)
        elif kind == "lost":
            self.lost(call, body[1]["reason"])
        else:
            error, outcome = verdicts.failure(self._plan.pool, call, number, kind, body[1], buffers)
            if self._muster.is_leaving(number) and (outcome == "crashed" or isinstance(error, Preempted)):
                self.lost(call, "its machine is being taken away")
                return
            suspect = outcome == "error" and (self._muster.gang or self._plan.lease)
            if suspect and any(c is not call and c.id in self._calls for c in call.gang):
                self._hold(call, error, outcome, body[1].get("s", 0.0))
            else:
                self._fail(call, error, outcome, body[1].get("s", 0.0))

    def turn(self) -> bool:
        """Sends what there is room for, takes back what waits in vain; True if this should be done again soon."""
        self._muster.tell_alone()
        if self._muster.tainted and not any(call.stopping for call in self._calls.values()):
            self._muster.renew()  # after every process of the old group has had its verdict
        self._pump()
        self._warn_of_streams()
        for number, call in self._dispatch.stale(time.monotonic()):
            self._hub.post(number, [["recall", call.id, 0]])
        return self._dispatch.crowded()

    def collapse(self, error: BaseException) -> None:
        """Nobody listens to nodes any more: whoever waits for a call must not wait for ever."""
        for call in [*self._dispatch.drain_queue(), *self._calls.values()]:
            text = (
                f"{call.name} cannot end: the pool's own thread has failed ({error!r}). Close the pool; this is a bug."
            )
            self._fail(call, SkywardError(text), "lost")

    def _warn_of_streams(self) -> None:
        """Says so when calls wait for slots that only half-read streams hold: the reader may be the one who waits."""
        if self._warned or not any(call.stream for call in self._calls.values()):
            return
        now = time.monotonic()
        busy = [call for call in self._calls.values() if call.announced]
        waiting = [call for call in self._calls.values() if not call.announced and call.stream is None]
        if waiting and all(call.stream for call in busy) and now - min(call.made for call in waiting) > _STREAM_WARNING:
            self._warned = True
            text = (
                f"{waiting[0].name} waits for a slot, and all are held by streams that are not read to their end "
                f"({busy[0].name if busy else 'a generator'}). Close the stream, or give the pool more slots."
            )
            self._emit(events.Notice(self._plan.pool, text, "warning"))

    def _on_started(self, number: int, call_id: str, call: Call | None = None) -> None:
        call = call or self._calls.get(call_id)
        if call is not None and not call.announced:
            call.announced = True
            self._emit(events.CallStarted(self._plan.pool, call.id, call.name, number, call.attempt))

    def _on_recalled(self, number: int, call_id: str) -> None:
        call = self._calls.get(call_id)
        if call is not None and call.stopping is not None:
            self._fail(call, CancelledError(), "cancelled")
        elif call is not None:
            self._dispatch.settle(call)
            call.node = None
            self._dispatch.add(call, first=True)

    def _on_streaming(self, number: int, call_id: str) -> None:
        call = self._calls.get(call_id)
        if call is None:
            return

        def close() -> None:
            self._hub.post(number, [["close", call.id, 0]])
            timer = threading.Timer(_STOP_GRACE, self.stop, (call,))
            timer.daemon = True
            timer.start()

        consumer = call.stream = Consumer(
            grant=lambda count: self._hub.post(number, [["grant", call.id, count, 0]]),
            close=close,
            load=lambda item: unpacked(call.name, item[0], item[1:]),
        )
        # the engine keeps the consumer only: when the user lets go of the stream, it closes itself
        future, call.future = call.future, CallFuture(call.name)
        call.future.owner = future.owner
        if future.cancelled():
            self._hub.defer(consumer.close)
        else:
            self._hub.defer(future.fulfil, Stream[Any](consumer))

    def _on_items(self, number: int, call_id: str, abouts: list[Any], buffers: list[Any]) -> None:
        call = self._calls.get(call_id)
        items: list[tuple[Any, int]] = []
        at = 0
        for entry in abouts:
            count: int = entry if isinstance(entry, int) else entry[0]
            about: dict[str, Any] = {} if isinstance(entry, int) else entry[1]
            if self._plan.lease:
                self._parts.place(about)
            if call is None or call.stream is None:
                discard(about)
            pieces = buffers[at : at + count]
            size = sum(piece.nbytes for piece in pieces) + sum(size for _, size in about.get("blobs", {}).values())
            items.append(([about, *pieces], size))
            at += count
        if call is not None and call.stream is not None:
            call.stream.feed(items)

    def _on_want(self, number: int, call_id: str, key: str, count: int) -> None:
        call = self._calls.get(call_id)
        if call is not None and key in call.feeders:
            call.feeders[key].grant(count)

    def _on_out(self, number: int, stream: Any, call_id: str | None, buffers: list[Any]) -> None:
        if call_id in self._calls:
            self._on_started(number, call_id)
        else:
            call_id = None
        for text, progress in self._transcripts[number].feed(stream, call_id, buffers[0]):
            self._emit(events.Output(self._plan.pool, number, stream, text, call_id, progress))

    def _on_sample(self, number: int, sample: dict[str, Any]) -> None:
        self._emit(events.NodeSample(self._plan.pool, number, **sample))

    def _on_part(self, number: int, name: str, offset: int, buffers: list[Any]) -> None:
        self._parts.accept(name, offset, buffers[0])

    def _on_need(self, number: int, name: str) -> None:
        self._cargo.need(number, name)

    def _on_bye(self, number: int) -> None:
        for stream, text, progress in self._transcripts[number].end(None):
            self._emit(events.Output(self._plan.pool, number, stream, text, None, progress))
        self._byes.add(number)
        self._changed.notify_all()
