"""The engine of a pool, on the client: hears users, nodes and the clock, asks `Core` what that means, and does it.

    user's thread, I/O thread --> Engine --(lock)--> Core --actions--> Engine --> links, futures, events

Everything happens under one lock, so two broadcasts are queued in the same order on all nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skyward import events
from skyward.client.call import Call, CallFuture, discard, unpacked
from skyward.client.calls import Action
from skyward.client.connections import Connections
from skyward.client.core import Core
from skyward.client.output_lines import Transcript
from skyward.client.settings import PoolSettings
from skyward.client.stream_arguments import feed
from skyward.client.uploads import Parts, Uploads
from skyward.errors import BootstrapError, NodeLost, PoolClosed
from skyward.machines.replacement import Replacing
from skyward.node.protocol import AgentToClient, ClientToAgent
from skyward.node.receiver import Message, Receiver
from skyward.transport.streams import Consumer, Producer, Stream

__all__ = ["Engine", "Surroundings"]

_PATIENCE = 15.0
_REPLACING = 30.0
_JOIN = 30.0


@dataclass(frozen=True)
class Surroundings:
    """What an engine has around it: clock, connections, threads. The tests' simulation has others."""

    clock: Callable[[], float] = time.monotonic
    connections: type[Connections] = Connections
    uploads: type[Uploads] = Uploads
    replacing: type[Replacing] = Replacing
    feed: Callable[[Call, str, Any, Callable[[list[Any], list[Any]], None]], Producer] = feed


class Engine:
    """Moves calls to nodes and results back."""

    def __init__(self, plan: PoolSettings, surroundings: Surroundings | None = None) -> None:
        around = surroundings or Surroundings()
        self._plan, self._clock, self._feed = plan, around.clock, around.feed
        self._connections = around.connections(plan.nodes, plan.reach, plan.revive)
        self._lock, self._changed = self._connections.lock, self._connections.changed
        self._replacing = around.replacing(plan.substitutes, self)
        self._core = Core(plan, self._connections, self._replacing)
        self._transcripts = [Transcript() for _ in range(plan.nodes)]
        self._byes: set[int] = set()
        self._uploads = around.uploads(
            self._connections.post, lambda n: self._connections.peers[n].link.kept_bytes, plan.address, self._unsendable
        )
        self._parts = Parts(plan.directory)
        self._receiver = Receiver(AgentToClient, self, self._core)
        self._connections.follow(self, self)
        self.abouts = self._connections.abouts
        self.after_fork = self._connections.after_fork
        self.thread = self._connections.thread

    @property
    def settled(self) -> int:
        """How many calls have ended."""
        return self._core.calls.settled

    # opening and closing

    def open(self, deadline: float) -> None:
        """Connects to every node and waits until each has its runners ready."""
        self._connections.open(deadline)
        with self._lock:
            self._check_nodes()
            self._do(self._core.renew(self._clock()))
            while not self._core.nodes.all_ready():
                if self._clock() > deadline:
                    late = [n.number for n in self._core.nodes.all if n.state != "ready"]
                    raise BootstrapError("starting runners", f"nodes {late} were not ready in time.")
                self._changed.wait(0.5)
                self._check_nodes()

    def close(self, grace: float) -> None:
        """Fails what is open, has runners leave their hooks, and disconnects."""
        with self._lock:
            self._connections.closing = True
            self._do(self._core.close(self._clock()))
            for number in self._connected():
                self._connections.post(number, [ClientToAgent.bye(grace)])
            end = self._clock() + grace + 1.5
            while not self._byes.issuperset(self._connected()) and self._clock() < end:
                self._changed.wait(0.05)
        self._replacing.close(_REPLACING)
        self._uploads.close()
        self._connections.close()

    def abandon(self) -> None:
        """Drops all connections at once; what is on the nodes ends by itself."""
        self._uploads.close()
        self._connections.close()

    def _connected(self) -> list[int]:
        return [number for number in range(self._plan.nodes) if self._connections.connected(number)]

    def _check_nodes(self) -> None:
        for node in self._core.nodes.all:
            if node.error is not None:
                raise node.error

    # calls

    def send(self, calls: Sequence[Call]) -> None:
        """Queues calls for any node."""
        with self._lock:
            self._check_open()
            for call in calls:
                self._adopt(call)
            self._do(self._core.submit(calls, self._clock()))

    def send_to(self, calls: Sequence[tuple[int, Call]]) -> None:
        """Queues calls for certain nodes, all of them or none; more than one of them succeed or fail as one."""
        with self._lock:
            self._await_up([number for number, _ in calls])
            for _, call in calls:
                self._adopt(call)
            self._do(self._core.submit_to(calls, self._clock()))

    def up(self) -> list[int]:
        """The numbers of the nodes that take calls now."""
        with self._lock:
            return sorted(self._core.nodes.takes_calls())

    def stop(self, call: Call, why: str = "cancelled") -> None:
        """Ends a call wherever it is; its verdict comes as for any other call."""
        with self._lock:
            self._do(self._core.cancel(call, why, self._clock()))

    def _adopt(self, call: Call) -> None:
        call.future.on_cancel = lambda: self.stop(call)

    def _check_open(self) -> None:
        """Refuses calls when there is no node, or no pool."""
        if self._connections.closing:
            raise PoolClosed("the pool is closed; open it again with `with sky.ComputePool(...) as pool:`.")
        lost = self._core.nodes.no_node_left()
        if lost is not None and self._core.nodes.gang:
            raise NodeLost(lost.number, reason=f"{lost.gone}; the others form no group without it", attempts=0)
        if lost is not None:
            raise NodeLost(0, reason=f"no node of the pool is left: {lost.gone}", attempts=0)

    def _await_up(self, numbers: Sequence[int]) -> None:
        """Waits for nodes that are being restarted, replaced or out of reach; a node that is gone is an error."""
        deadline = self._clock() + max(_PATIENCE, self._plan.lease)
        nodes = self._core.nodes
        while True:
            self._check_open()
            missing = [n for n in numbers if n not in nodes.takes_calls()]
            if not missing:
                return
            for node in (nodes.all[n] for n in missing):
                if nodes.given_up(node.number) or self._clock() > deadline:
                    why = node.gone or ("its machine is being taken away" if node.leaving else "it is not ready")
                    raise NodeLost(node.number, reason=why, attempts=0)
            self._changed.wait(0.2)

    # doing what the core says; with the lock held

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            getattr(self, _METHODS[action[0]])(*action[1:])

    def _do_post(self, number: int, messages: list[Any], buffers: Sequence[Any]) -> None:
        self._connections.post(number, messages, buffers)

    def _do_load(self, number: int, uploads: Any) -> None:
        if not self._plan.local:  # local nodes read the files themselves
            self._uploads.load(number, uploads)

    def _do_feed(self, call: Call, number: int) -> None:
        for key, source in call.inputs.items():
            call.feeders[key] = self._feed(call, key, source, lambda m, b: self._connections.post(number, m, b))

    def _do_settle(self, call: Call, about: dict[str, Any], pieces: list[Any]) -> None:
        if call.stream is not None:
            call.stream.end()
        elif call.future.cancelled():
            discard(about)
        else:
            self._connections.defer(call.future.settle, about, pieces)

    def _do_fail(self, call: Call, error: BaseException) -> None:
        if call.stream is not None:
            call.stream.end(error)
        self._connections.defer(call.future.fail, error)

    def _do_end(self, call: Call) -> None:
        self._plan.release(list(call.uploads))
        for producer in call.feeders.values():
            producer.close()
        call.future.on_cancel = None  # future and call must not keep each other

    def _do_discard(self, about: dict[str, Any]) -> None:
        discard(about)

    def _do_emit(self, event: events.Event) -> None:
        self._connections.defer(self._plan.emit, event)

    def _do_reconnect(self, number: int) -> None:
        self._connections.reconnect(number)

    def _do_renounce(self, number: int) -> None:
        self._connections.renounce(number)

    def _do_inquire(self) -> None:
        self._replacing.inquire()

    def _do_forget_blobs(self, number: int) -> None:
        self._uploads.forget(number)

    # what nodes say; called by `Connections` with its lock held

    def heed(self, number: int, message: Message, buffers: list[Any]) -> None:
        """A message of a node."""
        actions = self._receiver.hear(message, buffers, number, self._clock())
        if actions:
            self._do(actions)
        if message[0] in ("ready", "failed", "ports", "notice", "replaced"):
            self._changed.notify_all()

    def _from_agent_verdict(
        self, number: int, now: float, kind: str, id: str, metadata: dict[str, Any], buffers: list[Any]
    ) -> list[Action]:
        if not self._plan.local:
            self._parts.place(metadata)
        if id in self._core.calls.calls:
            for stream, text, progress in self._transcripts[number].end(id):
                self._do_emit(events.Output(self._plan.pool, number, stream, text, id, progress))
        return self._core.verdict(number, kind, id, metadata, buffers, now)

    def mishandled(self, number: int, message: Sequence[Any], error: BaseException) -> None:
        """A message could not be handled."""
        self._do(self._core.mishandled(number, message, error, self._clock()))

    def turn(self) -> bool:
        """Does what is due; True if this should be done again soon."""
        self._do(self._core.turn(self._clock()))
        return self._core.calls.soon()

    def collapse(self, error: BaseException) -> None:
        """The I/O thread has failed: every open call fails, since no result can arrive."""
        self._do(self._core.collapse(error, self._clock()))

    def _unsendable(self, number: int, blob: str, error: Exception) -> None:
        with self._lock:
            self._do(self._core.calls.unsendable(number, blob, error, self._clock()))

    def _from_agent_streaming(self, number: int, now: float, id: str) -> None:
        call = self._core.calls.calls.get(id)
        if call is None or call.node != number:
            return

        def close() -> None:
            with self._lock:
                self._do(self._core.calls.stream_closed(call, self._clock()))

        consumer = call.stream = Consumer(
            grant=lambda count: self._connections.post(number, [ClientToAgent.grant(call.id, count)]),
            close=close,
            load=lambda item: unpacked(call.name, item[0], item[1:]),
        )
        # the engine keeps the consumer only: when the user lets go of the stream, it closes itself
        future, call.future = call.future, CallFuture(call.name)
        call.future.owner = future.owner
        if future.cancelled():
            self._connections.defer(consumer.close)
        else:
            self._connections.defer(future.fulfil, Stream[Any](consumer))

    def _from_agent_items(self, number: int, now: float, id: str, metadata: list[Any], buffers: list[Any]) -> None:
        call = self._core.calls.calls.get(id)
        items: list[tuple[Any, int]] = []
        at = 0
        for entry in metadata:
            count: int = entry if isinstance(entry, int) else entry[0]
            about: dict[str, Any] = {} if isinstance(entry, int) else entry[1]
            if not self._plan.local:
                self._parts.place(about)
            if call is None or call.stream is None:
                discard(about)
            pieces = buffers[at : at + count]
            size = sum(piece.nbytes for piece in pieces) + sum(size for _, size in about.get("blobs", {}).values())
            items.append(([about, *pieces], size))
            at += count
        if call is not None and call.stream is not None:
            call.stream.feed(items)

    def _from_agent_want(self, number: int, now: float, id: str, argument: str, count: int) -> None:
        call = self._core.calls.calls.get(id)
        if call is not None and argument in call.feeders:
            call.feeders[argument].grant(count)

    def _from_agent_out(self, number: int, now: float, stream: Any, id: str | None, buffers: list[Any]) -> None:
        if id in self._core.calls.calls:
            self._do(self._core.calls.started(number, id, now))
        else:
            id = None
        for text, progress in self._transcripts[number].feed(stream, id, buffers[0]):
            self._do_emit(events.Output(self._plan.pool, number, stream, text, id, progress))

    def _from_agent_part(self, number: int, now: float, name: str, offset: int, buffers: list[Any]) -> None:
        self._parts.accept(name, offset, buffers[0])

    def _from_agent_need(self, number: int, now: float, blob: str) -> None:
        self._uploads.need(number, blob)

    def _from_agent_bye(self, number: int, now: float) -> None:
        for stream, text, progress in self._transcripts[number].end(None):
            self._do_emit(events.Output(self._plan.pool, number, stream, text, None, progress))
        self._byes.add(number)
        self._changed.notify_all()

    # connections; called by `Connections` with its lock held

    def attached(self, number: int, *, restarted: bool) -> None:
        """There is a connection to a node (again)."""
        self._do(self._core.attached(number, restarted=restarted, now=self._clock()))

    def broken(self, number: int) -> None:
        """The connection to a node is gone."""
        self._do(self._core.broken(number, self._clock()))

    def pause(self, number: int, error: Exception) -> float | None:
        """A node was tried again without effect: says when to try once more."""
        pause, actions = self._core.retry(number, error, self._clock())
        self._do(actions)
        return pause

    def unreachable(self, number: int, error: Exception) -> None:
        """A node could not be reached at all."""
        self._do(self._core.unreachable(number, error, self._clock()))

    # other machines for lost nodes; called by the threads of `replacing`, without the lock

    def await_vacant(self, node: int) -> bool:
        """Waits until a node has nothing to do or is lost, and takes it out; False if the pool is closed."""
        with self._lock:
            while not self._connections.closing:
                vacant, actions = self._core.vacate(node, self._clock())
                self._do(actions)
                if vacant:
                    return True
                self._changed.wait(0.2)
            return False

    def connect(self, node: int) -> None:
        """Connects to the machine that stands in for a node's old one."""
        self._connections.connect(node, self._clock() + _JOIN)
        if not self._connections.connected(node):
            raise BootstrapError("connecting", "the machine that was to take its place cannot be reached.", node)

    def not_replaced(self, node: int, reason: str) -> None:
        """No machine was found: what waits for one fails."""
        with self._lock:
            self._do(self._core.not_replaced(node, reason, self._clock()))
            self._changed.notify_all()

    def missing(self) -> list[int]:
        """The nodes of which it is not known whether they are lost."""
        with self._lock:
            return self._core.nodes.silent()

    def ended(self, node: int, reason: str) -> None:
        """A node's machine is known to be gone."""
        with self._lock:
            self._do(self._core.machine_ended(node, reason, self._clock()))
            self._changed.notify_all()

    def pause_for(self, seconds: float) -> bool:
        """Waits; False if the pool is closed meanwhile."""
        return self._connections.pause(seconds)

    def tell(self, node: int, text: str) -> None:
        """Says how far it is with a node."""
        self._connections.defer(self._plan.emit, events.NodePhase(self._plan.pool, node, text))


_METHODS = {
    kind: "_do_" + kind.replace(" ", "_")
    for kind in (
        *("post", "load", "feed", "settle", "fail", "end", "discard", "emit"),
        *("reconnect", "renounce", "inquire", "forget blobs"),
    )
}
