"""The engine of a pool, on the client: gets events from users, nodes and the clock, asks `Core`, and acts.

    user's thread   --submit, cancel-->            Engine --(lock)--> Core --actions--> Engine --> links, futures
    I/O thread:     Connections.poll --events-->   Engine --(lock)--> Core --actions--> Engine, then what was deferred

One lock, so two broadcasts have the same order on all nodes. No user code runs on the I/O thread.
"""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

from skyward import events
from skyward.api.spec import Ranks
from skyward.api.stacks import Stacks
from skyward.client import outcomes
from skyward.client.actions import (
    Action,
    Discard,
    Emit,
    Fail,
    Feed,
    Fetch,
    ForgetBlobs,
    Free,
    GetFailed,
    Got,
    Inquire,
    KeepFailed,
    Load,
    Post,
    Reconnect,
    RecordEnd,
    Release,
    Renounce,
    Settle,
    SharedLost,
    Upload,
)
from skyward.client.arrivals import Arrivals, ClientShared, StreamActions
from skyward.client.call import Call, CallFuture, discard
from skyward.client.connections import MOST_MALFORMED, Connections, Event, Heard
from skyward.client.core import ConnectionEvents, Core
from skyward.client.files import Answers, Transfers, node_lost, path_of
from skyward.client.futures import Deferred
from skyward.client.settings import Machines, PoolSettings
from skyward.client.uploads import Uploads, feed
from skyward.errors import BootstrapError, PoolClosed, SkywardError
from skyward.node.protocol import AgentToClient, ClientToAgent, FileOrder, Forget, Returned, Run
from skyward.transport import blobs
from skyward.transport.codec import Message, Receiver, handles
from skyward.transport.exceptions import rebuilding
from skyward.transport.frames import Malformed, TooLarge
from skyward.transport.streams import Producer
from skyward.transport.threads import run_in_thread

if TYPE_CHECKING:
    from skyward.client.kept import KeptResult

__all__ = ["Dependencies", "Engine"]

log = logging.getLogger("skyward.engine")

_JOIN = 30.0
_BUSY_WAIT = 0.05
_IDLE_WAIT = 1.0
_PATIENCE = 15.0
_STARTING = 600.0  # as long as frameworks wait for each other when they form a group
_UNTOLD = 5.0  # a node that is started again is there sooner


@dataclass(frozen=True)
class Dependencies:
    clock: Callable[[], float] = time.monotonic
    connections: type[Connections] = Connections
    uploads: type[Uploads] = Uploads
    feed: Callable[..., Producer] = feed
    in_thread: Callable[[Callable[[], object]], None] = run_in_thread


class Engine:
    def __init__(self, plan: PoolSettings, machines: Machines, dependencies: Dependencies | None = None) -> None:
        around = dependencies or Dependencies()
        self._plan, self._machines = plan, machines
        self._clock, self._feed, self._in_thread = around.clock, around.feed, around.in_thread
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        revive = None if plan.local or plan.epoch else machines.revive
        self._connections = around.connections(plan.nodes, machines.reach, revive, plan.session, plan.epoch)
        self._core = Core(plan, self._connections, machines)
        self._connection_events = ConnectionEvents(self._core, self._connections)
        self._byes: set[int] = set()
        self._forgotten: dict[int, list[str]] = {}
        self._closing = self._stopped = False
        self._stopping, self._deferred = threading.Event(), Deferred()
        self._uploads = around.uploads(
            self._connections.post, self._connections.unacknowledged, machines.address, self._unsendable
        )
        streams = StreamActions(self._connections.post, self._stream_closed, self._defer)
        self._arrivals = Arrivals(plan, self._core, self._uploads, streams)
        self.shared = ClientShared(self._connections.post, plan.nodes, lambda: self._core.nodes.all[0].gone)
        self._transfers = Transfers(self._connections.post)
        self._receiver = Receiver(AgentToClient, self, self._core, self._arrivals, self.shared, self._transfers)
        self.on_failed: Callable[[Call, events.EndOfCall, BaseException | None], None] | None = None
        """Gets calls that failed by themselves while they have their arguments, with the lock held."""
        self.greetings, self.after_fork = self._connections.greetings, self._connections.after_fork
        self.thread, self._ident = threading.Thread(target=self._run, name="skyward-io", daemon=True), 0

    def totals(self) -> tuple[int, int, int]:
        calls = self._core.calls
        return calls.settled, calls.failed, calls.undone - calls.failed

    def counts(self) -> tuple[int, int, int, int]:
        with self._lock:
            calls = self._core.calls
            running = calls.dispatch.running()
            return running, len(calls.calls) - running, calls.settled - calls.undone, calls.failed

    # opening and closing

    def open(self, deadline: float) -> None:
        self.thread.start()
        with rebuilding():  # an error of a plugin's hook
            self._open(deadline)

    def _open(self, deadline: float) -> None:
        with self._lock:
            self._connect([node.number for node in self._core.nodes.present], deadline)
            self._core.nodes.check()
            self._core.settle_ranks()
            self._do(self._core.renew(self._clock()))
            while not self._core.nodes.all_ready():
                if self._clock() > deadline:
                    late = [n.number for n in self._core.nodes.present if n.state != "ready"]
                    raise BootstrapError("starting runners", f"nodes {late} were not ready in time.")
                self._changed.wait(0.5)
                self._core.nodes.check()

    def tell_terms(self, serial: int, left: float, drain: float) -> None:
        """Tells all reachable nodes when they end; the last call counts."""
        with self._lock:
            for number in () if self._closing else self._connected():
                self._connections.post(number, [ClientToAgent.Terms(serial, left, drain)])

    def finish(self) -> tuple[bool, int]:
        """Whether all calls that leaving the block waits for have ended, and how many streams this stopped."""
        with self._lock:
            calls, stopped = self._core.calls, 0
            for call in calls.streams():
                error = PoolClosed(f"the pool was closed before {call.name} was read to its end.")
                if call.stream is None:
                    stopped += 1
                    self._defer(call.future.fail, error)
                elif not call.stream.ended:
                    stopped += 1
                    call.stream.end(error)
                self._do(self._core.cancel(call, "cancelled", self._clock()))
            return next(calls.unfinished(), None) is None, stopped

    def unfinished(self) -> tuple[int, int]:
        with self._lock:
            calls = self._core.calls
            streams = [call.stream for call in calls.streams()]
            return sum(call.items for call in calls.unfinished()), sum(not stream.ended for stream in streams if stream)

    def settle(self, seconds: float) -> None:
        settled = _thread.allocate_lock()
        settled.acquire()
        self._defer(settled.release)
        settled.acquire(timeout=seconds)

    def close(self, grace: float) -> None:
        with self._lock:
            self._refuse_more()
            self._do(self._core.close(self._clock()))
            for number in self._connected():
                self._connections.post(number, [ClientToAgent.Bye(grace)])
            end = self._clock() + grace + 1.5
            while not self._byes.issuperset(self._connected()) and self._clock() < end:
                self._changed.wait(0.05)
        self.abandon()

    def abandon(self) -> None:
        self._refuse_more()
        self._uploads.close()
        self._stopped = True
        self._connections.wake()
        if self.thread.ident is None:
            self._connections.close()  # it was never opened
        elif self.thread is not threading.current_thread():
            self.thread.join(5)

    def _refuse_more(self) -> None:
        self._closing = self._connection_events.closing = True
        self.shared.close()
        self._transfers.close()
        self._stopping.set()
        self._connections.stop_connecting()

    def _connect(self, numbers: Iterable[int], deadline: float) -> None:
        self._connection_events.first.update(numbers)
        for number in numbers:
            self._connections.connect(number, deadline)
        while not self._connection_events.first.isdisjoint(numbers) and not self._closing:
            self._changed.wait(0.5)

    def _connected(self) -> list[int]:
        return [number for number in range(self._plan.nodes) if self._connections.connected(number)]

    # calls

    def send(self, calls: Sequence[Call]) -> None:
        with self._lock:
            self._check_open()
            inner = [each for call in calls for each in call.inner]
            batch = [*inner, *calls] if inner else calls
            stop = self.stop
            for call in batch:
                if call.needs:
                    self._check_files(call.needs)
                call.future.on_cancel = partial(stop, call)
            self._do(self._core.submit(batch, self._clock()))

    @property
    def ranks(self) -> Ranks:
        return self._core.ranks

    def send_to(self, calls: Sequence[tuple[int, Call]], world: int | None = None) -> bool:
        """Queues calls for certain ranks, all or none; several succeed or fail as one. False if the pool no longer has
        `world` ranks.
        """
        # the lock is inside: an error of a call among the arguments is rebuilt without it
        with rebuilding(), self._lock, self._arguments_there(calls[0][1]):
            self._await_up(sorted({self.ranks.places[rank][0] for rank, _ in calls}))
            if world not in (None, len(self.ranks)):
                return False
            for _, call in calls:
                call.future.on_cancel = partial(self.stop, call)
            self._do(self._core.submit_to(calls, self._clock()))
            return True

    def up(self) -> list[int]:
        with self._lock:
            return sorted(self._core.nodes.takes_calls())

    def stacks(self, seconds: float = 5.0) -> Stacks:
        """A node that does not answer in time has none."""
        with self._lock:
            self._check_open()
            survey, actions = self._core.surveys.ask(self._connected(), None, self._clock())
            self._do(actions)
            end = self._clock() + seconds
            while not survey.complete and self._clock() < end and not self._closing:
                self._changed.wait(0.5)
            self._core.surveys.close(survey)
        return survey.stacks(self._core.ranks)

    def stop(self, call: Call, why: str = "cancelled") -> None:
        with self._lock:
            self._do(self._core.cancel(call, why, self._clock()))

    def _check_open(self) -> None:
        if self._closing:
            raise PoolClosed("the pool is closed; open it again with `with sky.ComputePool(...) as pool:`.")
        self._core.check_nodes_left()

    def _await_up(self, numbers: Sequence[int]) -> None:
        began, told, patience = self._clock(), False, max(_PATIENCE, self._plan.lease)
        while True:
            self._check_open()
            waited = self._clock() - began
            missing = self._core.missing(numbers, late=waited > patience, overdue=waited > max(patience, _STARTING))
            if not missing:
                return
            if not told and waited > _UNTOLD:
                told = True
                nodes = ", ".join(f"node {number}" for number in missing)
                text = f"a broadcast needs all nodes, and waits for {nodes}, for up to {patience:.0f} s (longer while "
                text += "processes start there). Calls with >> go to others."
                self._defer(self._plan.emit, events.Notice(self._plan.pool, text, "warning"))
            self._changed.wait(0.2)

    # doing what the core says; with the lock held

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:  # the frequent ones first
                case Post():
                    self._connections.post(action.node, action.messages, self._refused)
                case RecordEnd():
                    action.keep(action.end)  # now: it only puts it on a list
                case Settle():
                    self._do_settle(action.call, action.result)
                case Emit():
                    self._defer(self._plan.emit, action.event)
                case Fail():
                    self._do_fail(action.call, action.error)
                case KeepFailed():
                    if self.on_failed is not None:
                        self.on_failed(action.call, action.end, action.error)
                case Load():
                    if not self._plan.local:  # local nodes read the files themselves
                        self._uploads.load(action.node, action.files)
                case Feed():
                    self._do_feed(action.call, action.node)
                case Discard():
                    discard(action.blobs)
                case Fetch():
                    self._do_fetch(action.node, action.blobs, action.sources)
                case Upload():
                    self._uploads.offer(action.node, action.files)
                case Got():
                    self._defer(action.future.settle_files, action.blobs, action.remove)
                case GetFailed():
                    self._defer(action.future.fail, action.error)
                case Release():
                    self._plan.release(action.uploads)
                case Free():
                    self._do_free(action.key, action.nodes, action.paths, action.names)
                case Reconnect():
                    self._connections.reconnect(action.node)
                case Renounce():
                    self._connections.renounce(action.node)
                case Inquire():
                    self._machines.inquire()
                case ForgetBlobs():
                    self._uploads.forget(action.node)
                case SharedLost():
                    self._do_shared_lost(action.node, action.rank, action.reason)
                case _:
                    assert_never(action)

    def _do_feed(self, call: Call, number: int) -> None:
        for key, source in call.inputs.items():
            directory = self._plan.directory if self._plan.local else None
            call.feeders[key] = self._feed(call, key, source, partial(self._connections.post, number), directory)

    def _do_settle(self, call: Call, result: Returned) -> None:
        self._let_go(call)  # first: a kept result takes the call's future away
        if call.keeps is not None:
            self._settle_kept(call)
        elif call.stream is not None:
            call.stream.end()
        elif call.future.cancelled():
            discard(result.blobs)
        else:
            self._defer(call.future.settle, result)

    def _do_fail(self, call: Call, error: BaseException) -> None:
        self._let_go(call)
        if call.stream is not None:
            # whichever rank is read first, the error is that of the one that failed
            call.stream.end(call.cause or error)
        call.ref = None
        self._defer(call.future.fail, error)

    def _let_go(self, call: Call) -> None:
        if call.uploads and call.keeps is None:  # else they may be needed to make its result again
            self._plan.release(list(call.uploads))
        call.holds = ()
        for producer in call.feeders.values():
            producer.close()
        call.future.on_cancel = None  # future and call must not keep each other

    def _do_shared_lost(self, number: int, rank: int | None, reason: str) -> None:
        self.shared.lost(number, rank, reason)
        if rank is None:
            self._transfers.lost(number, reason)

    def _settle_kept(self, call: Call) -> None:
        """The call may be kept for a restart, and must not hold the Ref."""
        ref, call.ref = call.ref, None
        future, call.future = call.future, CallFuture(call.name)
        if ref is not None:
            self._defer(future.fulfil, ref)
        self._changed.notify_all()

    def _do_fetch(self, number: int, wanted: Sequence[blobs.Blob], sources: Sequence[int]) -> None:
        places = [(other, *place) for other in sources if (place := self._machines.address(other)) is not None]
        if places:
            messages = [ClientToAgent.Fetch(name, size, places) for name, size in wanted]
            self._connections.post(number, messages)

    def _do_free(self, key: str, nodes: Sequence[int], paths: Sequence[str], names: Sequence[str]) -> None:
        for number in nodes:
            self._forgotten.setdefault(number, []).append(key)
        for name in names:
            self._uploads.drop(name)
        if paths:
            self._defer(self._in_thread, partial(_remove, paths))  # large files take long to remove

    def _tell_forgotten(self) -> None:
        if self._forgotten:
            forgotten, self._forgotten = self._forgotten, {}
            for number, keys in forgotten.items():
                self._connections.post(number, [Forget(keys)])

    # the I/O thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        wait, self._ident = _IDLE_WAIT, threading.get_ident()
        try:
            while not self._stopped:
                wait = _BUSY_WAIT if self.handle(self._connections.poll(wait)) else _IDLE_WAIT
        except BaseException as exc:
            log.exception("the engine's I/O thread ended")
            with self._lock:
                self._refuse_more()
                self._do(self._core.collapse(exc, self._clock()))
                self._changed.notify_all()
            raise
        finally:
            self._deferred.end()
            self._connections.close()

    def _defer(self, act: Callable[..., Any], *args: Any) -> None:
        """Runs on the I/O thread without the lock; must not block."""
        self._deferred.add(act, *args)
        if threading.get_ident() != self._ident:
            self._connections.wake()

    def handle(self, happened: Sequence[Event]) -> bool:
        with self._lock:
            for event in happened:
                if not isinstance(event, Heard):
                    self._follow(event)
                elif self._connections.current(event.number, event.link):  # else the node was given up meanwhile
                    self._received(event)
            self._do(self._core.turn(self._clock()))
            self._tell_forgotten()
            soon = self._core.calls.soon()
        self._deferred.run()
        return soon

    def _follow(self, event: Event) -> None:
        try:
            self._do(self._connection_events.handle(event, self._clock()))
        except Exception as exc:  # of what the node has said of itself: it is given up, and the others are not
            log.exception("node %d cannot be used", event.number)
            self._do(self._core.unreachable(event.number, exc, self._clock()))
        self._changed.notify_all()

    def _received(self, event: Heard) -> None:
        number, message = event.number, event.message
        if self._connections.peers[number].malformed >= MOST_MALFORMED:
            return  # it is given up; a frame may hold a million such messages
        try:
            actions = self._receiver.receive(message, event.buffers, number, self._clock())
            if actions:
                self._do(actions)
            if message[0] in ("ready", "failed", "ports", "notice", "replaced", "standing"):
                self._changed.notify_all()
        except BaseException as exc:
            if not isinstance(exc, Malformed):
                log.exception("message %.80r of node %d could not be handled", message[0], number)
            try:
                self._do(self._core.mishandled(number, message, exc, self._clock()))
            except BaseException:
                log.exception("and neither could that")
            if isinstance(exc, Malformed):
                for lost in self._connections.distrust(number, event.link, exc):
                    self._follow(lost)

    # what nodes say

    def _unsendable(self, number: int, blob: str, error: Exception) -> None:
        with self._lock:
            self._do(self._core.calls.unsendable(number, blob, error, self._clock()))

    def _refused(self, number: int, message: Message, error: TooLarge) -> None:
        if not isinstance(message, Run):
            raise error
        self._defer(self._too_large, number, message.id, error)  # later: other ranks of its broadcast are sent first

    def _too_large(self, number: int, call_id: str, error: TooLarge) -> None:
        with self._lock:
            self._do(self._core.calls.too_large(number, call_id, error, self._clock()))

    def _stream_closed(self, call: Call) -> None:
        with self._lock:
            self._do(self._core.calls.stream_closed(call, self._clock()))

    @handles(AgentToClient.Bye)
    def _left(self, message: AgentToClient.Bye, number: int, now: float) -> None:
        self._do(self._arrivals.rest_of_output(number, None))
        self._byes.add(number)
        self._changed.notify_all()

    # nodes that get another machine, or come late: called by threads of `machines/replacement.py`, without the lock

    def await_vacant(self, node: int) -> bool:
        """Waits until a node is idle or lost, and takes it out; False if the pool is closed."""
        with self._lock:
            while not self._closing:
                vacant, actions = self._core.vacate(node, self._clock())
                self._do(actions)
                if vacant:
                    return True
                self._changed.wait(0.2)
            return False

    def vacancy(self) -> int:
        with self._lock:
            return len(self._core.nodes.present)

    def admit(self, node: int) -> bool:
        with self._lock:
            while not self._closing:
                admitted, actions = self._core.admit(node, self._clock())
                self._do(actions)
                if admitted:
                    return True
                self._changed.wait(0.2)
            return False

    def connect(self, node: int) -> None:
        with self._lock:
            self._connect([node], self._clock() + _JOIN)
            self._changed.notify_all()
            connected, error = self._connections.connected(node), self._core.nodes.all[node].error
        if isinstance(error, SkywardError) and not connected:
            raise error
        if not connected:
            raise BootstrapError("connecting", "its replacement cannot be reached.", node)

    def not_replaced(self, node: int, reason: str) -> None:
        with self._lock:
            self._do(self._core.not_replaced(node, reason, self._clock()))
            self._changed.notify_all()

    def missing(self) -> list[int]:
        with self._lock:
            return self._core.nodes.silent()

    def ended(self, node: int, reason: str) -> None:
        with self._lock:
            self._do(self._core.machine_ended(node, reason, self._clock()))
            self._changed.notify_all()

    def pause_for(self, seconds: float) -> bool:
        """False if the pool is closed meanwhile."""
        return not self._stopping.wait(seconds)

    def tell(self, node: int, text: str) -> None:
        self._defer(self._plan.emit, events.NodePhase(self._plan.pool, node, text))

    # results and objects that stay on nodes, and files there

    def forget(self, keys: Sequence[str], unused: Callable[[], Sequence[str]]) -> None:
        with self._lock:
            if self._closing:
                return
            messages: list[Message] = [Forget(list(keys))]
            # asked for now: a call with the same content may have come meanwhile, and is sent after this
            names = [] if self._plan.local else list(unused())
            if names:
                messages.append(ClientToAgent.Files(0, {"do": "drop", "blobs": names}))
            for name in names:
                self._uploads.drop(name)
            for number in self._connected():
                self._connections.post(number, messages)

    def get_kept(self, result: KeptResult, future: CallFuture[Any]) -> None:
        with self._lock:
            self._check_open()
            self._check_files([result])
            self._core.calls.kept.get(result, future)
            self._follow_kept()

    def release_kept(self, result: KeptResult) -> None:
        with self._lock:
            if not self._closing:
                self._core.calls.kept.release(result)
                self._follow_kept()
                self._connections.wake()  # nodes are told in the I/O thread, of many at once

    @contextmanager
    def _arguments_there(self, call: Call) -> Generator[None]:
        if not call.needs:
            yield
            return
        self._check_files(call.needs)
        for result in call.needs:
            self._core.calls.kept.hold(result)  # until the broadcast itself does
            self._follow_kept()
        try:
            if call.inner:
                self.send(call.inner)
                call.inner = ()  # they end by themselves, whatever becomes of the broadcast
            while not all(result.state == "there" for result in call.needs):
                self._check_open()
                failed = next((result for result in call.needs if result.error is not None), None)
                if failed is not None:
                    raise outcomes.of_argument(call, failed)
                self._changed.wait(0.2)
            yield
        finally:
            for result in call.needs:
                self._core.calls.kept.release(result)
                self._follow_kept()

    def _check_files(self, results: Sequence[KeptResult]) -> None:
        for result in results if self._plan.local else ():
            if result.state == "there" and not all(os.path.exists(path) for path, _ in result.blobs):
                self._core.calls.kept.vanished(result)
                self._follow_kept()

    def _follow_kept(self) -> None:
        self._do(self._core.calls.follow_kept(self._clock()))

    @property
    def pushing(self) -> threading.Lock:
        return self._transfers.pushing

    def file_nodes(self) -> dict[int, str]:
        with self._lock:
            self._check_open()
            return {node.number: node.gone for node in self._core.nodes.present}

    def ask_files(self, node: int, order: FileOrder) -> Answers:
        with self._lock:
            self._check_open()
            if gone := self._core.nodes.all[node].gone:
                raise node_lost(node, path_of(order), gone)
            return self._transfers.ask(node, order)

    def load_blob(self, node: int, name: str, blob: blobs.Blob) -> None:
        if not self._plan.local:  # local nodes read the file themselves
            with self._lock:
                self._uploads.load(node, {name: blob})

    def send_blob(self, node: int, name: str) -> None:
        with self._lock:
            self._uploads.need(node, name)

    def drop_blob(self, nodes: Sequence[int], name: str) -> None:
        if not self._plan.local:
            with self._lock:
                self._uploads.drop(name)
                for node in nodes:
                    if self._connections.connected(node):
                        self._connections.post(node, [ClientToAgent.Files(0, {"do": "drop", "blobs": [name]})])


def _remove(paths: Sequence[str]) -> None:
    try:
        blobs.remove(paths)
    except OSError as exc:  # they go with the pool's directory
        log.warning("an unwanted result cannot be removed: %s", exc)
