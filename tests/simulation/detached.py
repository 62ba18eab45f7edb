"""Detached runs by seed, in a time of their own: real hand-over, table, terms, steward, adoption and keeper's rules.

Simulated are sockets, processes and the clock. A seed determines how long programs run and how they end, when they open
their pool, and the faults: submissions that are cut after any step, agents that restart, nodes that cannot be reached,
links that are silent, processes of an earlier start that greet again, words that come late, stewards that are killed,
programs that are killed while they keep what they return.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.node import keeper as keeper_module
from skyward.node import steward as steward_module
from skyward.node.orders import RunOrder
from skyward.node.run_folder import FOLDER, RESULTS, RETURNED
from skyward.node.run_table import Action, Event, Run
from skyward.node.steward import Leases, Steward, _Adoption
from skyward.node.terms import Terms, TermsPage
from skyward.pool import detached, run_call

__all__ = ["Broken", "World", "simulate"]

LEASE, GO_WITHIN, GRACE = 60.0, 60.0, 10.0
RESULT = b"what the function returned"


class Broken(AssertionError):
    """What a seed has shown to be wrong."""


class Killed(BaseException):
    """A process ends at this moment."""


class Disk:
    """`os` for a program that is killed while it writes: what is not yet on disk is cut off."""

    def __init__(self, folder: str, kill: int) -> None:
        self.environ, self._steps, self._unsynced = {FOLDER: folder}, itertools.count(), dict[int, str]()
        self._kill = kill

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        self._step()
        fd = os.open(path, flags, mode)
        self._unsynced[fd] = str(path)
        return fd

    def fsync(self, fd: int) -> None:
        self._step()
        os.fsync(fd)
        self._unsynced.pop(fd, None)
        self._step()

    def cut(self) -> None:
        for path in self._unsynced.values():
            os.truncate(path, len(RESULT) // 2)

    def _step(self) -> None:
        if next(self._steps) == self._kill:
            raise Killed


class Machine:
    """A machine of the run: a keeper by its real rules, and its agents."""

    def __init__(self, world: World, agents: int, ttl: float) -> None:
        self.world, self.alive, self.late = world, True, list[dict[str, Any]]()
        self.keeper: Any = object.__new__(keeper_module._Keeper)
        self.keeper._ending, self.keeper._file, self.keeper._lease = False, None, LEASE
        self.keeper._ttl, self.keeper._born, self.keeper._joiner = ttl, world.now, 0
        self.keeper._page = TermsPage(agents)
        self.keeper._nodes = [keeper_module._Node(number, SimpleNamespace(), number, {}) for number in range(agents)]
        self.slots = [self.keeper._page.slot(number) for number in range(agents)]
        self.links = [0.0] * agents  # when each agent last heard over its link
        for slot in self.slots:
            slot.hear(world.now)

    def restart(self, agent: int, code: int) -> None:
        """An agent ends, and a new one knows what the page says."""
        self.keeper._agent_died(self.keeper._nodes[agent], code)
        self.slots[agent] = self.keeper._page.slot(agent)
        self.links[agent] = self.world.now if code else 0.0

    def sample(self) -> None:
        for slot, heard in zip(self.slots, self.links, strict=True):
            slot.hear(heard)  # every second, as agents do
        if self.alive and self.keeper._over():
            self.alive = False

    def greet(self, agent: int, epoch: int) -> bool:
        """Whether the agent lets a driver in, as `ClientListener` and `roles.refusal` do."""
        return self.alive and not self.slots[agent].terms.is_stale(epoch)

    def tell(self, agent: int, word: dict[str, Any]) -> None:
        slot = self.slots[agent]
        if slot.terms.is_stale(word["terms"]):
            raise PermissionError("stale")
        deadline = self.world.now + word["left"]
        slot.take(Terms(self.world.now, deadline, ending=word["end"], epoch=word["terms"], serial=word["serial"]))


class SimSteward(Steward):
    """The real steward, but for its sockets and processes."""

    def __init__(self, world: World, order: RunOrder) -> None:
        self.world = world
        self._order, self._clock = order, lambda: world.now
        self._run, self._epoch = Run(restarts=order.restarts), 0
        self._end, self._since = world.now + order.left, world.now
        self._hold, self._closing = order.hold, order.grace + 5
        self._journal: Any = SimpleNamespace(append=world.note)
        self._output: Any = SimpleNamespace(settle=lambda: None, make_room=lambda: None, end=lambda: None, size=0)
        self._leases = Leases([agent["node"] for agent in order.agents], world)
        self._adoption = _Adoption(order)
        self._others = [agent["node"] for agent in order.agents if agent["node"] not in order.here]
        self._sleep = lambda seconds: None

    def _start_driver(self) -> None:
        self.world.start_driver(self._epoch)

    def _signal(self, number: int) -> None:
        self.world.signal(number)

    def _do(self, action: Action) -> None:
        super()._do(action)
        self.world.check_epochs()


class World:
    def __init__(self, seed: int, folder: str) -> None:
        self.chance, self.folder = random.Random(seed), folder
        os.makedirs(os.path.join(folder, RESULTS))
        self.guarded, self.released, self.told_go = True, 0.0, False  # by the watchdog of whoever submits
        self.now, self._count = 1000.0, itertools.count()
        self._acts: list[tuple[float, int, Callable[[], None]]] = []
        self.journal: list[dict[str, Any]] = []
        self.pids, self.pid, self.epoch_of = set[int](), 100, dict[int, int]()
        self.silent = set[int]()
        chance = self.chance
        self.left = chance.choice((300.0, 1200.0))
        agents = chance.randint(1, 3)
        self.machines = [Machine(self, agents if number == 0 else 1, self.left + 5) for number in range(2)]
        self.places = [(0, agent) for agent in range(agents)] + [(1, 0)]
        nodes = [{"node": number, "place": []} for number in range(len(self.places))]
        empty: dict[str, Any] = {"env": {}, "wanted": {"nodes": 1}, "placed": {}, "head": {}, "identity": None}
        order = RunOrder(
            folder=folder,
            program="",
            socket="",
            argv=[],
            payload="",
            cwd="/",
            umask=0,
            agents=nodes,
            here=list(range(agents)),
            lease=LEASE,
            left=self.left,
            drain=10.0,
            grace=GRACE,
            **{"restarts": chance.randint(0, 2), "go_within": GO_WITHIN, "hold": chance.choice((0.0, 30.0)), **empty},
        )
        self.steward: SimSteward | None = SimSteward(self, order)

    # time

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._acts, (self.now + seconds, next(self._count), act))

    def run(self) -> None:
        self.began = self.now
        self.submit()
        self.after(1.0, self.sample)
        self.after(LEASE / 8, self.renew)
        for _ in range(self.chance.randint(0, 6)):
            self.after(self.chance.uniform(1, self.left), self.fault)
        limit = self.now + self.left + 2 * LEASE
        while self._acts and self.now < limit and any(machine.alive for machine in self.machines):
            self.now, _, act = heapq.heappop(self._acts)
            act()
            self.check_epochs()
        if any(machine.alive for machine in self.machines):
            raise Broken("a machine lives beyond lease and deadline")

    # submission

    def submit(self) -> None:
        """It may be killed before and after each step, and be slow to say `go`."""
        cut = self.chance.choice((*range(8), *[8] * 24))
        steps, steward = itertools.count(), self.steward
        assert steward is not None

        def step(act: Callable[[], object]) -> Callable[..., str]:
            def stepped(*_: Any) -> str:
                for each in (act, bool):
                    if next(steps) == cut:
                        raise Killed
                    each()
                return ""

            return stepped

        def hold() -> None:
            steward._raise_epoch()
            steward._renew()

        def release() -> None:
            self.guarded, self.released = False, self.now

        def go() -> None:
            self.told_go = True
            if self.guarded:
                raise Broken("the program is started while the watchdog would end its machines")
            self.after(self.chance.uniform(0, 55), lambda: self.event(Event("go")))

        keeper: Any = SimpleNamespace(hold=step(hold), go=step(go))
        order: Any = steward._order
        try:
            detached.hand_over(keeper, order, step(bool), step(release))  # type: ignore[arg-type]
        except Killed:
            if self.guarded:
                self.after(self.chance.uniform(0, 20), self.watchdog)

    def watchdog(self) -> None:
        """Ends what its client has left."""
        for machine in self.machines:
            machine.keeper._ending = True

    def sample(self) -> None:
        steward = self.steward
        abandoned = not self.guarded and not self.told_go and self.now > self.released + GO_WITHIN + LEASE + 5
        if abandoned and any(machine.alive for machine in self.machines):
            raise Broken("nobody has the machines of a submission that was cut")
        working = steward is not None and steward._run.state == "running" and self.now < steward._end - GRACE - 10
        for number, machine in enumerate(self.machines):
            killed = machine.keeper._ending
            machine.sample()
            if not machine.alive and working and not killed:
                raise Broken(f"machine {number} ended while the run's program was running")
            if not machine.alive and number == 0:
                self.steward, self.pids = None, set()  # they end with their keeper
        self.after(1.0, self.sample)
        self.timers()

    def timers(self) -> None:
        """What the steward's own loop finds to be over."""
        steward = self.steward
        if steward is None or steward._run.state == "over":
            return
        steward._events = SimpleNamespace(get=_nothing)
        event = steward._next() if _due(steward) else None
        if event is not None:
            self.event(event)

    def event(self, event: Event) -> None:
        if self.steward is not None:
            before = self.steward._run.state
            self.steward.handle(event)
            if before != "over" and self.steward._run.state == "over":
                self.steward = None

    def renew(self) -> None:
        if self.steward is not None:
            self.steward._renew()
        self.after(LEASE / 8, self.renew)

    # agents, as `Leases` sees them

    def tell(self, node: int, word: dict[str, Any]) -> None:
        if word["terms"] > self.epoch():
            raise Broken("an agent is told an epoch that is not in the journal")
        number, agent = self.places[node]
        machine = self.machines[number]
        if node in self.silent or not machine.alive:
            raise OSError("cannot be reached")
        machine.tell(agent, word)
        machine.late.append(dict(word))

    # programs

    def start_driver(self, epoch: int) -> None:
        if self.pids:
            raise Broken("two programs run at a time")
        self.pid += 1
        self.pids, self.epoch_of[self.pid] = {self.pid}, epoch
        pid, pools = self.pid, self.chance.randint(0, 2)
        self.program(pid, pools)

    def program(self, pid: int, pools: int) -> None:
        """Works, opens its pool so often, and ends; all of it in its own time."""
        if pid not in self.pids:
            return
        if pools and self.steward is not None:
            answer = self.steward._adoption.ask(pid, {"nodes": 1}, self.epoch_of[pid])
            if "refused" in answer:
                raise Broken(f"a program cannot adopt its own machines: {answer['refused']}")
            for node, (number, agent) in enumerate(self.places):
                if node not in self.silent and not self.machines[number].greet(agent, answer["epoch"]):
                    raise Broken(f"the present program is refused by node {node}")
                self.machines[number].links[agent] = self.now
            self.after(self.chance.uniform(1, 100), lambda: self.close(pid, pools))
        else:
            code = self.chance.choice((0, 0, 1))
            end = self.exit if code else self.returns
            self.after(self.chance.uniform(0, 200), lambda: end(pid, code))

    def close(self, pid: int, pools: int) -> None:
        """`bye` to every agent, and the pool's connection to the steward ends."""
        if pid not in self.pids or self.steward is None:
            return
        if self.chance.random() < 0.2:
            self.exit(pid, 1)  # killed while its pool is open: its connection ends with it, or is held by a child
            return
        for number, agent in self.places:
            if self.machines[number].alive:
                self.machines[number].restart(agent, 0)
        self.steward._adoption.release(pid)
        self.after(self.chance.uniform(0, 90), lambda: self.program(pid, pools - 1))

    def returns(self, pid: int, code: int) -> None:
        """Keeps what it returns, unless an earlier start has; it may be killed meanwhile."""
        disk: Any = Disk(self.folder, self.chance.choice((0, 1, 2, 9, 9)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_call, "os", disk)
            try:
                if pid in self.pids and not run_call._file(RETURNED).exists():
                    run_call._keep(RETURNED, RESULT)
            except Killed:
                disk.cut()
                code = 137
        self.exit(pid, code)

    def note(self, fact: dict[str, Any]) -> None:
        self.journal.append(fact)
        if fact.get("result") and Path(self.folder, RETURNED).read_bytes() != RESULT:
            raise Broken("a result is told that is not on disk")

    def exit(self, pid: int, code: int) -> None:
        if pid in self.pids:
            self.pids.discard(pid)
            self.event(Event("exited", code))

    def signal(self, number: int) -> None:
        for pid in list(self.pids):
            if number == 9 or self.chance.random() < 0.7:
                self.after(0.1, lambda pid=pid: self.exit(pid, 128 + number))

    # faults

    def fault(self) -> None:
        chance, node = self.chance, self.chance.randrange(len(self.places))
        number, agent = self.places[node]
        machine = self.machines[number]
        match chance.choice(("restart", "silent", "stale", "late", "stop", "steward", "old link")):
            case "restart":
                machine.restart(agent, 1)
            case "silent":  # a machine that nobody reaches for a while
                self.silent.add(node)
                seconds = chance.uniform(1, LEASE / 2)
                self.after(seconds, lambda: self.silent.discard(node))
            case "stale":  # a process of an earlier start that was frozen
                for old in range(1, self.epoch()):
                    if machine.greet(agent, old) and node not in self.silent and self.told(node):
                        raise Broken(f"a program of start {old} is let in during start {self.epoch()}")
            case "late" if machine.late:  # a word that was long under way
                word = chance.choice(machine.late)
                before = machine.slots[agent].terms
                if not before.is_stale(word["terms"]) and not word["end"]:
                    newer = (before.epoch, before.serial) >= (word["terms"], word["serial"])
                    machine.tell(agent, word)
                    if newer and machine.slots[agent].terms.deadline != before.deadline:
                        raise Broken("an older word has changed the deadline")
            case "stop":
                self.event(Event("stop"))
            case "steward" if chance.random() < 0.3:
                self.steward, self.pids = None, set()
                self.machines[0].keeper._ending = True  # its keeper sees its end
            case "old link":
                machine.links[agent] = self.now - 2 * LEASE  # a link that nobody uses
            case _:
                pass

    def epoch(self) -> int:
        return max((fact["epoch"] for fact in self.journal if fact["fact"] == "epoch"), default=0)

    def told(self, node: int) -> bool:
        number, agent = self.places[node]
        return self.machines[number].keeper._page.read().epoch == self.epoch() and bool(agent + 1)

    def check_epochs(self) -> None:
        """Nobody has heard a number that is not on disk."""
        known = self.epoch()
        for machine in self.machines:
            if machine.keeper._page.read().epoch > known:
                raise Broken("an agent knows an epoch that is not in the journal")


def _nothing(timeout: float) -> Event:
    raise steward_module.queue.Empty


def _due(steward: SimSteward) -> bool:
    waited = list[float]()

    def get(timeout: float) -> Event:
        waited.append(timeout)
        return Event("grace")

    since, steward._events = steward._since, SimpleNamespace(get=get)
    steward._next()
    steward._since, steward._events = since, SimpleNamespace(get=_nothing)
    return waited[0] <= 0


def simulate(seeds: Sequence[int]) -> dict[int, str]:
    """What is wrong, by seed."""
    found: dict[int, str] = {}
    worlds: list[World] = []
    folders = tempfile.TemporaryDirectory(prefix="skyward-simulated-")
    clock = SimpleNamespace(monotonic=lambda: worlds[-1].now if worlds else 1000.0, sleep=lambda seconds: None)
    with folders as top, pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper_module, "time", clock)
        for module, name in ((keeper_module, "_say"), (steward_module, "say")):
            patch.setattr(module, name, lambda message: None)
        patch.setattr(steward_module, "_lives", lambda pid: pid in worlds[-1].pids)
        for seed in seeds:
            world = World(seed, os.path.join(top, str(seed)))
            worlds.append(world)
            try:
                world.run()
            except Broken as exc:
                found[seed] = str(exc)
            worlds.clear()
    return found
