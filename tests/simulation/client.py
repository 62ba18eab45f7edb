"""The client of a simulated pool: the real engine, over connections and threads that the world moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skyward.api.info import InstanceInfo, Peer
from skyward.api.spec import Ranks
from skyward.client.connections import Connections
from skyward.client.engine import Dependencies, Engine
from skyward.client.settings import PoolSettings
from skyward.client.uploads import Uploads
from skyward.node.protocol import ClientToAgent, InputEnd, InputItems
from skyward.transport.frames import FROM_NODE
from skyward.transport.link import Link

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["STALL_TIMEOUT", "make_engine"]


STALL_TIMEOUT = 30.0


def _info(node: int, world: World) -> str:
    return InstanceInfo(
        node=node,
        total_nodes=world.nodes,
        workers_per_node=world.places,
        head_addr="10.0.0.1",
        head_port=1,
        job_id="sim",
        peers=tuple(Peer(n, "10.0.0.1") for n in range(world.nodes)),
    ).to_json()


def make_engine(world: World) -> Engine:
    """An engine whose pool has the world's machines."""

    class SimHub(Connections):
        def __init__(self, nodes: int, reach: Any, revive: Any, session: str, epoch: int) -> None:
            super().__init__(nodes, reach, revive, session, epoch)
            self._selector.close()
            self._wake_read.close()
            self._wake_write.close()
            self._clock = world.clock
            for peer in self.peers:
                peer.link = Link(world.clock, takes=FROM_NODE)

        def wake(self) -> None:
            pass

        def reconnect(self, number: int, pause: float = 0.01) -> None:
            world.reconnecting[number] = world.now + pause

    class SimCargo(Uploads):
        def _upload(self, node: int, name: str) -> None:
            self._post(node, [ClientToAgent.Expect(name)])
            world.uploads.append((node, name))

    class SimFeeder:
        """Sends the items of an iterator argument while there is credit."""

        def __init__(self, call: Any, key: str, source: Any, post: Callable[..., None], _: str | None) -> None:
            self.call, self.key, self.left, self.post = call, key, len(source), post
            self.credit, self.ended, self.closed = 3, False, False
            world.feeders.append(self)
            while world.more.random() < 0.3:
                self.step()  # its thread is faster than the one that made it

        def grant(self, count: int) -> None:
            self.credit += count

        def close(self) -> None:
            self.closed = True

        def step(self) -> bool:
            if self.closed or self.ended or (self.left and not self.credit):
                return False
            if self.left:
                self.left, self.credit = self.left - 1, self.credit - 1
                self.post([InputItems(self.call.id, self.key, [1], [b"x"])])
            else:
                self.ended = True
                self.post([InputEnd(self.call.id, self.key, {}, [b""])])
            return True

    class SimMachines:
        def reach(self, node: int) -> Any: ...

        def revive(self, node: int) -> None: ...

        def refusal(self, node: int, about: Any) -> None: ...

        def inquire(self) -> None: ...

        def address(self, node: int) -> tuple[str, int] | None:
            return None if world.star else ("node", node)

        def ranks(self, greetings: Sequence[Mapping[str, Any]]) -> Ranks:
            return Ranks([world.places if about else 0 for about in greetings])

        def replace(self, node: int) -> bool:
            if world.replaces and node not in world.replacing:
                world.replacing[node] = world.now + world.rng.uniform(0.5, 20)
            return world.replaces

        def replacing(self, node: int) -> bool:
            return node in world.replacing

        def setup(self, node: int, greetings: Any, ports: Any) -> tuple[dict[str, Any], list[Any]]:
            settings = {
                "shared": world.lease == 0,
                "processes": world.processes,
                "threads": world.threads,
                "places": [{} for _ in range(world.places)],
                "grace": 2.0,
                "ready_within": 300.0,
                "env": {},
                "info": _info(node, world) if world.places > 1 else "",
                "cwd": "/",
                "gpus": [],
                "runner": {"node": node, "threads": world.threads, "paths": [], "blobs": "", "max_result": 1e9},
            }
            return settings, [b"hooks"] if world.groups else []

    plan = PoolSettings(
        pool="sim",
        nodes=world.nodes,
        slots=world.processes * world.threads // world.places,
        emit=world.event,
        listening=lambda: True,
        release=world.release,
        gang=world.groups,
        local=not world.lease,
        lease=world.lease,
        directory=world.directory,
        stall_timeout=STALL_TIMEOUT,
        present=world.nodes - len(world.joining),
        replaces=world.replaces,
    )
    around = Dependencies(world.clock, SimHub, SimCargo, SimFeeder, in_thread=lambda act: act())  # type: ignore[arg-type]
    return Engine(plan, SimMachines(), around)
