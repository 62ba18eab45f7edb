"""From machines to an open engine: certificates, keepers, links, and what each node is told of the pool."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from skyward import events
from skyward.accelerators import Accelerator
from skyward.api.image import Image
from skyward.api.info import AcceleratorInfo, InstanceInfo, NetworkInfo, Peer
from skyward.api.plugin import Plugin
from skyward.api.provider import Machine
from skyward.api.shell import Access
from skyward.api.spec import Worker
from skyward.client.engine import Engine
from skyward.client.settings import PoolSettings
from skyward.errors import BootstrapError, NodeLost
from skyward.machines.parallel import each
from skyward.machines.replacement import Substitution
from skyward.machines.supply import Supply
from skyward.setup.dask_cluster import DaskCluster
from skyward.setup.hosts import Host, HostSetup, address_like, arrange
from skyward.setup.network import Address, Layout
from skyward.transport import certificates, local_sockets
from skyward.transport.blobs import SCRATCH
from skyward.transport.payload import Packer

__all__ = ["Bringup", "Cluster"]

_REACH = 10.0
_THREADS = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC"),  # NPROC is what XLA goes by
)


@dataclass(frozen=True)
class Cluster:
    """What runs: the engine, the machines beneath it, and who vouches for whom."""

    engine: Engine
    hosts: dict[int, Host]
    authority: certificates.Authority | None
    dask: DaskCluster

    def after_fork(self) -> None:
        """In a forked child: closes copies of what belongs to the parent."""
        self.engine.after_fork()
        for keeper in {host.keeper for host in self.hosts.values()}:
            keeper.after_fork()


@dataclass(frozen=True)
class Bringup:
    """What is needed to bring the nodes of a pool up."""

    pool: str
    machines: list[Machine]
    image: Image
    commands: Mapping[str, Sequence[str]]
    access: Access
    supply: Supply | None
    """Where more machines come from, if the provider has any."""
    ttl: float
    worker: Worker
    plugins: Sequence[Plugin]
    accelerator: Accelerator | None
    workspace: Callable[[], str]
    """Makes the client's directory for large buffers, as late as may be, and says where; the same one every time."""
    max_result: int
    grace: float
    emit: Callable[[events.Event], None]
    listening: Callable[[], bool]
    release: Callable[[Sequence[str]], None]
    hurried: Callable[[], bool]
    interrupted: Callable[..., None]
    """Told, while things are ended, that the user has no more patience."""

    def open(self, stack: ExitStack, deadline: float) -> Cluster:
        """Starts everything, with its ending on `stack`; returns when every node is ready for calls."""
        endings = stack.enter_context(ExitStack())  # nodes that come back later add to it
        host_setup = HostSetup(
            self.pool,
            self.image,
            self.commands,
            self.access,
            self.ttl,
            self.workspace,
            self.emit,
            self.hurried,
            endings,
            self.supply and self.supply.ended,
        )
        hosts = host_setup.set_up(self.machines, deadline)
        authority = None if self.access.local else certificates.Authority(self.pool)  # while the keepers start
        context = authority and certificates.context(authority.issue("client"), server=False)
        names = [str(machine.ssh or machine.id) for machine in self.machines]
        layout = arrange(hosts, names, self.access.network, deadline)
        blocked = self._why_star(layout, names)

        addresses = list(layout.addresses)  # of machines that others stand in for, theirs

        def start(host: Host) -> None:
            self._start(host, addresses, authority, blocked, deadline)

        each(start, hosts)
        home = {node: host for host in hosts for node in host.nodes}
        dask = DaskCluster(self.pool, home, addresses, blocked)
        hooks = self._hooks(hosts)

        def setup(node: int, abouts: list[dict[str, Any]], ports: list[int]) -> tuple[dict[str, Any], list[Any]]:
            info = self._info(node, addresses, blocked, abouts, ports)
            return self._settings(node, home[node], info, abouts), hooks

        def reach(node: int) -> socket.socket:
            keeper = home[node].keeper
            if context is None:
                return local_sockets.connect(keeper.sockets[node], _REACH)
            return certificates.secure(keeper.shell.reach(*keeper.ports[node]), context, _REACH)

        def revive(node: int) -> None:
            """Sets up a machine again that had lost everything of ours."""
            limit = time.monotonic() + self.access.ssh_timeout
            host_setup.stop(home[node])  # whatever it still runs has been given up, and may run elsewhere by now
            host = host_setup.set_up_one(node, self.machines[node], limit)
            self._start(host, addresses, authority, blocked, limit)
            home[node] = host
            dask.rejoin(node)

        def stand_in(node: int, machine: Machine) -> Callable[[], None]:
            """Sets up a machine that is to take another one's place; what it returns puts it there."""
            limit = time.monotonic() + self.access.ssh_timeout + self.image.bootstrap_timeout
            host = host_setup.set_up_one(node, machine, limit)
            there = [*addresses]
            there[node] = address_like(host, machine.private_ip, addresses[node], limit)
            self._start(host, there, authority, blocked, limit)

            def put() -> None:
                host_setup.leave(home[node])
                addresses[node], home[node] = there[node], host
                dask.rejoin(node)

            return put

        def report(node: int, text: str) -> None:
            self.emit(events.NodePhase(self.pool, node, text))

        engine = Engine(
            PoolSettings(
                pool=self.pool,
                nodes=len(self.machines),
                slots=self.worker.concurrency,
                reach=reach,
                setup=setup,
                emit=self.emit,
                listening=self.listening,
                release=self.release,
                gang=self._groups,
                lease=0.0 if self.access.local else self.access.lease,
                directory=self.workspace(),
                address=lambda node: None if blocked else home[node].keeper.ports.get(node),
                revive=None if self.access.local else revive,
                substitutes=self.supply
                and Substitution(self.supply, self.machines, stand_in, host_setup.abort, report),
            )
        )
        stack.push(self.interrupted)
        stack.callback(self._close, engine)
        try:
            engine.open(deadline)
        except NodeLost as exc:
            said = home[exc.node].keeper.shell.said()
            if "prohibited" in said:
                raise BootstrapError(
                    "connecting",
                    f"{names[exc.node]}: its sshd does not let us reach ports through it. Set AllowTcpForwarding yes "
                    f"(or local) in its sshd_config.\nssh said: {said.strip()}",
                    exc.node,
                ) from exc
            raise
        return Cluster(engine, home, authority, dask)

    @property
    def _groups(self) -> bool:
        return len(self.machines) > 1 and any(p.around_app for p in self.plugins)

    def _close(self, engine: Engine) -> None:
        if self.hurried():
            engine.abandon()
        else:
            engine.close(self.grace)

    def _why_star(self, layout: Layout, names: Sequence[str]) -> str | None:
        """Why nodes cannot form groups, if they cannot; a pool whose plugins need one is refused."""
        if self.access.network == "star" and len(self.machines) > 1 and not self.access.local:
            why = 'the pool was opened with network="star"; leave that out to have it tried'
        elif layout.star:
            why = layout.explain(names)
        else:
            return None
        if self._groups:
            asking = ", ".join(p.name for p in self.plugins if p.around_app)
            raise BootstrapError(
                "network",
                f"the nodes cannot form the group that plugins=[{asking}] needs: {why}. Open the hosts' firewalls to "
                "each other, or leave the plugin out: calls with >> go through this computer and work without.",
            )
        if layout.star:
            text = f"{why}. Calls work all the same, through this computer; groups of nodes (torch, jax) do not."
            self.emit(events.Notice(self.pool, text, "warning"))
        return why

    def _start(
        self,
        host: Host,
        addresses: Sequence[Address],
        authority: certificates.Authority | None,
        blocked: str | None,
        deadline: float,
    ) -> None:
        """Has a keeper start its agents."""
        nodes = [
            {
                "node": node,
                "local": self.access.local,
                "host": "127.0.0.1" if blocked else addresses[node].ip,
                "notices": self.access.notices,
                "identity": vars(authority.issue(f"node-{node}")) if authority else None,
            }
            for node in host.nodes
        ]
        host.keeper.start(nodes, not self.access.local, deadline)

    def _hooks(self, hosts: Sequence[Host]) -> list[Any]:
        wanted = [(p.name, p.around_app, p.decorate) for p in self.plugins if p.around_app or p.decorate]
        if not wanted:
            return []
        head, buffers = Packer([path for s in hosts for path in s.paths]).pack(wanted, "the plugins' hooks")
        return [head, *map(bytes, buffers)]

    def _settings(self, node: int, host: Host, info: InstanceInfo, abouts: list[dict[str, Any]]) -> dict[str, Any]:
        """What an agent is told to make its runners with."""
        slots = self.worker.concurrency
        processes, threads = (slots, 1) if self.worker.process else (1, slots)
        counts = self._thread_counts(host, processes, abouts[node]["cpus"])
        return {
            "shared": self.access.local,
            "info": info.to_json(),
            "env": {**counts, **host.env, SCRATCH: host.keeper.scratch},
            "cwd": host.cwd,
            "grace": self.grace,
            "threads": threads,
            "processes": processes,
            "runner": {
                "node": node,
                "threads": threads,
                "paths": list(host.paths),
                "blobs": host.keeper.scratch,
                "max_result": self.max_result,
            },
        }

    def _info(
        self,
        node: int,
        addresses: Sequence[Address],
        blocked: str | None,
        abouts: list[dict[str, Any]],
        ports: list[int],
    ) -> InstanceInfo:
        wanted = self.accelerator
        counts = [about["accelerators"] for about in abouts]
        return InstanceInfo(
            node=node,
            total_nodes=len(self.machines),
            accelerators=counts[node],
            total_accelerators=sum(counts),
            head_addr=addresses[0].ip,
            head_port=ports[0],
            job_id=self.pool,
            peers=tuple(Peer(i, addresses[i].ip, m.public_ip) for i, m in enumerate(self.machines)),
            accelerator=None
            if wanted is None
            else AcceleratorInfo(
                type=wanted.name,
                count=counts[node],
                memory_gb=wanted.memory_gb or 0.0,
                is_trainium=wanted.name.lower().startswith("trainium"),
            ),
            network=NetworkInfo(interface=addresses[node].interface, blocked=blocked),
            ports={"torch": ports[0], "jax": ports[1], "tensorflow": ports[2]},
        )

    def _thread_counts(self, host: Host, processes: int, cpus: int) -> dict[str, str]:
        """Runners that share a machine's cores must not each start a thread for every one of them."""
        sharing = len(host.nodes) * processes
        known = dict(os.environ) if self.access.local else {}
        if (sharing == 1 and not self.access.local) or any(name in known or name in host.env for name in _THREADS):
            return {}  # nobody to share with, or the user has decided
        return dict.fromkeys(_THREADS, str(max(1, cpus // sharing)))
