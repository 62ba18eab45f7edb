"""A machine of the pool: the real agent over simulated runners, large buffers and connections."""

from __future__ import annotations

import errno
import queue
import selectors
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from skyward.node.agent import Agent, Dependencies
from skyward.node.blob_cache import BlobCache
from skyward.node.protocol import AgentToClient, Blobs, Files
from skyward.node.terms import TermsSlot
from skyward.transport.blobs import key_of
from tests.simulation.network import Connection, Selector
from tests.simulation.runner import SimRunners

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["Machine"]


class _SharedFiles(BlobCache):
    """The real one, over the directory that all nodes of this computer share."""

    def __init__(self, world: World) -> None:
        super().__init__(world.directory, None)
        self.present: dict[str, int] = {}
        self.uses: dict[str, int] = {}
        self.loads: tuple[Any, ...] = ()

    def step(self) -> bool:
        return False


class _Freight:
    """The large buffers of a node on another machine: present, on their way, evicted, refused by a full disk."""

    def __init__(self, world: World, node: int) -> None:
        self.world, self.node = world, node
        self.shared = True
        self.arrivals: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        self.present: dict[str, int] = {}
        self.uses: dict[str, int] = {}
        self.on_the_way: dict[str, int] = {}
        self.fetches: deque[tuple[str, list[int]]] = deque()
        self.loads: deque[tuple[str, Callable[[], None]]] = deque()
        self.unwanted: set[str] = set()  # what is on its way, though its result is needed no more

    def serve(self, *_: Any) -> None:
        pass

    def take(self, wanted: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
        names = {name for name, _ in wanted.values()}
        for name, _ in wanted.values():
            self.uses[name] = self.uses.get(name, 0) + 1
        return dict(wanted), {name for name in names if name not in self.present}

    def locate(self, taken: dict[str, Any]) -> None:
        pass

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self.world.check(self.uses.get(name, 0) > 0, f"node {self.node} drops {name} once too often")
            self.uses[name] = self.uses.get(name, 0) - 1
            if not self.uses[name]:
                del self.uses[name]

    def coming(self, name: str) -> bool:
        return name in self.on_the_way

    def expect(self, name: str) -> None:
        if name not in self.present:
            self.on_the_way.setdefault(name, 0)

    def accept(self, name: str, offset: int, total: int, data: Any) -> bool:
        if name in self.present:
            return True
        if offset and self.on_the_way.get(name) != offset:
            return False
        if self.world.faults and self.world.rng.random() < 0.03:
            self.on_the_way.pop(name, None)
            raise OSError(errno.ENOSPC, "No space left on device")
        self.on_the_way[name] = offset + len(data)
        if offset + len(data) < total:
            return False
        self.on_the_way.pop(name)
        self._add(name, total)
        return True

    def _add(self, name: str, size: int) -> None:
        if name in self.unwanted:
            self.unwanted.discard(name)
        else:
            self.present[name] = size

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            for name in [name for name in self.present if key_of(name) == key]:
                del self.present[name]
            self.unwanted.update(name for name in self.on_the_way if key_of(name) == key)

    def bring(self, request: int, key: str, tell: Callable[[Any], None]) -> None:
        names = [name for name in self.present if key_of(name) == key]
        here = bool(names) and not (self.world.faults and self.world.extra.random() < 0.05)
        files: Files = {"blobs": {"0": (self.world.token() + "0" * 8, 1)}} if here else {}
        self.loads.append((f"bring {request}", lambda: tell(AgentToClient.Brought(request, files))))

    def fetch(self, name: str, size: int, sources: Sequence[Any]) -> None:
        if name not in self.on_the_way and name not in self.present:
            self.on_the_way[name] = 0
            self.fetches.append((name, [node for node, _, _ in sources]))

    def step(self) -> bool:
        """A fetch ends, or a buffer that nobody uses is evicted."""
        unused = [name for name in self.present if name not in self.uses and key_of(name) is None]
        if unused and self.world.faults and self.world.rng.random() < 0.02:
            del self.present[self.world.rng.choice(unused)]
            return True
        if not self.fetches:
            return False
        name, sources = self.fetches.popleft()
        there = [self.world.machines[n] for n in sources]
        good = any(m.alive and name in m.blob_cache.present for m in there) and self.world.rng.random() < 0.8
        self.on_the_way.pop(name, None)
        if good:
            self._add(name, 1)
        self.unwanted.discard(name)
        self.arrivals.put((name, good))
        return True

    def keep(self, made: Blobs) -> None:
        if not self.shared:
            self.present |= dict(made.values())

    def ship(self, call: str, values: Sequence[Files], tell: Callable[[], None]) -> None:
        if self.loads or (not self.shared and self.world.rng.random() < 0.2):
            self.loads.append((call, tell))
        else:
            tell()

    def remove(self, paths: list[str]) -> None:
        pass  # of a result that nobody gets: in the simulation it was not written yet

    def shipping(self, call: str) -> bool:
        return any(load[0] == call for load in self.loads)

    def abandon(self) -> None:
        self.loads.clear()
        self.forget({key for name in self.present if (key := key_of(name)) is not None})
        fetched = {name for name, _ in self.fetches}
        self.on_the_way = {name: at for name, at in self.on_the_way.items() if name in fetched}

    def unexpect(self, name: str) -> None:
        self.on_the_way.pop(name, None)
        self.unwanted.discard(name)

    def send(self, room: Any, tell: Any) -> bool:
        while self.loads and self.world.rng.random() < 0.7:
            self.loads.popleft()[1]()
        return bool(self.loads)


class _Door:
    def __init__(self, *_: Any) -> None:
        pass

    def next(self) -> None:
        return None

    def free_ports(self, count: int) -> list[int]:
        return list(range(1, count + 1))


class _Vitals:
    def refresh(self) -> None:
        pass

    def out_of_memory(self) -> bool:
        return False

    def sample(self, pids: Any) -> tuple[float, int]:
        return 0.0, 0

    def cpu_seconds(self, pid: int) -> float:
        return 0.0


class Machine:
    """A node's machine: its agent may die and be started again, its connection come and go."""

    def __init__(self, world: World, node: int) -> None:
        self.world, self.node = world, node
        self.alive = True
        self.left = False  # whether its agent has left the pool, after the client's bye
        self.connection: Connection | None = None
        self.frozen_until = 0.0
        self.start_agent()

    def start_agent(self) -> None:
        """Starts the agent (again): it knows nothing of what was before, and its runners are gone with the old one."""
        world = self.world
        self.blob_cache: Any = _Freight(world, self.node) if world.lease else _SharedFiles(world)
        around = Dependencies(
            clock=world.clock,
            token=world.token,
            selector=Selector,  # type: ignore[arg-type]
            runners=SimRunners,  # type: ignore[arg-type]
            usage=_Vitals,  # type: ignore[arg-type]
        )
        slot = TermsSlot(bytearray(64), 0)
        fork_server: Any = (world, self.node)
        self.agent = Agent(_Door, fork_server, slot, self.blob_cache, {}, around)  # type: ignore[arg-type]
        for sock in (self.agent._wake_read, self.agent._wake_write):
            sock.close()
        self.runners: Any = self.agent._runners
        self._note_cancels()
        self.sampled = world.now

    def _note_cancels(self) -> None:
        calls: Any = self.agent._calls
        real = calls.cancel

        def cancel(call_id: str, *rest: Any) -> Any:
            call = calls.calls.get(call_id)
            actions = real(call_id, *rest)
            if call is not None:
                self.world.cancels[call_id] = self.world.now
                ending = call.state in ("withdrawn", "stopping", "doomed", "gone")
                self.world.check(ending, f"{call_id} is {call.state} after its cancel")
            return actions

        calls.cancel = cancel

    def kill_agent(self) -> None:
        """The agent dies: its connection ends, the fork server kills its runners, the keeper starts another."""
        for process in list(self.runners.processes.values()):
            process.die(-9)
        self.world.orphans.update(self.world.untold())
        if self.connection is not None:
            self.connection.cut()
            self.connection = None
        self.start_agent()
        self.world.changed_actors()

    def vanish(self) -> None:
        """The machine is gone, and nobody says so."""
        self.alive = False
        for process in list(self.runners.processes.values()):
            process.die(-9)
        if self.connection is not None:
            self.connection.mute = True
        self.world.changed_actors()

    def step(self) -> bool:
        """One turn of the agent's loop: some of what is there to be heard, then what is due."""
        world, home, rng = self.world, self.agent._home, self.world.rng
        if not self.alive or self.left or world.now < self.frozen_until:
            return False
        inputs: list[Any] = list(self.runners.pending())
        end = self.connection.agent if self.connection is not None else None
        linked = end is not None and home._link.sock is end
        if linked and (end.arrived or end.eof or home._link.writing):
            inputs.append("client")
        if not self.blob_cache.arrivals.empty():
            inputs.append("arrivals")
        due = min(self.agent._calls.due(), self.agent._timers.due()) <= world.now or self.blob_cache.loads
        if world.now - self.sampled >= 3.0:
            self.sampled, due = world.now, True
            self.agent._sample()
            acts = self.agent._timers._acts
            for number in [number for number, act in acts.items() if act == self.agent._sample]:
                self.agent._timers.cancel(number)  # samples come from here
        if not inputs and not due:
            return False
        rng.shuffle(inputs)
        for what in inputs[: rng.randint(1, len(inputs))] if inputs else ():
            if what == "client":
                home.read(selectors.EVENT_READ | selectors.EVENT_WRITE)
            elif what == "arrivals":
                self.agent.poll()
            elif what.name in self.runners.processes:
                self.agent.handle(self.runners.read(what))
        self.agent.turn()
        self.world.check(self.agent._calls.next_pair() is None, f"node {self.node}: a call waits beside a free slot")
        if self.agent._done:
            self._leave()
        return True

    def _leave(self) -> None:
        """The agent ends: what it has said is sent, and the fork server kills what it has left."""
        self.left = True
        for process in self.runners.processes.values():
            process.die(-9)
        if self.connection is not None:
            self.connection.agent.close()
        self.world.changed_actors()
