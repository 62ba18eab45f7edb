"""The client's side of the engine: one link to each node, one thread that reads them all.

    caller's thread   packs, queues, and writes to the link itself (no hand-over on the way out)
    I/O thread        reads links, settles calls, sends what comes next, reconnects

Two calls never change places on their way to a node, and a broadcast is queued on all nodes under one lock: two
broadcasts run in the same order everywhere.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

from skyward import blobs, events, failures
from skyward.engine.calls import Call, unpacked
from skyward.engine.dispatch import Dispatch
from skyward.engine.lines import Lines
from skyward.engine.link import Broken, Link, greet, tune
from skyward.errors import (
    BootstrapError,
    NodeLost,
    PluginError,
    PoolClosed,
    SkywardError,
    TaskCrashed,
    TaskOutOfMemory,
    TaskTimeout,
)
from skyward.streams import Consumer, Producer

__all__ = ["Engine", "Plan"]

log = logging.getLogger("skyward.engine")

_PATIENCE = 15.0
_GANG_GRACE = 3.0
_CANCEL_GRACE = 3.0
_PORTS = 3


@dataclass(frozen=True)
class Plan:
    """What the engine needs to know about its pool."""

    pool: str
    nodes: int
    slots: int
    reach: Callable[[int], socket.socket]
    context: ssl.SSLContext
    setup: Callable[[int, int, list[int]], tuple[dict[str, Any], list[Any]]]
    emit: Callable[[events.Event], None]
    release: Callable[[Sequence[str]], None]
    gang: bool
    """Whether runners form groups: then losing one means making all of them anew."""


@dataclass
class _Node:
    number: int
    link: Link = field(default_factory=Link)
    incarnation: str = ""
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    ready: bool = False
    member: bool = False
    gone: str = ""
    error: BaseException | None = None
    bye: bool = False
    lines: dict[tuple[str, str | None], Lines] = field(default_factory=dict[tuple[str, "str | None"], Lines])


class Engine:
    """Moves calls to nodes and results back."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._session = os.urandom(8).hex()
        self._nodes = [_Node(i) for i in range(plan.nodes)]
        self._dispatch: Dispatch[Call] = Dispatch(plan.nodes, plan.slots)
        self._calls: dict[str, Call] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._generation = 0
        self._ports: list[int] = []
        self._closing = False
        self._joining: list[_Node] = []
        self._later: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._thread = threading.Thread(target=self._run, name="skyward-io", daemon=True)
        self.done = self.failed = 0

    # opening and closing

    def open(self, deadline: float) -> None:
        """Connects to every node and waits until each is a member with its runners ready."""
        self._thread.start()
        connecting = [threading.Thread(target=self._connect, args=(n, deadline), daemon=True) for n in self._nodes]
        for thread in connecting:
            thread.start()
        for thread in connecting:
            thread.join()
        self._check_opening()
        with self._lock:
            self._renew()
        self._await(lambda: all(n.ready and n.member for n in self._nodes), deadline, "starting runners")

    def abouts(self) -> list[dict[str, Any]]:
        """What each node said of itself in its greeting."""
        return [n.about for n in self._nodes]

    def close(self, grace: float) -> None:
        """Fails what is open, has runners leave their hooks, and disconnects."""
        with self._lock:
            self._closing = True
            waiting = [*self._dispatch.drain_queue(), *self._calls.values()]
        for call in waiting:
            self._fail(call, PoolClosed(f"the pool was closed while {call.name} was waiting or running."), "cancelled")
        with self._changed:
            for node in self._nodes:
                if node.link.sock is not None:
                    self._post(node, [["bye", grace, 0]])
                else:
                    node.bye = True
            end = time.monotonic() + grace + 1.5
            while not all(n.bye for n in self._nodes) and time.monotonic() < end:
                self._changed.wait(0.05)
        self.abandon()

    def abandon(self) -> None:
        """Drops all connections at once; what is on the nodes ends by itself."""
        self._closing = True
        self._stopped = True
        self._wake()
        if self._thread.ident and self._thread is not threading.current_thread():
            self._thread.join(5)

    _stopped = False

    def after_fork(self) -> None:
        """Closes this process's copies of the sockets; they belong to the parent."""
        for node in self._nodes:
            if node.link.sock is not None:
                os.close(node.link.sock.detach())

    # calls

    def send(self, calls: Sequence[Call]) -> None:
        """Queues calls for any node."""
        with self._lock:
            self._check_open()
            for call in calls:
                self._adopt(call)
                self._dispatch.add(call)
            self._pump()

    def send_to(self, calls: Sequence[tuple[int, Call]]) -> None:
        """Queues calls for certain nodes, all of them or none."""
        with self._changed:
            self._check_open()
            self._await_up([n for n, _ in calls])
            gang = [call for _, call in calls]
            batches: dict[int, list[Call]] = {}
            now = time.monotonic()
            for number, call in calls:
                self._adopt(call)
                call.gang = gang if len(gang) > 1 else None
                call.sent = now
                self._dispatch.pin(call, number)
                batches.setdefault(number, []).append(call)
            for number, batch in batches.items():
                self._transmit(number, batch)

    def up(self) -> list[int]:
        """The numbers of the nodes that take calls now."""
        with self._lock:
            return [n.number for n in self._nodes if self._dispatch.is_up(n.number)]

    def stop(self, call: Call, why: str = "cancelled", grace: float = _CANCEL_GRACE) -> None:
        """Ends a call wherever it is; its verdict comes as for any other call."""
        with self._lock:
            if call.id not in self._calls or call.stopping is not None:
                return
            call.stopping = why
            if self._dispatch.withdraw(call):
                withdrawn = True
            else:
                withdrawn = False
                if call.node is not None:
                    self._post(self._nodes[call.node], [["cancel", call.id, why, grace, 0]])
        if withdrawn:
            self._fail(call, CancelledError(), "cancelled")

    def _adopt(self, call: Call) -> None:
        self._calls[call.id] = call
        call.future.on_cancel = lambda: self.stop(call)
        call.future.is_running = lambda: call.sent > 0

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
            messages.append(["call", call.id, call.about, len(call.pieces)])
            buffers += call.pieces
        self._post(self._nodes[number], messages, buffers)
        for call in calls:
            for key, source in call.inputs.items():
                self._feed(call, key, source)

    def _post(self, node: _Node, messages: list[Any], buffers: Sequence[Any] = ()) -> None:
        if not node.link.post(messages, buffers):
            self._wake()  # the I/O thread goes on when the socket takes more

    def _feed(self, call: Call, key: str, source: Any) -> None:
        """Streams an iterator argument to the runner, from a thread of its own: the iterator may block."""
        node = self._nodes[call.node or 0]

        def send(batch: list[list[Any]]) -> None:
            pieces = [p for item in batch for p in item]
            self._post(node, [["items", call.id, key, [len(i) for i in batch], len(pieces)]], pieces)

        producer = call.feeders[key] = Producer(send)

        def feed() -> None:
            from skyward.payload import Packer

            packer, about, data = Packer(), {}, b""
            try:
                for item in source:
                    head, buffers = packer.pack(item, f"item of {key} of {call.name}")
                    if not producer.put([head, *map(bytes, buffers)]):
                        return
            except BaseException as exc:  # raised in the body, where the iterator is used
                about, data = failures.capture(exc, __file__)
            producer.finish()
            self._post(node, [["end", call.id, key, about, 1]], [data])

        threading.Thread(target=feed, name="skyward-feed", daemon=True).start()

    # verdicts

    def _forget(self, call: Call, seconds: float | None) -> bool:
        """Takes a call out of the books; False if it had left them already."""
        if self._calls.pop(call.id, None) is None:
            return False
        self._dispatch.settle(call, seconds)
        self._plan.release(call.digests)
        for producer in call.feeders.values():
            producer.close()
        return True

    def _fail(self, call: Call, error: BaseException, outcome: Any, seconds: float = 0.0) -> None:
        with self._lock:
            if not self._forget(call, None):
                return
            self.failed += 1
            others = [c for c in call.gang or () if c is not call and c.id in self._calls]
            first = not any(getattr(c, "stopping", None) == "gang" for c in call.gang or ())
        if call.gang and first and call.stopping is None:
            error.add_note(_gang_note(call, others))
        for other in others:
            self.stop(other, "gang", _GANG_GRACE)
        self._ended(call, outcome, seconds)
        if call.stream is not None:
            call.stream.end(error)
        self._defer(call.future.fail, error)

    def _succeed(self, call: Call, about: dict[str, Any], pieces: list[Any]) -> None:
        with self._lock:
            if not self._forget(call, about["s"]):
                blobs.remove(path for path, _ in about.get("blobs", {}).values())
                return
            self.done += 1
        self._ended(call, "ok", about["s"])
        if call.stream is not None:
            call.stream.end()
        elif call.future.cancelled():
            blobs.remove(path for path, _ in about.get("blobs", {}).values())
        else:
            self._defer(call.future.settle, about, pieces)

    def _lost(self, call: Call, reason: str) -> None:
        """A call whose node is gone: started again elsewhere, if it may be."""
        node = call.node if call.node is not None else -1
        with self._lock:
            again = call.attempt < call.retries and call.stopping is None and not self._closing
            again = again and call.stream is None and not call.pinned and call.id in self._calls
            if again:
                self._dispatch.settle(call)
                call.attempt += 1
                call.announced = False
                self._dispatch.add(call, first=True)
        if again:
            text = (
                f"{call.name} was lost with node {node} ({reason}); attempt {call.attempt} of {call.retries} follows."
            )
            self._emit(events.Notice(self._plan.pool, text, "warning"))
        elif call.stopping is not None:
            self._fail(call, CancelledError(), "cancelled")
        else:
            self._fail(call, NodeLost(node, call.name, reason, call.attempt + 1), "lost")

    def _ended(self, call: Call, outcome: Any, seconds: float) -> None:
        pool, node = self._plan.pool, call.node if call.node is not None else -1
        if not call.announced and call.node is not None:
            self._emit(events.CallStarted(pool, call.id, call.name, node, call.attempt))
        self._emit(events.CallEnded(pool, call.id, call.name, node, outcome, seconds))

    def _emit(self, event: events.Event) -> None:
        self._defer(self._plan.emit, event)

    def _defer(self, act: Callable[..., None], *args: Any) -> None:
        """Has the I/O thread do something of the user's (listeners, callbacks) when no lock is held."""
        self._later.append((act, args))
        if threading.current_thread() is not self._thread:
            self._wake()

    def _do_deferred(self) -> None:
        while self._later:
            act, args = self._later.popleft()
            try:
                act(*args)
            except Exception:
                log.exception("a listener or callback raised")

    # what nodes say; in the I/O thread

    def _heed(self, node: _Node, kind: str, body: list[Any], buffers: list[Any]) -> None:
        act = getattr(self, f"_on_{kind}", None)
        if act is not None:
            act(node, *body, *([buffers] if buffers else []))
            return
        call = self._calls.get(body[0])
        if call is None:
            return
        self._flush_lines(node, call.id)
        self._verdict(node, call, kind, body[1], buffers)

    def _verdict(self, node: _Node, call: Call, kind: str, about: dict[str, Any], buffers: list[Any]) -> None:
        seconds = about.get("s", 0.0)
        call.announced = call.announced or about.get("announced", False)
        number, name, attempt = node.number, call.name, call.attempt
        if kind == "done":
            self._succeed(call, about, [bytes(buffers[0]), *buffers[1:]] if buffers else [])
        elif kind == "error":
            error = failures.rebuild(about["error"], buffers[0])
            where = f"raised on node {number} in {name}, call {call.id}, attempt {attempt} (pool {self._plan.pool})"
            self._fail(call, failures.annotate(error, about["error"], where), "error", seconds)
        elif kind == "exited":
            self._fail(call, TaskCrashed(name, number, attempt, about["code"]), "crashed", seconds)
        elif kind == "crashed":
            self._fail(call, _crash(call, number, about), "crashed", seconds)
        elif kind == "timeout":
            error = TaskTimeout(name, number, about["limit"], attempt, about["killed"])
            self._fail(call, error, "timeout", seconds)
        elif kind == "lost":
            self._lost(call, about.get("reason", ""))
        elif kind == "gang":
            self._fail(
                call, CancelledError("stopped, since another node of the broadcast failed"), "cancelled", seconds
            )
        else:  # cancelled, stopped
            self._fail(call, CancelledError(), "cancelled", seconds)

    def _on_started(self, node: _Node, call_id: str) -> None:
        call = self._calls.get(call_id)
        if call is not None and not call.announced:
            call.announced = True
            self._emit(events.CallStarted(self._plan.pool, call.id, call.name, node.number, call.attempt))

    def _on_recalled(self, node: _Node, call_id: str) -> None:
        call = self._calls.get(call_id)
        if call is not None:
            self._dispatch.settle(call)
            call.node = None
            self._dispatch.add(call, first=True)

    def _on_streaming(self, node: _Node, call_id: str) -> None:
        call = self._calls.get(call_id)
        if call is None:
            return

        def close() -> None:
            self._post(node, [["close", call.id, 0]])
            timer = threading.Timer(_CANCEL_GRACE, lambda: self.stop(call))
            timer.daemon = True
            timer.start()

        def load(item: list[Any]) -> Any:
            return unpacked(call.name, item[0], item[1:])

        call.stream = Consumer(lambda n: self._post(node, [["grant", call.id, n, 0]]), close, load)
        self._defer(call.future.fulfil, call.stream)
        if call.future.cancelled():
            self._defer(call.stream.close)

    def _on_items(
        self, node: _Node, call_id: str, counts: list[int], about: dict[str, Any], buffers: list[Any]
    ) -> None:
        call = self._calls.get(call_id)
        spilled = about.get("blobs", {})
        if call is None or call.stream is None:
            blobs.remove(path for path, _ in spilled.values())
            return
        items: list[list[Any]] = []
        at = 0
        for count in counts:
            own = {str(int(i) - at): b for i, b in spilled.items() if at <= int(i) < at + count} if spilled else {}
            items.append([{"blobs": own} if own else {}, *buffers[at : at + count]])
            at += count
        call.stream.feed(items)

    def _on_want(self, node: _Node, call_id: str, key: str, count: int) -> None:
        call = self._calls.get(call_id)
        if call is not None and key in call.feeders:
            call.feeders[key].grant(count)

    def _on_out(self, node: _Node, stream: Any, call_id: str | None, buffers: list[Any]) -> None:
        lines = node.lines.setdefault((stream, call_id), Lines())
        for text, progress in lines.feed(buffers[0]):
            self._emit(events.Output(self._plan.pool, node.number, stream, text, call_id, progress))

    def _flush_lines(self, node: _Node, call_id: str) -> None:
        for stream in ("stdout", "stderr"):
            lines = node.lines.pop((stream, call_id), None)
            if lines is not None:
                for text, progress in lines.rest():
                    self._emit(events.Output(self._plan.pool, node.number, stream, text, call_id, progress))

    def _on_sample(self, node: _Node, sample: dict[str, Any]) -> None:
        self._emit(events.NodeSample(self._plan.pool, node.number, sample["cpu"], sample["memory"], sample["running"]))

    def _on_member(self, node: _Node, about: dict[str, Any]) -> None:
        node.member = True
        self._emit(events.NodePhase(self._plan.pool, node.number, "joined"))
        self._changed.notify_all()

    def _on_ready(self, node: _Node, about: dict[str, Any]) -> None:
        if about["generation"] != self._generation:
            return
        node.ready = True
        self._emit(events.NodePhase(self._plan.pool, node.number, "ready"))
        if not self._plan.gang:
            self._dispatch.up(node.number, True)
        elif all(n.ready for n in self._nodes):
            for n in self._nodes:
                self._dispatch.up(n.number, True)
        self._changed.notify_all()

    def _on_failed(self, node: _Node, about: dict[str, Any], buffers: list[Any]) -> None:
        error = failures.rebuild(about, buffers[0])
        node.error = (
            error if isinstance(error, PluginError) else BootstrapError("runner", about["message"], node.number)
        )
        self._down(node, str(node.error))

    def _on_replaced(self, node: _Node, about: dict[str, Any]) -> None:
        if self._plan.gang and about["generation"] == self._generation and not self._closing:
            self._emit(events.Notice(self._plan.pool, f"node {node.number} lost its runner; all are made anew."))
            self._renew()

    def _on_ports(self, node: _Node, ports: list[int]) -> None:
        self._ports = ports
        for each in self._nodes:
            self._equip(each)

    def _on_bye(self, node: _Node) -> None:
        node.bye = True
        self._changed.notify_all()

    def _renew(self) -> None:
        """Makes the runners of all nodes (again), over fresh ports of the head."""
        self._generation += 1
        for node in self._nodes:
            node.ready = False
            self._dispatch.up(node.number, False)
        self._post(self._nodes[0], [["ports", _PORTS, 0]])

    def _equip(self, node: _Node) -> None:
        settings, hooks = self._plan.setup(node.number, self._generation, self._ports)
        self._post(node, [["setup", {**settings, "generation": self._generation}, len(hooks)]], hooks)

    # connections

    def _connect(self, node: _Node, deadline: float) -> None:
        """Connects to a node's agent, again and again until `deadline`."""
        pause = 0.02
        while not self._closing:
            try:
                self._attach(node, deadline)
                return
            except (OSError, ValueError) as exc:
                if time.monotonic() + pause > deadline:
                    with self._changed:
                        node.error = NodeLost(node.number, reason=f"cannot connect to it: {exc}")
                        self._down(node, f"cannot connect to it: {exc}")
                        self._gone(node)
                    return
                time.sleep(pause)
                pause = min(1.0, pause * 1.5)

    def _attach(self, node: _Node, deadline: float) -> None:
        raw = self._plan.reach(node.number)
        try:
            raw.settimeout(10)
            tune(raw)
            sock = self._plan.context.wrap_socket(raw)
        except BaseException:
            raw.close()
            raise
        try:
            hello = {"session": self._session, "received": node.link.received}
            welcome = greet(sock, hello, min(deadline, time.monotonic() + 10))
        except BaseException:
            sock.close()
            raise
        with self._changed:
            if self._closing and not node.incarnation:
                sock.close()
                return
            fresh = welcome["incarnation"] != node.incarnation
            restarted = bool(node.incarnation) and fresh
            if fresh:
                node.incarnation, node.about, node.member = welcome["incarnation"], welcome, False
                lost = self._dispatch.drain(node.number)
                if restarted:
                    node.link = Link()
            else:
                lost = []
            node.link.attach(sock, welcome["received"] if not restarted else 0)
            self._joining.append(node)
            if restarted:
                for call in lost:
                    self._lost(call, "its agent was restarted")
                if self._plan.gang:
                    self._renew()
                else:
                    self._equip(node)
            elif node.ready and not self._plan.gang:
                self._dispatch.up(node.number, True)
            elif all(n.ready for n in self._nodes):
                for n in self._nodes:
                    self._dispatch.up(n.number, True)
            if restarted:
                self._emit(events.NodeUp(self._plan.pool, node.number))
            self._changed.notify_all()
        self._wake()

    def _down(self, node: _Node, reason: str) -> None:
        self._dispatch.up(node.number, False)
        self._emit(events.NodeDown(self._plan.pool, node.number, reason))
        self._changed.notify_all()

    def _gone(self, node: _Node) -> None:
        """Gives a node up for good."""
        node.gone = "it did not come back"
        lost = self._dispatch.drain(node.number)
        for call in lost:
            self._lost(call, node.gone)
        if all(n.gone for n in self._nodes):
            for call in self._dispatch.drain_queue():
                self._fail(call, NodeLost(node.number, call.name, "no node is left", call.attempt), "lost")

    def _on_broken(self, node: _Node) -> None:
        if self._closing:
            node.bye = True
            self._changed.notify_all()
            return
        self._down(node, "its connection broke")
        threading.Thread(target=self._connect, args=(node, time.monotonic() + _PATIENCE), daemon=True).start()

    # the I/O thread

    def _run(self) -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            while not self._stopped:
                with self._lock:
                    self._register()
                    wait = 0.05 if self._dispatch.crowded() else 1.0
                ready = self._selector.select(wait)
                self._handle(ready)
                self._do_deferred()
        except BaseException:
            log.exception("the engine's I/O thread ended")
            raise
        finally:
            self._do_deferred()
            for node in self._nodes:
                node.link.detach()
            self._selector.close()
            self._wake_read.close()
            self._wake_write.close()

    def _register(self) -> None:
        """Brings the selector up to date with the links' sockets and what they want."""
        registered = {key.data: key for key in self._selector.get_map().values() if key.data is not None}
        for node in self._nodes:
            sock, key = node.link.sock, registered.get(node.number)
            if key is not None and key.fileobj is not sock:
                self._selector.unregister(key.fileobj)
                key = None
            if sock is None:
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if node.link.writing else 0)
            if key is None:
                self._selector.register(sock, wanted, node.number)
            elif key.events != wanted:
                self._selector.modify(sock, wanted, node.number)

    def _handle(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        with self._lock:
            numbers = [key.data for key, _ in ready if key.data is not None]
            if len(numbers) < len(ready):
                try:
                    self._wake_read.recv(4096)
                except BlockingIOError:
                    pass
                numbers += [n.number for n in self._joining]
                self._joining.clear()
            for key, events_ in ready:
                if key.data is not None and events_ & selectors.EVENT_WRITE:
                    self._nodes[key.data].link.flush()
            for number in dict.fromkeys(numbers):
                self._read(self._nodes[number])
            self._pump()
            now = time.monotonic()
            for number, call in self._dispatch.stale(now):
                self._post(self._nodes[number], [["recall", call.id, 0]])
            if not ready:
                for node in self._nodes:
                    node.link.acknowledge()

    def _read(self, node: _Node) -> None:
        more = True
        while more:
            try:
                arrived, more = node.link.read()
            except Broken:
                self._on_broken(node)
                return
            for messages, buffers in arrived:
                at = 0
                for message in messages:
                    count = message[-1]
                    try:
                        self._heed(node, message[0], message[1:-1], buffers[at : at + count])
                    except Exception:
                        log.exception("message %r of node %d could not be handled", message[0], node.number)
                    at += count

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass  # full (it will wake anyway) or closed

    # waiting

    def _await(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        with self._changed:
            while not condition():
                self._check_opening_locked()
                left = deadline - time.monotonic()
                if left <= 0:
                    late = [n.number for n in self._nodes if not (n.ready and n.member)]
                    raise BootstrapError(what, f"nodes {late} were not ready in time.")
                self._changed.wait(min(left, 0.5))

    def _check_opening(self) -> None:
        with self._lock:
            self._check_opening_locked()

    def _check_opening_locked(self) -> None:
        for node in self._nodes:
            if node.error is not None:
                raise node.error

    def _await_up(self, numbers: Sequence[int]) -> None:
        """Waits for nodes that are being restarted; a node that is gone is an error."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            missing = [n for n in numbers if not self._dispatch.is_up(n)]
            if not missing:
                return
            for number in missing:
                node = self._nodes[number]
                if node.gone or node.error is not None or time.monotonic() > deadline:
                    raise NodeLost(number, reason=str(node.error or node.gone or "it is not ready"))
            self._changed.wait(0.2)
            self._check_open()

    def _check_open(self) -> None:
        if self._closing:
            raise PoolClosed("the pool is closed; open it again with `with sky.ComputePool(...) as pool:`.")


def _crash(call: Call, number: int, about: dict[str, Any]) -> SkywardError:
    code = about["code"]
    name = signal.Signals(-code).name if code < 0 else None
    kind = TaskOutOfMemory if about["oom"] else TaskCrashed
    return kind(call.name, number, call.attempt, code, name, about["stderr"], about["shared"])


def _gang_note(call: Call, others: list[Call]) -> str:
    rank, total = call.node, len(call.gang)
    finished = total - 1 - len(others)
    text = f"rank {rank} of {total} (node {rank}) failed first in the broadcast of {call.name}"
    if others:
        text += f"; nodes {', '.join(str(o.node) for o in others)} were still running and have been stopped"
    if finished:
        text += f"; {finished} had finished"
    return text + "."
