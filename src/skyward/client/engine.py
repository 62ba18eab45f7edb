"""The engine of a pool, on the client: hears users, nodes and the clock, asks `Core` what that means, and does it.

    user's thread --submit, cancel--> Engine --(lock)--> Core --actions--> Engine --> links, futures, events
    I/O thread: Connections.poll --events--> Engine --(lock)--> Core --actions--> Engine, then what was deferred

Everything happens under one lock, so two broadcasts are queued in the same order on all nodes. No code of users runs on
the I/O thread: futures hand their callbacks over, and so does who emits events (see callbacks.py).
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyward import events
from skyward.api.ranks import Ranks
from skyward.api.stacks import Stacks
from skyward.client.arrivals import Arrivals, StreamActions
from skyward.client.call import Call, discard
from skyward.client.calls import Action
from skyward.client.connections import MOST_MALFORMED, Connections, Event, Heard
from skyward.client.core import Core
from skyward.client.deferred import Deferred
from skyward.client.keeping import Keeping
from skyward.client.meetings import Meetings
from skyward.client.message_checks import CHECKS
from skyward.client.places import NodePlaces
from skyward.client.settings import PoolSettings
from skyward.client.shared import ClientShared
from skyward.client.stream_arguments import feed
from skyward.client.transfers import NodeFileAccess, Transfers
from skyward.client.uploads import Uploads
from skyward.errors import BootstrapError, PoolClosed
from skyward.machines.replacement import Requests
from skyward.node.protocol import AgentToClient, ClientToAgent
from skyward.node.receiver import Malformed, Receiver
from skyward.transport.exceptions import PackedError
from skyward.transport.streams import Producer

__all__ = ["Engine", "Surroundings"]

log = logging.getLogger("skyward.engine")

_BUSY_WAIT = 0.05
_IDLE_WAIT = 1.0
_PATIENCE = 15.0
_UNTOLD = 5.0  # a node that is started again is there sooner


@dataclass(frozen=True)
class Surroundings:
    """What an engine has around it: clock, connections, threads. The tests' simulation has others."""

    clock: Callable[[], float] = time.monotonic
    connections: type[Connections] = Connections
    uploads: type[Uploads] = Uploads
    requests: type[Requests] = Requests
    feed: Callable[..., Producer] = feed


class Engine(NodePlaces, NodeFileAccess, Keeping):
    """Moves calls to nodes and results back."""

    def __init__(self, plan: PoolSettings, surroundings: Surroundings | None = None) -> None:
        around = surroundings or Surroundings()
        self._plan, self._clock, self._feed = plan, around.clock, around.feed
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._connections = around.connections(plan.nodes, plan.reach, plan.revive, plan.session)
        self.requests = around.requests(plan.substitutes)
        self._core = Core(plan, self._connections, self.requests)
        self._meetings = Meetings(self._core, self._connections)
        self._byes: set[int] = set()
        self._forgotten: dict[int, list[str]] = {}
        self._closing = self._stopped = False
        self._stopping, self._deferred = threading.Event(), Deferred()
        self._uploads = around.uploads(
            self._connections.post, self._connections.unacknowledged, plan.address, self._unsendable
        )
        streams = StreamActions(self._connections.post, self._stream_closed, self._defer)
        self._arrivals = Arrivals(plan, self._core, self._uploads, streams)
        self.shared = ClientShared(self._connections.post, plan.nodes)
        self._transfers = Transfers(self._connections.post)
        self._receiver = Receiver(
            AgentToClient, self, self._core, self._arrivals, self.shared, self._transfers, checks=CHECKS
        )
        own = ("load", "feed", "settle", "fail", "end", "emit", "record", *self.keeping_actions)
        methods = {kind: getattr(self, f"_do_{kind.replace(' ', '_')}") for kind in own}
        self._acts: dict[str, Callable[..., None]] = methods | {
            "post": self._connections.post,
            "discard": discard,
            "reconnect": self._connections.reconnect,
            "renounce": self._connections.renounce,
            "inquire": self.requests.inquire,
            "forget blobs": self._uploads.forget,
            "upload": self._uploads.offer,
            "release": plan.release,
            "shared lost": self._do_shared_lost,
        }
        self.abouts, self.after_fork = self._connections.abouts, self._connections.after_fork
        self.thread = threading.Thread(target=self._run, name="skyward-io", daemon=True)

    @property
    def settled(self) -> int:
        """How many calls have ended."""
        return self._core.calls.settled

    def counts(self) -> tuple[int, int, int, int]:
        """How many calls run, wait, have returned, and have failed; of a map's items each is one once it has ended."""
        with self._lock:
            calls = self._core.calls
            running = calls.dispatch.running()
            return running, len(calls.calls) - running, calls.settled - calls.undone, calls.failed

    # opening and closing

    def open(self, deadline: float) -> None:
        """Connects to every node and waits until each has its runners ready."""
        self.thread.start()
        try:
            self._open(deadline)
        except PackedError as exc:  # of a plugin's hook; rebuilt here, where no lock is held
            raise exc.rebuilt() from None

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

    def close(self, grace: float) -> None:
        """Fails what is open, has runners leave their hooks, and disconnects."""
        with self._lock:
            self._refuse_more()
            self._do(self._core.close(self._clock()))
            for number in self._connected():
                self._connections.post(number, [ClientToAgent.bye(grace)])
            end = self._clock() + grace + 1.5
            while not self._byes.issuperset(self._connected()) and self._clock() < end:
                self._changed.wait(0.05)
        self.abandon()

    def abandon(self) -> None:
        """Drops all connections at once; what is on the nodes ends by itself."""
        self._refuse_more()
        self._uploads.close()
        self._stopped = True
        self._connections.wake()
        if self.thread.ident is None:
            self._connections.close()  # it was never opened
        elif self.thread is not threading.current_thread():
            self.thread.join(5)

    def _refuse_more(self) -> None:
        self._closing = self._meetings.closing = True
        self.shared.close()
        self._transfers.close()
        self._stopping.set()
        self._connections.stop_connecting()

    def _connect(self, numbers: Iterable[int], deadline: float) -> None:
        """Connects to nodes for the first time, to all at once, and waits until that is done or has failed."""
        self._meetings.first.update(numbers)
        for number in numbers:
            self._connections.connect(number, deadline)
        while not self._meetings.first.isdisjoint(numbers) and not self._closing:
            self._changed.wait(0.5)

    def _connected(self) -> list[int]:
        return [number for number in range(self._plan.nodes) if self._connections.connected(number)]

    # calls

    def send(self, calls: Sequence[Call]) -> None:
        """Queues calls for any node."""
        with self._lock:
            self._check_open()
            inner = [each for call in calls for each in call.inner]
            batch = [*inner, *calls] if inner else calls
            for call in batch:
                self._adopt(call)
            self._do(self._core.submit(batch, self._clock()))

    @property
    def ranks(self) -> Ranks:
        """Which rank is on which node."""
        return self._core.ranks

    def send_to(self, calls: Sequence[tuple[int, Call]], world: int | None = None) -> bool:
        """Queues calls for certain ranks, all of them or none; more than one of them succeed or fail as one.

        False, and nothing is queued, if the pool has another number of ranks than `world` by now.
        """
        try:
            with self._lock, self._arguments_there(calls[0][1]):
                self._await_up(sorted({self.ranks.places[rank][0] for rank, _ in calls}))
                if world not in (None, len(self.ranks)):
                    return False
                for _, call in calls:
                    self._adopt(call)
                self._do(self._core.submit_to(calls, self._clock()))
                return True
        except PackedError as exc:  # of a call among the arguments; rebuilt here, where no lock is held
            raise exc.rebuilt() from None

    def up(self) -> list[int]:
        """The numbers of the nodes that take calls now."""
        with self._lock:
            return sorted(self._core.nodes.takes_calls())

    def stacks(self, seconds: float = 5.0) -> Stacks:
        """Where the bodies of all nodes stand; a node that does not answer in time has none."""
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
        """Ends a call wherever it is; its verdict comes as for any other call."""
        with self._lock:
            self._do(self._core.cancel(call, why, self._clock()))

    def _adopt(self, call: Call) -> None:
        call.future.on_cancel = lambda: self.stop(call)

    def _check_open(self) -> None:
        """Refuses calls when there is no node, or no pool."""
        if self._closing:
            raise PoolClosed("the pool is closed; open it again with `with sky.ComputePool(...) as pool:`.")
        self._core.check_nodes_left()

    def _await_up(self, numbers: Sequence[int]) -> None:
        """Waits for nodes that are being restarted, replaced or out of reach; a node that is gone is an error."""
        began, told, patience = self._clock(), False, max(_PATIENCE, self._plan.lease)
        while True:
            self._check_open()
            missing = self._core.missing(numbers, late=self._clock() > began + patience)
            if not missing:
                return
            if not told and self._clock() > began + _UNTOLD:
                told = True
                text = (
                    f"a broadcast needs all nodes, and waits for {', '.join(f'node {n}' for n in missing)}, for up to "
                )
                self._do_emit(
                    events.Notice(self._plan.pool, f"{text}{patience:.0f} s. Calls with >> go to others.", "warning")
                )
            self._changed.wait(0.2)

    # doing what the core says; with the lock held

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            self._acts[action[0]](*action[1:])

    def _do_load(self, number: int, uploads: Any) -> None:
        if not self._plan.local:  # local nodes read the files themselves
            self._uploads.load(number, uploads)

    def _do_feed(self, call: Call, number: int) -> None:
        for key, source in call.inputs.items():
            directory = self._plan.directory if self._plan.local else None
            call.feeders[key] = self._feed(call, key, source, partial(self._connections.post, number), directory)

    def _do_settle(self, call: Call, about: dict[str, Any], pieces: list[Any]) -> None:
        if call.keeps is not None:
            self._settle_kept(call)
        elif call.stream is not None:
            call.stream.end()
        elif call.future.cancelled():
            discard(about)
        else:
            self._defer(call.future.settle, about, pieces)

    def _do_fail(self, call: Call, error: BaseException) -> None:
        if call.stream is not None:
            call.stream.end(error)
        call.ref = None
        self._defer(call.future.fail, error)

    def _do_end(self, call: Call) -> None:
        if call.keeps is None:  # else they may be needed to make its result again
            self._plan.release(list(call.uploads))
        call.holds = ()
        for producer in call.feeders.values():
            producer.close()
        call.future.on_cancel = None  # future and call must not keep each other

    def _do_shared_lost(self, number: int, rank: int | None, reason: str) -> None:
        self.shared.lost(number, rank, reason)
        if rank is None:
            self._transfers.lost(number, reason)

    def _do_emit(self, event: events.Event) -> None:
        self._defer(self._plan.emit, event)

    def _do_record(self, keep: events.KeepEnd, end: events.EndOfCall) -> None:
        keep(end)  # now: it only puts it on a list

    # the I/O thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        wait = _IDLE_WAIT
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
        """Has the I/O thread settle a future, emit an event, close a stream: when no lock is held. Must not block."""
        self._deferred.add(act, *args)
        if threading.current_thread() is not self.thread:
            self._connections.wake()

    def handle(self, happened: Sequence[Event]) -> bool:
        """Does what follows from what the connections saw, and what is due; True if this should be done again soon."""
        with self._lock:
            for event in happened:
                if not isinstance(event, Heard):
                    self._follow(event)
                elif self._connections.current(event.number, event.link):  # else the node was given up meanwhile
                    self._hear(event)
            self._do(self._core.turn(self._clock()))
            self._tell_forgotten()
            soon = self._core.calls.soon()
        self._deferred.run()
        return soon

    def _follow(self, event: Event) -> None:
        """Does what follows from a connection that was made, lost, or cannot be made."""
        try:
            self._do(self._meetings.follow(event, self._clock()))
        except Exception as exc:  # of what the node has said of itself: it is given up, and the others are not
            log.exception("node %d cannot be used", event.number)
            self._do(self._core.unreachable(event.number, exc, self._clock()))
        self._changed.notify_all()

    def _hear(self, event: Heard) -> None:
        number, message = event.number, event.message
        if self._connections.peers[number].malformed >= MOST_MALFORMED:
            return  # it is given up; a frame may hold a million such messages
        try:
            actions = self._receiver.hear(message, event.buffers, number, self._clock())
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

    def _stream_closed(self, call: Call) -> None:
        with self._lock:
            self._do(self._core.calls.stream_closed(call, self._clock()))

    def _from_agent_bye(self, number: int, now: float) -> None:
        self._do(self._arrivals.rest_of_output(number, None))
        self._byes.add(number)
        self._changed.notify_all()
