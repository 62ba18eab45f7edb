"""A pool's whole life in virtual time, driven by a seed: client, links, agents, runners; and what must hold.

Each step lets one actor do one thing. While faults happen, speeds differ wildly; then all is calm, and everything that
can happen does. A run that breaks a promise raises `Broken` with what it saw.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from os import scandir
from os.path import basename, exists
from tempfile import TemporaryDirectory
from typing import Any

from skyward import events
from skyward.client.call import Call
from skyward.client.connections import Event, Greeted, NotReached
from skyward.client.kept import KeptResult
from skyward.errors import NodeLost, Stalled, TaskCrashed, TaskTimeout
from skyward.node.protocol import ClientToAgent, Run
from skyward.transport.blobs import key_of
from skyward.transport.exceptions import PackedError
from skyward.transport.streams import Stream
from tests.simulation.client import make_engine
from tests.simulation.machine import Machine
from tests.simulation.network import Connection
from tests.simulation.story import Body, broadcast, cancel, let_go, lose_one, misfortune, submit

__all__ = ["Broken", "World"]

_CALM = 600.0
_SLACK = 8.0
_ROUNDS = 2000
_ASKED = 8
_PATIENCE = 15.0  # a call waits for ten seconds at most for the node that has what it takes


class Broken(AssertionError):
    """A promise was broken."""


class World:
    """One run. Everything that happens is a function of the seed and of how many ranks a node has."""

    def __init__(self, seed: int, trace: bool = False, places: int = 1) -> None:
        self.seed, self.rng, self.places = seed, random.Random(seed), places
        rng = self.rng
        self.trace: deque[str] | None = deque(maxlen=4000) if trace else None
        self.now, self.faults, self.steps = 1000.0, False, 0
        self._tokens = 0
        self.nodes = rng.choice((1, 2, 2, 3))
        self.processes, self.threads = rng.choice(((1, 1), (1, 1), (2, 1), (3, 1), (1, 3)))
        self.processes *= places
        self.lease = rng.choice((0.0, 0.0, 60.0))
        self.groups = self.nodes * places > 1 and rng.random() < 0.25
        self.replaces = self.lease > 0 and rng.random() < 0.5
        self.extra = random.Random(f"kept {seed}")  # of what has to do with kept results: they change nothing else
        self.more = random.Random(f"more {seed}")
        self.keeping = self.extra.random() < (0.1 if self.groups else 0.8 if self.lease else 0.4)
        self.star = self.keeping and self.extra.random() < 0.3  # whether nodes cannot reach each other
        self.files = None if self.lease else TemporaryDirectory(prefix="simulation-")
        self.directory = self.files.name if self.files else "/nowhere"
        self.refs: list[KeptResult] = []  # results that the user has Refs to
        self.orphans: set[str] = set()  # files of results that nobody was told of: they go with the pool's directory
        self.remade: Counter[str] = Counter()
        self.tough = rng.random() < 0.7  # whether machines, agents and links suffer too
        self.hooks_fail = 0
        self.broken_groups: list[set[str]] = [set() for _ in range(self.nodes)]
        self.seen: list[Event] = []  # what the client has read but not handled
        self.uploads: deque[tuple[int, str]] = deque()
        self.feeders: list[Any] = []
        self.reconnecting: dict[int, float] = {}
        self.replacing: dict[int, float] = {}
        self.joining = self._missing()
        self.cut_off: dict[int, float] = {}
        self.going: dict[int, float] = {}
        self.bodies: dict[str, Body] = {}
        self.plans = self.bodies
        self.calls: list[Call] = []
        self.futures: dict[str, Any] = {}
        self.open: list[Any] = []
        self.awaited: list[str] = []  # futures that will be streams
        self.gangs: list[list[Call]] = []
        self.partners: dict[str, set[str]] = {}  # the other ranks of a broadcast
        self.completed: set[str] = set()  # calls whose bodies have returned
        self.streams: dict[str, tuple[Stream[Any], int]] = {}
        self.starts: Counter[tuple[str, int]] = Counter()
        self.began: dict[str, float] = {}
        self.order: dict[tuple[int, int], list[str]] = {}
        self.ends: Counter[str] = Counter()
        self.cancels: dict[str, float] = {}  # when a cancel reached the node
        self.closes: dict[str, float] = {}  # when a body was told that nobody reads its stream any more
        self.cancelled: set[Any] = set()  # futures that the user has cancelled
        self.victims: set[tuple[str, int]] = set()  # attempts whose process has died
        self.innocent: set[tuple[str, int]] = set()  # those whose process the agent had killed
        self.behind: dict[tuple[str, int], float] = {}  # since when a call waits though another node is idle
        self.kept: Counter[str] = Counter()
        self.notices: list[str] = []
        self.disturbed = 0.0
        self.broken: Broken | None = None
        self.closing = self.more.random() < 0.15  # whether the pool is closed in the middle of it all
        self.greetings: list[tuple[float, Greeted]] = []  # answers of agents that are on their way
        self._actors: list[tuple[str, Callable[[], bool]]] = []
        self._stale = True
        self._speeds: list[float] = []
        self.machines = [Machine(self, n) for n in range(self.nodes)]
        self.engine = make_engine(self)
        self.connections: Any = self.engine._connections
        self.engine._changed = _Changed(self)  # type: ignore[assignment]
        self._count_ends()
        self._watch_groups()

    def _missing(self) -> dict[int, float]:
        """Nodes that are missing when the pool opens, and when they come; drawn apart, so that old seeds stay."""
        rng = random.Random(f"missing {self.seed}")
        if not self.lease or rng.random() < 0.6:
            return {}
        return {n: self.now + rng.uniform(0.5, 8) for n in range(rng.randint(1, self.nodes), self.nodes)}

    # what the parts ask of the world

    def clock(self) -> float:
        return self.now

    def token(self) -> str:
        self._tokens += 1
        return f"{self._tokens:016x}"

    def t(self, text: str, *values: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:10.4f} {text % values}")

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            self.broken = self.broken or Broken(f"seed {self.seed}: {text}")
            raise self.broken

    def changed_actors(self) -> None:
        self._stale = True

    def event(self, event: events.Event) -> None:
        if isinstance(event, events.Notice):
            self.t("notice: %s", event.text)
            self.check("bug" not in event.text, event.text)

    def release(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self.kept[digest] -= 1
            self.check(self.kept[digest] >= 0, f"{digest} was released once too often")

    def claimed(self, call: Any, process: Any) -> None:
        self.check(not process.calls.leaving, f"{call.id} was begun in a process that had broken off a body")

    def keeps(self, call: Call) -> None:
        """The user has the Ref to a call's result from the beginning."""
        assert call.keeps is not None
        call.keeps.uses += 1

    def body_started(self, call: Any, process: Any) -> None:
        taken = {name for name, _ in call.header.get("blobs", {}).values()}
        missing = [name for name in taken if key_of(basename(name)) and not self._lies(name, process.node)]
        self.check(self.engine._closing or not missing, f"{call.id} was begun without {missing}")
        key = (call.id, call.header["attempt"])
        self.starts[key] += 1
        self.t("node %d %s: body of %s begins, attempt %d", process.node, process.name, *key)
        self.check(self.starts[key] == 1, f"the body of {call.id} was started twice in attempt {key[1]}")
        self.check(key[1] <= self.bodies[call.id].retries, f"{call.id} was attempted too often")
        self.began[call.id] = self.now
        late = self.now - max(self.cancels.get(call.id, self.now), self.disturbed)
        self.check(self.faults or late < 1.0, f"{call.id} was begun {late:.1f} s after it was cancelled")
        if call.header.get("gang") and process.killed_at is None:  # one that is being killed is of no group any more
            self.order.setdefault((process.node, process.place), []).append(call.id)
            self.check(call.header.get("place", 0) == process.place, f"{call.id} was begun by another rank")

    def _lies(self, name: str, node: int) -> bool:
        """Whether a part of a kept result lies on a node."""
        return name in self.machines[node].blob_cache.present if self.lease else exists(name)

    def untold(self) -> set[str]:
        """Files of kept results that the client knows nothing of."""
        known = {path for result in self.engine._core.calls.kept.results.values() for path, _ in result.blobs}
        return {entry.path for entry in scandir(self.directory) if key_of(entry.name)} - known if self.files else set()

    def body_ended(self, call: Any) -> None:
        self.t("body of %s ends", call.id)
        began, limit = max(self.began.get(call.id, self.now), self.disturbed), self.bodies[call.id].timeout
        took, stopped = self.now - began, self.now - max(began, self.cancels.get(call.id, self.now))
        if self.faults:
            return  # nothing is promised in time while everybody is slow
        if limit is not None:
            self.check(took < limit + 2.0 + _SLACK, f"{call.id} ran for {took:.1f} s in spite of its limit of {limit}")
        if any(known.id == call.id and known.attempt > call.header["attempt"] for known in self.calls):
            return  # its node was given up, by mistake: nobody can stop it there before the node is back
        self.check(stopped < 3.0 + _SLACK, f"{call.id} ran for {stopped:.1f} s after it was cancelled")
        unread = self.now - max(began, self.closes.get(call.id, self.now))
        # only where every node can be reached: it is the client that has such a body stopped
        self.check(self.tough or unread < 6.0 + _SLACK, f"{call.id} ran for {unread:.1f} s after its stream was closed")

    def _count_ends(self) -> None:
        for name in ("settle", "fail"):
            real = getattr(self.engine, f"_do_{name}")

            def counted(call: Call, *rest: Any, real: Any = real, name: str = name) -> None:
                self.ends[call.id] += 1
                self.t("%s %s %s", name, call.id, rest)
                self.check(self.ends[call.id] == 1, f"{call.id} ended twice")
                stuck = any(self.plans[rank.id].outcome == "wait" for rank in call.gang)
                self.check(stuck or not isinstance(rest[0], Stalled), f"{call.id} was stopped, and nobody waited")
                if name == "fail":
                    self._check_blame(call, rest[0])
                if name == "settle" and rest[0].buffers and call.stream is None and call.keeps is None:
                    self.check(_unpickled(rest[0].buffers[0]) == call.id, f"{call.id} got the result of another call")
                real(call, *rest)

            setattr(self.engine, f"_do_{name}", counted)

    def _watch_groups(self) -> None:
        """A broken group gets no calls, and is made again after its ranks have ended that were told to."""
        core, connections = self.engine._core, self.engine._connections
        renew, post = core.renew, connections.post

        def renewed(now: float) -> list[Any]:
            stopping = [call.id for call in core.calls.calls.values() if call.state == "stopping"]
            self.check(not stopping, f"a group is made again while {stopping} are being stopped")
            return renew(now)

        def posted(number: int, messages: list[Any], *rest: Any) -> None:
            calls = [message.id for message in messages if isinstance(message, Run)]
            self.check(not (core.nodes.tainted and calls), f"a broken group is sent {calls}")
            post(number, messages, *rest)

        core.renew = renewed  # type: ignore[method-assign]
        connections.post = posted  # type: ignore[method-assign]

    def _check_blame(self, call: Call, error: BaseException) -> None:
        """A call fails with what has happened to it, and not with what has happened to another."""
        if any(result.error is error for result in call.needs):
            return  # an argument's
        plan, attempt = self.plans[call.id], (call.id, call.attempt)
        plain = not call.needs and not call.gang and call.stream is None and call.keeps is None
        match error:
            case TaskCrashed():
                just = plan.outcome == "exit" or attempt in self.victims
            case TaskTimeout():
                just = plan.timeout is not None
            case NodeLost():
                just = self.tough or self.groups or attempt in self.innocent
            case PackedError():
                just = plan.outcome == "error"
            case CancelledError() if plain:
                just = call.future in self.cancelled
            case _:
                just = True
        self.check(just, f"{call.id} failed with {error!r}, which did not happen to it")

    # actors

    def actors(self) -> list[tuple[str, Callable[[], bool]]]:
        if self._stale:
            self._stale = False
            made: list[tuple[str, Callable[[], bool]]] = [("uploads", self._upload), ("feeders", self._feed)]
            for machine in self.machines:
                n = machine.node
                made += [
                    (f"link {n}", lambda m=machine: m.connection is not None and m.connection.deliver()),
                    (f"client {n}", lambda n=n: self._client_reads(n)),
                    (f"agent {n}", machine.step),
                    (f"buffers {n}", lambda m=machine: m.alive and m.blob_cache.step()),
                    (f"reconnect {n}", lambda n=n: self._reconnect(n)),
                ]
                for process in machine.runners.processes.values():
                    made += [
                        (f"reader {process.name}", process.step_reader),
                        ("fork_server", lambda p=process: _killed(p)),
                    ]
                    made += [
                        (f"{process.name}.{i}", lambda p=process, i=i: p.step_worker(i)) for i in range(self.threads)
                    ]
            made += [
                ("turn", self._turn),
                ("greetings", self._greeted),
                ("streams", self._read_streams),
                ("replace", self._replace),
                ("join", self._join),
            ]
            self._actors = made
            self._speeds = [10 ** self.rng.uniform(-2, 0) for _ in made]
        return self._actors

    def _client_reads(self, n: int) -> bool:
        peer, connection = self.connections.peers[n], self.machines[n].connection
        if connection is None or peer.link.sock is not connection.client:
            return False
        if not (connection.client.arrived or connection.client.eof or peer.link.writing):
            return False
        peer.link.flush()
        self.seen += self.connections.read(n)
        if not self.faults or self.rng.random() < 0.7:  # else other threads do something in between
            self._turn()
        return True

    def _turn(self) -> bool:
        if self.engine._stopped:
            return False
        self.handle(*self.connections.notice_silence())
        return False

    def handle(self, *happened: Event) -> None:
        """What the engine's I/O thread does with what its connections saw."""
        seen, self.seen = self.seen, []
        self.engine.handle([*seen, *happened])
        self.connections.drop_renounced()
        if self.broken is not None:
            raise self.broken  # raised before, where somebody caught it

    def _upload(self) -> bool:
        if not self.uploads:
            return False
        node, name = self.uploads.popleft()
        self.connections.post(node, [ClientToAgent.Blob(name, 0, 1, [b"x"])])
        return True

    def _feed(self) -> bool:
        moves = [feeder.step() for feeder in self.feeders]
        return any(moves)

    def _reconnect(self, n: int) -> bool:
        due = self.reconnecting.get(n)
        if due is None or due > self.now:
            return False
        del self.reconnecting[n]
        if self.connections.connected(n) or self.engine._closing:
            return True
        machine = self.machines[n]
        if self.lease and self.faults and self.more.random() < 0.2:
            self.engine.ended(n, "its provider says that it is gone")  # and is mistaken
        try:
            if not machine.alive or self.cut_off.get(n, 0.0) > self.now:
                raise TimeoutError("no answer")
            self.attach(n, late=self.faults and self.more.random() < 0.2)
        except OSError as exc:
            self.handle(NotReached(n, exc))
        return True

    def _greeted(self) -> bool:
        due = [greeting for greeting in self.greetings if greeting[0] <= self.now]
        for greeting in due:
            self.greetings.remove(greeting)
            self.handle(greeting[1])
        return bool(due)

    def attach(self, n: int, late: bool = False) -> None:
        """Connects to a node's agent, as the client's connections does; its answer may come late."""
        machine, peer = self.machines[n], self.connections.peers[n]
        connection = Connection(self.rng)
        home = machine.agent._home
        before, _ = home._session, home.attach(connection.agent, peer.hello())
        left = before in (None, home._session) or not machine.agent._calls.calls
        self.check(left, f"node {n} goes on with the calls of a session that was given up")
        machine.connection = connection
        if self.faults and self.rng.random() < 0.1:
            connection.cut()  # the agent has admitted us, and we never learn of it
            raise ConnectionResetError("cut during the greeting")
        self.t("greeted by %d", n)
        greeted: Any = (n, peer.link, connection.client, connection.welcome())
        if not late:
            self.handle(Greeted(*greeted))
            return
        self.greetings.append((self.now + self.more.choice((0.01, 1.0, 5.0)), Greeted(*greeted)))
        if self.lease and self.more.random() < 0.5:
            self.engine.ended(n, "its provider says that it is gone")

    def _replace(self) -> bool:
        moved = False
        for n, due in list(self.replacing.items()):
            if due > self.now or self.engine._closing:
                continue
            vacant, actions = self.engine._core.vacate(n, self.now)
            self.engine._do(actions)
            if not vacant:
                continue
            self.t("another machine takes the place of %d", n)
            self.machines[n].vanish()
            self.machines[n] = Machine(self, n)
            self.going.pop(n, None)
            self.reconnecting.pop(n, None)
            self.changed_actors()
            faults, self.faults = self.faults, False
            self.attach(n)
            self.faults = faults
            del self.replacing[n]
            moved = True
        return moved

    def _join(self) -> bool:
        n = min(self.joining, default=None)
        if n is None or self.joining[n] > self.now or self.engine._closing:
            return False
        admitted, actions = self.engine._core.admit(n, self.now)
        self.engine._do(actions)
        if not admitted:
            return False
        self.t("%d joins", n)
        running = [rank.id for gang in self.gangs for rank in gang if rank.id in self.engine._core.calls.calls]
        self.check(not running, f"the ranks change while {running} run")
        faults, self.faults = self.faults, False
        self.attach(n)
        self.faults = faults
        del self.joining[n]
        self.check(len(self.engine.ranks) == (n + 1) * self.places, f"node {n} is no rank after it has joined")
        return True

    def _read_streams(self) -> bool:
        moved = False
        for call_id in [i for i in self.awaited if self.futures[i].done()]:
            self.awaited.remove(call_id)
            try:
                value = self.futures[call_id].result(0)
            except (Exception, CancelledError):
                continue
            if isinstance(value, Stream):
                self.streams[call_id] = (value, 0)
        for call_id, (stream, count) in list(self.streams.items()):
            consumer: Any = stream._consumer
            if self.faults and self.rng.random() < 0.02:
                stream.close()
            for _ in range(self.more.choice((1, 5, 200))):
                if not (consumer._items or consumer._ended):
                    break
                moved = True
                try:
                    item = next(stream)
                except (Exception, CancelledError):
                    del self.streams[call_id]
                    break
                count += 1
                self.check(item == (call_id, count), f"stream {call_id} gave {item} after {count - 1}")
                self.streams[call_id] = (stream, count)
                if self.more.random() < 0.005:
                    stream.close()
        return moved

    # the run

    def run(self) -> None:
        """Everything from opening to the end; raises Broken when a promise is broken."""
        try:
            self._run()
        finally:
            if self.files is not None:
                self.files.cleanup()

    def _run(self) -> None:
        rng = self.rng
        for n in range(self.nodes - len(self.joining)):
            self.attach(n)
        self.engine._core.settle_ranks()
        self.engine._do(self.engine._core.renew(self.now))
        self._calm(lambda: self.engine._core.nodes.all_ready(), "opening")
        self.faults = True
        self.engine._core.calls.dispatch._mean = rng.choice((None, 0.0005, 0.01))
        for machine in self.machines:
            machine.agent._calls.mean = rng.choice((None, None, 0.0005, 0.01))
        submit(self, rng.randint(4, 16))
        length = rng.randint(150, 700)
        end = self.more.randint(1, length) if self.closing else length
        for step in range(end):
            if step % 50 == 0:
                self._speeds = [10 ** rng.uniform(-2, 0) for _ in self.actors()]
            if self.keeping and self.extra.random() < 0.04:
                (let_go if self.extra.random() < 0.8 else lose_one)(self)
            chance = rng.random()
            if chance < 0.012:
                submit(self, rng.randint(1, 6))
            elif chance < 0.02:
                broadcast(self)
            elif chance < 0.045:
                cancel(self)
            elif chance < 0.057:
                misfortune(self)
            elif chance < 0.2:
                self.advance(rng.choice((0.0002, 0.001, 0.01, 0.06, 0.06, 0.5)))
            else:
                self._move_one()
        if self.closing:
            self._close()
            return
        self.faults, self.disturbed = False, max(self.now, self.disturbed)
        for result in [result for result in self.refs if self.extra.random() < 0.5]:
            self.refs.remove(result)
            self.engine.release_kept(result)
        self._calm(self._all_done, "calls to end")
        self._check_refs()
        self._calm(self._nothing_kept, "what was kept to be let go")
        self._check_order()

    def _close(self) -> None:
        """The user leaves the pool's block: every call has ended then, and nothing is left of it, here or on nodes."""
        self.t("the pool is closed")
        self.engine.close(2.0)
        self.engine._deferred.end()  # as the I/O thread does at its end
        calls = self.engine._core.calls
        self.check(not calls.calls and calls.dispatch.load() == (0, 0), "calls are left of a closed pool")
        waiting = [i for i, future in self.futures.items() if not future.done()]
        self.check(not waiting and all(f.done() for f in self.open), f"{waiting} wait for a closed pool")
        unended = [call.id for call in self.calls if self.ends[call.id] != 1]
        self.check(not unended, f"{unended} have not ended once each with their pool")
        self.check(all(feeder.closed for feeder in self.feeders), "an iterator is read for a closed pool")
        remade = Counter(name for result in calls.kept.results.values() if result.call for name in result.call.uploads)
        self.check(+self.kept == remade, f"{dict(+self.kept)} of a closed pool are kept")
        for stream, _ in self.streams.values():
            self.check(stream._consumer.ended, "a stream of a closed pool has no end")
        self.faults, limit = False, self.now + 30.0
        self._calm(lambda: self.now > limit, "a while to pass")
        for machine in self.machines:
            there = machine.alive and machine.agent._calls.closing and not machine.left
            self.check(not there, f"node {machine.node} does not leave a closed pool")
            alive = [name for name, process in machine.runners.processes.items() if process.exit is None]
            self.check(not machine.left or not alive, f"{alive} of node {machine.node} outlive their agent")

    def wait(self, seconds: float) -> None:
        """The user's thread waits, while others move."""
        for _ in range(10):
            self._move_one()
        self.advance(seconds)

    def _move_one(self) -> None:
        """One of the actors does something; most that are asked have nothing to do."""
        for _ in range(_ASKED):
            actors = self.actors()
            if self.rng.choices(actors, self._speeds)[0][1]():
                return

    def _check_refs(self) -> None:
        """What the user still has Refs to is where it is said to be, or said to be lost; then all are let go."""
        for result in self.refs:
            self.check(result.state in ("there", "lost", "failed"), f"{result.key} is {result.state} in the end")
            self.check((result.error is None) == (result.state == "there"), f"{result.key}: no error tells of its end")
            for number in result.where if self.lease or result.state == "there" else ():
                lacks = [name for name, _ in result.blobs if not self._lies(name, number)]
                gone = self.lease and (not self.machines[number].alive or number in self.reconnecting)
                self.check(gone or not lacks, f"node {number} is said to keep {result.key}, and does not")
            somewhere = bool(result.where or result.home)
            self.check(not self.lease or somewhere == (result.state == "there"), f"{result.key} is kept nowhere")
            self.engine.release_kept(result)
        self.refs = []

    def advance(self, seconds: float) -> None:
        """Time passes; machines that were to be taken away are."""
        self.now += seconds
        for n, when in list(self.going.items()):
            if when <= self.now:
                del self.going[n]
                if self.machines[n].alive:
                    self.machines[n].vanish()

    def _calm(self, over: Callable[[], bool], what: str) -> None:
        """Everything that can happen does, until `over`."""
        limit = self.now + _CALM
        while not over():
            for _ in range(_ROUNDS):
                actors = list(self.actors())
                start = self.rng.randrange(len(actors))
                moves = [act() for _, act in actors[start:] + actors[:start]]
                if not any(moves):
                    break
            else:
                raise Broken(f"seed {self.seed}: something goes round in circles\n{self.where()}")
            self._check_idle()
            self.advance(self._next_due() - self.now)
            if self.now > limit:
                raise Broken(f"seed {self.seed}: waited without effect for {what}\n{self.where()}")

    def _check_idle(self) -> None:
        """No call waits for long, here or behind others on a node, while another node has nothing to do."""
        dispatch: Any = self.engine._core.calls.dispatch
        free = {n for n, node in enumerate(dispatch._nodes) if node.up and len(node.inflight) < node.slots}
        waiting = [(None, call) for call in dispatch.waiting()]
        for n, node in enumerate(dispatch._nodes):
            if self._moves(n):
                waiting += [(n, call) for call in list(node.inflight.values())[node.slots :]]
        behind = {
            (call.id, call.attempt)
            for n, call in waiting
            if free - {n} and call.movable and call.state != "stopping" and not self.starts[call.id, call.attempt]
        }
        self.behind = {key: self.behind.get(key, self.now) for key in behind}
        for (call_id, _), since in self.behind.items():
            waited = self.now - max(since, self.disturbed)
            self.check(waited < _PATIENCE, f"{call_id} has waited for {waited:.1f} s while another node was idle")

    def _moves(self, n: int) -> bool:
        """Whether a node is there, and nothing in it stands still."""
        machine = self.machines[n]
        stopped = [process for process in machine.runners.processes.values() if process.frozen_until > self.now]
        return machine.alive and self.connections.connected(n) and not stopped and machine.frozen_until <= self.now

    def _next_due(self) -> float:
        """When something happens next that time alone brings about."""
        due = [self.now + 1.0, *self.reconnecting.values(), *self.replacing.values(), *self.cut_off.values()]
        due += [*self.joining.values(), *(moment for moment, _ in self.greetings)]
        due += [timer[0] for timer in self.engine._core.calls._timers[:1]]
        for machine in self.machines:
            due += [machine.frozen_until, machine.agent._calls.due(), machine.agent._timers.due()]
            for process in machine.runners.processes.values():
                due += [process.frozen_until, process.deaf_until]
                due += [worker.until for worker in process.workers if worker.phase == "body"]
        return min(moment for moment in due if moment > self.now) + 0.0001

    def _all_done(self) -> bool:
        self.open = [future for future in self.open if not future.done()]
        return not self.open and not self.engine._core.calls.calls

    def _nothing_kept(self) -> bool:
        """Whether nothing is left of calls anywhere, and every slot is free."""
        core, dispatch = self.engine._core, self.engine._core.calls.dispatch
        if core.calls.kept.results or core.calls.kept._requests or self.engine._forgotten:
            return False
        if dispatch.load() != (0, 0) or +self.kept or self.replacing or self.joining or self.reconnecting_soon():
            return False
        if any(node.recalled or node.stopping for node in dispatch._nodes):
            return False
        if self.untold() - self.orphans and not any(node.state == "lost" for node in core.nodes.all):
            return False  # what a lost node did not tell of goes with the pool's directory
        unformed = self.groups and any(node.state != "ready" for node in core.nodes.all)
        if unformed and not any(node.state in ("lost", "leaving") for node in core.nodes.all):
            return False
        for machine, node in zip(self.machines, core.nodes.all, strict=True):
            given_up = node.state in ("silent", "lost") and node.error is None
            if self.lease and given_up and machine.alive:
                return False  # it can be reached, and is not tried again
            if not machine.alive or unformed or node.state in ("lost", "leaving", "replaced"):
                continue  # nobody waits for it, and no group forms without it
            calls = machine.agent._calls
            processes = machine.runners.processes
            if node.state != "ready" or calls.calls or calls.queue or machine.blob_cache.uses:
                return False
            if len(processes) != self.processes or any(slot.state != "ready" for slot in calls.slots.values()):
                return False
            places = Counter(slot.place for slot in calls.slots.values())
            if any(places[place] != self.processes // self.places for place in range(self.places)):
                return False
            if any(slot.calls or slot.stops for slot in calls.slots.values()):
                return False
            if any(key_of(name) for name in machine.blob_cache.present) or any(p.objects for p in processes.values()):
                return False
            if any(p.calls.calls or any(w.phase != "idle" for w in p.workers) for p in processes.values()):
                return False
            links = (self.connections.peers[machine.node].link, machine.agent._home._link)
            if any(len(link._kept) > 3 for link in links):
                return False
        return True

    def reconnecting_soon(self) -> bool:
        """Whether a connection to a machine that is there is still missing."""
        return bool(self.greetings) or any(self.machines[n].alive for n in self.reconnecting)

    def _check_order(self) -> None:
        """Broadcasts begin in the same order in every rank that runs one call at a time."""
        if self.processes * self.threads > self.places:
            return
        rank = {call.id: index for index, gang in enumerate(self.gangs) for call in gang}
        for (node, place), ids in self.order.items():
            found = [rank[i] for i in ids]
            self.check(found == sorted(found), f"broadcasts began in another order on node {node}.{place}: {found}")

    def where(self) -> str:
        """Where everything stands, for whoever has to find out why."""
        lines = [f"client: {[(c.id, c.state, c.node, c.attempt) for c in self.engine._core.calls.calls.values()]}"]
        lines += [f"open futures: {[i for i, f in self.futures.items() if not f.done()]} kept {dict(+self.kept)}"]
        lines += [f"replacing {self.replacing} reconnecting {self.reconnecting}"]
        for machine, node in zip(self.machines, self.engine._core.nodes.all, strict=True):
            calls = machine.agent._calls
            lines.append(
                f"node {machine.node}: {node} alive {machine.alive} linked {self.connections.connected(machine.node)}"
            )
            lines.append(f"  calls {[(c.id, c.state) for c in calls.calls.values()]} uses {machine.blob_cache.uses}")
            slots = calls.slots.values()
            lines += [f"  slot {s.name} at {s.place} {s.state} {list(s.calls)} stops {s.stops}" for s in slots]
            for p in machine.runners.processes.values():
                workers = [(w.phase, w.call and w.call.id) for w in p.workers]
                lines.append(f"  process {p.name} exit {p.exit} {list(p.calls.calls)} {workers} in {len(p.inbox)}")
        return "\n".join(lines)


class _Changed:
    """The engine's condition: whoever waits for it has the world move."""

    def __init__(self, world: World) -> None:
        self._world = world

    def wait(self, seconds: float) -> None:
        self._world.wait(seconds)

    def notify_all(self) -> None:
        pass


def _killed(process: Any) -> bool:
    if process.killed_at is None or process.exit is not None:
        return False
    process.die(-9, ordered=True)
    return True


def _unpickled(data: Any) -> Any:
    import pickle

    return pickle.loads(data)
