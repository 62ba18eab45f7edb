"""The client's side of the engine: sends calls to nodes, settles them, and starts again what was lost with a node.

A broadcast is queued on all nodes under one lock, so two broadcasts run in the same order everywhere.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

from skyward import events, failures
from skyward.engine import verdicts
from skyward.engine.calls import Call, CallFuture, discard, unpacked
from skyward.engine.cargo import Cargo, Parts
from skyward.engine.dispatch import Dispatch
from skyward.engine.feed import feed
from skyward.engine.hub import SILENCE, Hub
from skyward.engine.lines import Transcript
from skyward.engine.patience import given_up, next_try
from skyward.errors import BootstrapError, NodeLost, PluginError, PoolClosed
from skyward.streams import Consumer, Stream

__all__ = ["Engine", "Plan"]

_PATIENCE = 15.0
_REFUSALS = 3
_STOP_GRACE = 3.0
_SUSPICION = 0.5
_STREAM_WARNING = 5.0
_PORTS = 3


@dataclass(frozen=True)
class Plan:
    """What the engine needs to know about its pool."""

    pool: str
    nodes: int
    slots: int
    reach: Callable[[int], socket.socket]
    context: ssl.SSLContext
    setup: Callable[[int, list[dict[str, Any]], list[int]], tuple[dict[str, Any], list[Any]]]
    emit: Callable[[events.Event], None]
    release: Callable[[Sequence[str]], None]
    gang: bool
    """Whether runners form groups when the pool opens: then losing one means making all of them anew."""
    lease: float
    """How long nodes on other machines go on without us; 0 for nodes of this computer, which share its fate."""
    directory: str
    """Where the client keeps large buffers."""
    address: Callable[[int], tuple[str, int] | None]
    """Where other nodes reach a node's agent, if they can."""
    revive: Callable[[int], None] | None
    """Sets a lost node's machine up again, if it answers."""


@dataclass(eq=False)
class _Node:
    number: int
    ready: bool = False
    bye: bool = False
    gone: str = ""
    away: float = 0.0
    refusals: int = 0
    error: BaseException | None = None
    transcript: Transcript = field(default_factory=Transcript)


class Engine:
    """Moves calls to nodes and results back."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._hub = Hub(plan.nodes, plan.reach, plan.context, self, plan.revive)
        self._lock, self._changed = self._hub.lock, self._hub.changed
        self._nodes = [_Node(i) for i in range(plan.nodes)]
        self._dispatch: Dispatch[Call] = Dispatch(plan.nodes, plan.slots)
        self._calls: dict[str, Call] = {}
        self._gang = plan.gang
        self._cargo = Cargo(self._hub.post, lambda n: self._hub.peers[n].link.kept_bytes, plan.address)
        self._parts = Parts(plan.directory)
        self._alone = 0.0  # since when no node has been connected, and how often that was said
        self._alone_told = 0
        self._tainted = self._unformed = self._warned = False
        self._generation = 0
        self._ports: list[int] = []
        self.after_fork = self._hub.after_fork
        self.thread = self._hub.thread
        self.settled = 0

    # opening and closing

    def open(self, deadline: float) -> None:
        """Connects to every node and waits until each has its runners ready."""
        self._hub.open(deadline)
        with self._changed:
            self._check_nodes()
            self._renew()
            while not all(n.ready for n in self._nodes):
                if time.monotonic() > deadline:
                    late = [n.number for n in self._nodes if not n.ready]
                    raise BootstrapError("starting runners", f"nodes {late} were not ready in time.")
                self._changed.wait(0.5)
                self._check_nodes()

    def abouts(self) -> list[dict[str, Any]]:
        """What each node said of itself in its greeting."""
        return [p.about for p in self._hub.peers]

    def close(self, grace: float) -> None:
        """Fails what is open, has runners leave their hooks, and disconnects."""
        with self._changed:
            self._hub.closing = True
            for call in [*self._dispatch.drain_queue(), *self._calls.values()]:
                reason = PoolClosed(f"the pool was closed while {call.name} was waiting or running.")
                self._fail(call, reason, "cancelled")
            for node in self._nodes:
                if self._hub.connected(node.number):
                    self._hub.post(node.number, [["bye", grace, 0]])
                else:
                    node.bye = True
            end = time.monotonic() + grace + 1.5
            while not all(n.bye for n in self._nodes) and time.monotonic() < end:
                self._changed.wait(0.05)
        self._cargo.close()
        self._hub.close()

    def abandon(self) -> None:
        """Drops all connections at once; what is on the nodes ends by itself."""
        self._cargo.close()
        self._hub.close()

    # calls

    def send(self, calls: Sequence[Call]) -> None:
        """Queues calls for any node."""
        with self._lock:
            self._check_open()
            self._check_group()
            for call in calls:
                self._adopt(call)
                self._dispatch.add(call)
            self._pump()

    def send_to(self, calls: Sequence[tuple[int, Call]]) -> None:
        """Queues calls for certain nodes, all of them or none; more than one of them succeed or fail as one."""
        with self._changed:
            self._await_up([number for number, _ in calls])
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
            return [n.number for n in self._nodes if self._dispatch.is_up(n.number)]

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
            if call.held and any(self._is_away(other) for other in call.gang if other is not call):
                self._release_later(call)  # is that node lost, or only our connection? Its verdict tells the cause
                return
            held, call.held = call.held, None
            if held is not None:
                self._fail(call, *held)

    def _succeed(self, call: Call, about: dict[str, Any], pieces: list[Any]) -> None:
        wanted = self._forget(call, about["s"]) and not call.future.cancelled()
        self._tell_end(call, "ok", about["s"])
        if call.stream is not None:
            call.stream.end()
        elif wanted:
            self._hub.defer(call.future.settle, about, pieces)
        else:
            discard(about)

    def _lost(self, call: Call, reason: str) -> None:
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
        act = getattr(self, f"_on_{kind}", None)
        if act is not None:
            act(number, *body, *([buffers] if buffers else []))
            return
        call = self._calls.get(body[0])
        if self._plan.lease:
            self._parts.place(body[1])
        if call is None:
            discard(body[1])
            return
        self._gang = self._gang or (body[1].get("group", False) and len(self._nodes) > 1)
        if self._gang and body[1].get("replaced") and not self._hub.closing:
            self._taint()
        for stream, text, progress in self._nodes[number].transcript.end(call.id):
            self._emit(events.Output(self._plan.pool, number, stream, text, call.id, progress))
        if kind == "done":
            self._succeed(call, body[1], buffers)
        elif kind == "lost":
            self._lost(call, body[1]["reason"])
        else:
            error, outcome = verdicts.failure(self._plan.pool, call, number, kind, body[1], buffers)
            suspect = outcome == "error" and (self._gang or self._plan.lease)
            if suspect and any(c is not call and c.id in self._calls for c in call.gang):
                self._hold(call, error, outcome, body[1].get("s", 0.0))
            else:
                self._fail(call, error, outcome, body[1].get("s", 0.0))

    def turn(self) -> bool:
        """Sends what there is room for, takes back what waits in vain; True if this should be done again soon."""
        if self._alone:
            self._tell_alone()
        if self._tainted and not any(call.stopping for call in self._calls.values()):
            self._renew()  # after every process of the old group has had its verdict
        self._pump()
        self._warn_of_streams()
        for number, call in self._dispatch.stale(time.monotonic()):
            self._hub.post(number, [["recall", call.id, 0]])
        return self._dispatch.crowded()

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
        for text, progress in self._nodes[number].transcript.feed(stream, call_id, buffers[0]):
            self._emit(events.Output(self._plan.pool, number, stream, text, call_id, progress))

    def _on_sample(self, number: int, sample: dict[str, Any]) -> None:
        self._emit(events.NodeSample(self._plan.pool, number, **sample))

    def _on_part(self, number: int, name: str, offset: int, buffers: list[Any]) -> None:
        self._parts.accept(name, offset, buffers[0])

    def _on_need(self, number: int, name: str) -> None:
        self._cargo.need(number, name)

    def _on_member(self, number: int, about: dict[str, Any]) -> None:
        self._emit(events.NodePhase(self._plan.pool, number, "joined"))

    def _on_ready(self, number: int, about: dict[str, Any]) -> None:
        if about["generation"] != self._generation:
            return
        self._nodes[number].ready = True
        self._emit(events.NodePhase(self._plan.pool, number, "ready"))
        self._raise_nodes()

    def _on_failed(self, number: int, about: dict[str, Any], buffers: list[Any]) -> None:
        if about.get("generation", self._generation) != self._generation:
            return
        if self._gang and any(n.gone or n.away for n in self._nodes if n.number != number):
            self._unformed = True  # it could form no group without them; all is made anew when they are back
            return
        error = failures.rebuild(about, buffers[0])
        if not isinstance(error, PluginError):
            error = BootstrapError("runner", about["message"], number)
        self._nodes[number].error = error
        self._down(number, str(error))
        self._give_up(number, str(error))

    def _on_replaced(self, number: int, about: dict[str, Any]) -> None:
        if about["generation"] != self._generation or self._hub.closing:
            return
        if self._gang and not self._tainted:
            self._taint()

    def _on_ports(self, number: int, ports: list[int]) -> None:
        self._ports = ports
        for node in self._nodes:
            if not node.gone:
                self._equip(node.number)

    def _on_bye(self, number: int) -> None:
        for stream, text, progress in self._nodes[number].transcript.end(None):
            self._emit(events.Output(self._plan.pool, number, stream, text, None, progress))
        self._nodes[number].bye = True
        self._changed.notify_all()

    # nodes that come and go

    def _taint(self) -> None:
        """A runner that may belong to a group is gone: no calls until all of them have been made anew."""
        if not self._tainted:
            self._tainted = True
            text = "a node lost its runner; all are made anew, since a group cannot be mended."
            self._emit(events.Notice(self._plan.pool, text))
        for node in self._nodes:
            self._dispatch.up(node.number, False)

    def _renew(self) -> None:
        """Makes the runners of all nodes (again), over fresh ports of the head."""
        self._generation += 1
        self._tainted = self._unformed = False
        for node in self._nodes:
            node.ready = False
            self._dispatch.up(node.number, False)
        if not any(n.gone for n in self._nodes):  # no group without them; when the last is back we come here again
            self._hub.post(0, [["ports", _PORTS, 0]])

    def _equip(self, number: int) -> None:
        settings, hooks = self._plan.setup(number, self.abouts(), self._ports)
        self._hub.post(number, [["setup", {**settings, "generation": self._generation}, len(hooks)]], hooks)

    def _raise_nodes(self) -> None:
        """Lets nodes that are ready and connected take calls; those of a group only together."""
        if self._tainted:
            return
        able = [n.number for n in self._nodes if n.ready and self._hub.connected(n.number)]
        if not self._gang or len(able) == len(self._nodes):
            for number in able:
                self._dispatch.up(number, True)
        self._changed.notify_all()

    def attached(self, number: int, *, restarted: bool) -> None:
        """There is a connection to a node (again); after a restart its agent knows nothing of us."""
        node = self._nodes[number]
        if node.away:
            self._emit(events.NodeUp(self._plan.pool, number))
        self._alone, self._alone_told, node.away, node.refusals = 0.0, 0, 0.0, 0
        if restarted or node.gone:
            node.ready, node.gone, node.error = False, "", None
            for call in self._dispatch.drain(number):
                self._lost(call, "its agent was restarted")
            if self._gang:
                self._renew()
            elif self._ports:
                self._equip(number)
        elif self._unformed:
            self._renew()
        self._raise_nodes()

    def broken(self, number: int) -> None:
        """The connection to a node is gone; it is tried again for a while."""
        node = self._nodes[number]
        if self._hub.closing:
            node.bye = True
            return
        node.away = time.monotonic()
        if self._plan.lease and not any(self._hub.connected(n.number) for n in self._nodes):
            self._alone = node.away
        self._down(number, "its connection broke; trying again")
        threading.Thread(target=self._hub.reconnect, args=(number,), daemon=True).start()

    def pause(self, number: int, error: Exception) -> float | None:
        """A node was tried again in vain: says when to try once more, and gives it up when it must be gone."""
        node, lease, now = self._nodes[number], self._plan.lease, time.monotonic()
        if not node.gone:
            silent = now - self._hub.peers[number].link.heard
            # once may be a tunnel that broke at that moment; the next attempt makes a new one
            node.refusals = node.refusals + 1 if isinstance(error, ConnectionRefusedError) else 0
            refused = node.refusals >= _REFUSALS
            if given_up(lease, now - node.away, silent, refused=refused, others_speak=self._others_speak(number)):
                first = str(error).partition("\n")[0]
                self._give_up(number, first if refused or not lease else f"nothing was heard of it for {silent:.0f} s")
        return None if node.gone and not lease else next_try(now - node.away, gone=bool(node.gone))

    def _is_away(self, call: Call) -> bool:
        """Whether a call runs on a node that we have no connection to, but have not given up."""
        if call.node is None or call.id not in self._calls or self._hub.closing:
            return False
        return self._nodes[call.node].away > 0 and not self._nodes[call.node].gone

    def _others_speak(self, number: int) -> bool:
        now = time.monotonic()
        return any(
            p.number != number and p.link.sock is not None and now - p.link.heard < SILENCE / 2 for p in self._hub.peers
        )

    def _tell_alone(self) -> None:
        """Says that no node can be reached: after half a minute, then every minute."""
        away = time.monotonic() - self._alone
        if away > 30 + 60 * self._alone_told:
            self._alone_told += 1
            text = (
                f"no connection to any node for {away:.0f} s. What runs there goes on; we try again until the lease "
                f"ends, {self._plan.lease - away:.0f} s from now."
            )
            self._emit(events.Notice(self._plan.pool, text, "warning"))

    def unreachable(self, number: int, error: Exception) -> None:
        """A node could not be reached for so long that it is given up."""
        reason = f"cannot connect to it: {error}"
        if self._nodes[number].error is None:
            self._nodes[number].error = NodeLost(number, reason=reason)
        self._down(number, reason)
        self._give_up(number, reason)

    def _down(self, number: int, reason: str) -> None:
        self._dispatch.up(number, False)
        self._emit(events.NodeDown(self._plan.pool, number, reason))

    def _give_up(self, number: int, reason: str) -> None:
        self._nodes[number].gone = reason
        self._cargo.forget(number)
        if self._plan.lease:
            self._hub.renounce(number)
            text = f"node {number} is lost: {reason}. Its calls go to other nodes, within their retries."
            self._emit(events.Notice(self._plan.pool, text, "warning"))
        for call in self._dispatch.drain(number):
            self._lost(call, reason)
        if all(n.gone for n in self._nodes) or (self._gang and any(n.gone for n in self._nodes)):
            for call in self._dispatch.drain_queue():
                self._fail(call, NodeLost(number, call.name, reason, call.attempt), "lost")
        self._changed.notify_all()

    def _check_nodes(self) -> None:
        for node in self._nodes:
            if node.error is not None:
                raise node.error

    def _await_up(self, numbers: Sequence[int]) -> None:
        """Waits for nodes that are being restarted or out of reach; a node that is gone is an error."""
        deadline = time.monotonic() + max(_PATIENCE, self._plan.lease)
        while True:
            self._check_open()
            missing = [n for n in numbers if not self._dispatch.is_up(n)]
            if not missing:
                return
            for node in (self._nodes[n] for n in missing):
                if node.gone or time.monotonic() > deadline:
                    raise NodeLost(node.number, reason=node.gone or "it is not ready", attempts=0)
            self._changed.wait(0.2)

    def _check_group(self) -> None:
        """Where runners form groups, none of them works while a node is gone."""
        gone = next((n for n in self._nodes if n.gone), None) if self._gang else None
        if gone is not None:
            raise NodeLost(gone.number, reason=f"{gone.gone}; the others form no group without it", attempts=0)

    def _check_open(self) -> None:
        if self._hub.closing:
            raise PoolClosed("the pool is closed; open it again with `with sky.ComputePool(...) as pool:`.")
        if all(n.gone for n in self._nodes):
            raise NodeLost(0, reason=f"no node of the pool is left: {self._nodes[0].gone}", attempts=0)
