"""The machines of an open pool: set up, reached, replaced, released; and the engine that uses them.

machines --HostSetup--> hosts --find_layout--> addresses --keepers start agents--> Engine --setup--> nodes
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skyward import events
from skyward.api.context import PoolContext
from skyward.api.image import Image
from skyward.api.info import InstanceInfo
from skyward.api.provider import Lease, Machine
from skyward.api.spec import Ranks
from skyward.client.connections import NodeEnded
from skyward.client.engine import Engine
from skyward.client.settings import PoolSettings
from skyward.errors import BootstrapError, MissingPackage, SkywardError
from skyward.machines.parallel import each
from skyward.machines.replacement import Joining, Missing, Replacements, Supply
from skyward.machines.watchdog import Watchdog
from skyward.node.orders import ClientToKeeper, SchedulerOrder, WorkerOrder
from skyward.node.settings import AgentOrder, Greeting, NodeSettings
from skyward.setup.adoption import AdoptedLease, Adoption, described
from skyward.setup.env.local import prepare
from skyward.setup.hosts import Host, HostSetup
from skyward.setup.network import Address, Layout, find_layout, newcomer_blocked, replacement_address
from skyward.setup.node_settings import (
    agent_settings,
    counted_ranks,
    doubts,
    instance_info,
    packed_hooks,
    pool_gpus,
    refusal,
    shared_gpus,
)
from skyward.transport import local_sockets
from skyward.transport.blobs import Store
from skyward.transport.roles import CLIENT, node_role

if TYPE_CHECKING:
    from skyward.setup.env.remote import Packages
    from skyward.transport.certificates import Authority, PoolCertificates

__all__ = ["AddedPackages", "DaskCluster", "Fleet"]


_REACH_TIMEOUT = 10.0
_LOGIN = 15.0
_SUPPLY_CLOSING = 120.0
_REPLACING_CLOSING = 30.0


class Fleet:
    """Its engine sees it as `client/settings.py: Machines`."""

    engine: Engine
    dask: DaskCluster
    certificates: PoolCertificates | None = None

    def __init__(
        self,
        context: PoolContext,
        lease: Lease,
        commands: Mapping[str, Sequence[str]],
        watchdog: Watchdog,
        steps: ExitStack,
    ) -> None:
        self._context, self._steps = context, steps
        self._adoption = lease.adoption if isinstance(lease, AdoptedLease) else None
        self._supply = Supply(context, lease) if context.provider.elastic and self._adoption is None else None
        self._setup = HostSetup(context, commands, watchdog, self._supply, steps)
        self._machines = list(lease.machines)
        self._names = [_name(machine) for machine in lease.machines]
        self._blocked: str | None = None
        self._addresses: list[Address] = []
        self._hooks: list[Any] = []
        self._session = os.urandom(8).hex()
        self.infos: dict[int, InstanceInfo] = {}
        """`sky.instance_info()` in the first process of each node."""
        self.by_node: dict[int, Host] = {}
        self._ranks = Ranks([])
        self._replacements = None if self._supply is None else Replacements(self)
        self._joining: Joining | None = None
        self._added = AddedPackages(context)

    @property
    def store(self) -> Store:
        return self._setup.store()

    def open(self, patience: float) -> None:
        """Returns when every node is ready.

        Setup may take `patience` seconds after login, and so may starting nodes.
        """
        machines = list(self._machines)
        try:
            self._open(patience)
        except SkywardError as exc:
            self._note_lost(exc, machines)
            raise

    def _open(self, patience: float) -> None:
        context, steps = self._context, self._steps
        missing = self.set_up(patience) if self._adoption is None else self._take_over(self._adoption)
        deadline = time.monotonic() + patience
        hosts = list({id(host): host for host in self.by_node.values()}.values())
        self._hooks = packed_hooks(context.plugins, hosts)
        self.engine = Engine(self._engine_settings(missing), self)
        if self._replacements is not None:
            self._replacements.start(self.engine)
        steps.callback(self._close_engine)
        steps.callback(self._close_supply)
        try:
            self.engine.open(deadline)
        except BootstrapError as exc:
            self._explain(exc)
            raise
        greetings = self.engine.greetings()
        by_name = {"this computer": greetings[0]} if context.local else dict(zip(self._names, greetings, strict=False))
        for text in doubts(context.spec.accelerator, by_name):
            context.warn(text)
        if text := shared_gpus(context, pool_gpus(context, self.by_node, greetings, self._ranks)):
            context.emit(events.Notice(context.name, text))
        if missing:
            self._tell_missing(missing)
            self._joining = Joining(self, self.engine, missing)

    def set_up(self, patience: float) -> list[Missing]:
        """Starts the agents too; returns what is missing."""
        context = self._context
        hosts, missing = self._sorted(self._setup.set_up(self._machines, patience))
        deadline = time.monotonic() + patience
        if not context.local:
            from skyward.transport.certificates import PoolCertificates  # with ssl, which no local pool needs

            self.certificates = PoolCertificates(context.name, context.spec.ttl)  # while the keepers start
        layout = find_layout(hosts, self._names, context.access.network, deadline, alone=not missing)
        self._blocked = self._check_layout(layout)
        self._addresses = list(layout.addresses)
        each(lambda host: self._start(host, self._addresses, deadline), hosts)
        self.by_node.update((node, host) for host in hosts for node in host.nodes)
        self.dask = DaskCluster(context.name, context.spec.ttl, self.by_node, self._addresses, self._blocked)
        return missing

    def _take_over(self, adoption: Adoption) -> list[Missing]:
        self._steps.callback(adoption.release)
        self._session, self._blocked, self._addresses = adoption.session, adoption.blocked, adoption.addresses
        self.by_node.update((node, host) for host in adoption.hosts for node in host.nodes)
        context = self._context
        for node, host in sorted(self.by_node.items()):
            context.tell_placed(node, None if context.local else host.machine, host.cwd, host.env)
        self.dask = DaskCluster(context.name, context.spec.ttl, self.by_node, self._addresses, self._blocked)
        return []

    @property
    def blocked(self) -> str | None:
        return self._blocked

    def let_go(self) -> None:
        self._setup.let_go()

    def described(self) -> dict[str, Any]:
        hosts = list({id(host): host for host in self.by_node.values()}.values())
        machines = dict(enumerate(self._machines))
        return described(hosts, self._addresses, self._blocked, self._session, self._context.prices, machines)

    # for the engine

    def reach(self, node: int) -> socket.socket:
        keeper = self.by_node[node].keeper
        self._check_alive(node)
        if self._adoption is not None:
            return self._adoption.reach(node, self.by_node[node])
        if self.certificates is None:
            return local_sockets.connect(keeper.sockets[node], _REACH_TIMEOUT)
        from skyward.transport.certificates import secure

        tls = self.certificates.client()
        return secure(keeper.shell.reach(*keeper.ports[node]), tls, _REACH_TIMEOUT, node_role(node))

    def _check_alive(self, node: int) -> None:
        if why := self.by_node[node].keeper.ended(self._context.spec.ttl):
            raise NodeEnded(why)

    def address(self, node: int) -> tuple[str, int] | None:
        return None if self._blocked else self.by_node[node].keeper.ports.get(node)

    def setup(self, node: int, greetings: Sequence[Greeting], ports: list[int]) -> tuple[NodeSettings, list[Any]]:
        gpus = pool_gpus(self._context, self.by_node, greetings, self._ranks)
        where = self._machines, self._addresses
        info = instance_info(self._context, node, *where, self._blocked, gpus, ports, self._ranks)
        self.infos[node] = info
        settings = agent_settings(self._context, node, self.by_node[node], info, greetings[node], gpus)
        return {**settings, "head": self.address(0)}, self._hooks

    def ranks(self, greetings: Sequence[Greeting]) -> Ranks:
        self._ranks = counted_ranks(self._context, self.by_node, greetings, self._names)
        return self._ranks

    def refusal(self, node: int, greeting: Greeting) -> SkywardError | None:
        name = "this computer" if self._context.local else self._names[node]
        return refusal(self._context.spec.accelerator, name, node, greeting)

    def replace(self, node: int) -> bool:
        return self._replacements is not None and self._replacements.begin(node)

    def replacing(self, node: int) -> bool:
        return self._replacements is not None and self._replacements.going(node)

    def inquire(self) -> None:
        if self._replacements is not None:
            self._replacements.inquire()

    def revive(self, node: int) -> None:
        self._check_alive(node)
        patience = self._context.image.bootstrap_timeout
        self._setup.stop(self.by_node[node])  # what it still runs was given up, and may run elsewhere by now
        host = self._setup.set_up_one(node, self._machines[node], patience)
        self._added.renew(host)
        self._start(host, self._addresses, time.monotonic() + patience)
        self.by_node[node] = host
        self.dask.rejoin(node)

    # for the replacement of machines

    def wanted(self, node: int) -> bool:
        supply = self._supply
        return supply is not None and self._context.takes_more and supply.replaces(self._machines[node])

    def ended(self, nodes: Sequence[int]) -> dict[int, str]:
        assert self._supply is not None
        reasons = self._supply.unanswered([self._machines[node] for node in nodes])
        return {node: reason for node, reason in zip(nodes, reasons, strict=True) if reason}

    def prepare(self, node: int) -> Callable[[], None]:
        supply = self._supply
        assert supply is not None
        others = sum(machine.hourly_cost for other, machine in enumerate(self._machines) if other != node)
        machine = supply.another(others, lambda text: self._context.report(text, node), lost=True)
        try:
            host, address = self._set_up_replacement(node, machine)
        except BaseException:
            supply.discard(machine)
            raise

        def put_in_place() -> None:
            old, self._machines[node] = self._machines[node], machine
            self._setup.release(self.by_node[node])
            self._addresses[node], self.by_node[node] = address, host
            self.dask.rejoin(node)
            self._context.tell_cost(sum(machine.hourly_cost for machine in self._machines))
            threading.Thread(target=supply.discard, args=(old,), name="skyward-discard", daemon=True).start()

        return put_in_place

    def _set_up_replacement(self, node: int, machine: Machine) -> tuple[Host, Address]:
        context = self._context
        host = self._setup.set_up_one(node, machine, context.image.bootstrap_timeout)
        self._added.renew(host)
        limit = time.monotonic() + context.image.bootstrap_timeout
        address = replacement_address(host, machine.private_ip, self._addresses[node], limit)
        addresses = [*self._addresses]
        addresses[node] = address
        self._start(host, addresses, limit)
        return host, address

    # for nodes that were missing

    def bring(self, missing: Missing) -> tuple[Machine, Host]:
        node, supply, machine = len(self._machines), self._supply, missing.machine
        if machine is None:
            if supply is None:
                raise BootstrapError("joining", f"{self._context.provider.name} has no more machines for an open pool.")
            if not self._context.takes_more:
                raise BootstrapError("joining", "the pool's budget is nearly spent: it takes no more machines.")
            spent = sum(machine.hourly_cost for machine in self._machines)
            machine = supply.another(spent, lambda text: self._context.report(text, node))
        patience = self._context.image.bootstrap_timeout
        try:
            login = min(_LOGIN, self._context.access.ssh_timeout) if missing.machine else None
            host = self._setup.set_up_one(node, machine, patience, login)
            self._added.renew(host)
        except BaseException:
            if supply is not None:
                supply.discard(machine)
            raise
        return machine, host

    def place(self, newcomer: tuple[Machine, Host], node: int) -> None:
        machine, host = newcomer[0], replace(newcomer[1], nodes=(node,))
        limit = time.monotonic() + self._context.image.bootstrap_timeout
        address = replacement_address(host, machine.private_ip, self._addresses[0], limit)
        self._machines.append(machine)
        self._names.append(_name(machine))
        self._addresses.append(address)
        self.by_node[node] = host
        if self._blocked is None:
            there = {other: end for other in range(node) if (end := self.address(other)) is not None}
            layout = newcomer_blocked(host, node, there, self._addresses, limit)
            self._blocked = self._check_layout(layout)
        self._start(host, self._addresses, limit)
        self.dask.rejoin(node)
        self._context.tell_cost(sum(machine.hourly_cost for machine in self._machines))
        self._context.report(f"{_name(machine)} has come", node)

    def turn_back(self, newcomer: tuple[Machine, Host], node: int) -> None:
        machine, host = newcomer
        if self.by_node.pop(node, None) is not None:
            del self._machines[node:], self._names[node:], self._addresses[node:]
        try:
            if not self._context.hurried():
                self._setup.stop(host)
        except (SkywardError, OSError, subprocess.TimeoutExpired):
            pass  # the watchdog and the lease end it
        self._setup.release(host)
        if self._supply is not None:
            self._supply.discard(machine)

    # for the pool

    def package_list(self) -> str:
        return self._setup.package_list(self.by_node[0])

    def add_packages(self, pip: Sequence[str]) -> tuple[str, ...]:
        return self._added.add(pip, list(self.by_node.values()))

    def after_fork(self) -> None:
        self.engine.after_fork()
        for keeper in {host.keeper for host in self.by_node.values()}:
            keeper.after_fork()

    # how

    def _sorted(self, results: Sequence[Host | SkywardError]) -> tuple[list[Host], list[Missing]]:
        if all(isinstance(result, Host) for result in results) and len(self._machines) == self._context.nodes:
            return [result for result in results if isinstance(result, Host)], []
        hosts: list[Host] = []
        machines, names, missing = list[Machine](), list[str](), list[Missing]()
        for machine, name, result in zip(self._machines, self._names, results, strict=True):
            if isinstance(result, Host):
                hosts.append(replace(result, nodes=(len(hosts),)))
                machines.append(machine)
                names.append(name)
            else:
                missing.append(Missing(name, str(result).partition("\n")[0], None if self._supply else machine))
                if self._supply is not None:
                    self._supply.discard(machine)
        for _ in range(self._context.nodes - len(self._machines)):
            missing.append(Missing("another machine", f"{self._context.provider.name} had none", None))
        self._machines, self._names = machines, names
        return hosts, missing

    def _note_lost(self, error: SkywardError, machines: Sequence[Machine]) -> None:
        """Adds which machines are gone: one may have been taken away during setup."""
        try:
            reasons = [] if self._supply is None else self._supply.ended(machines)
        except SkywardError:
            return  # the error stands as it is
        for machine, reason in zip(machines, reasons, strict=False):
            if reason:
                error.add_note(f"{machine.id}: {reason}. Open the pool again for another machine.")

    def _tell_missing(self, missing: Sequence[Missing]) -> None:
        there, total = len(self.by_node), self._context.nodes
        for node, one in enumerate(missing, there):
            self._context.report(f"missing: {one.name}: {one.reason}", node)
        self._context.warn(
            f"the pool opens with {there} of {total} nodes, without {', '.join(one.name for one in missing)}. "
            f"Missing nodes are tried again from time to time, and join when they are available."
        )

    def _engine_settings(self, missing: Sequence[Missing]) -> PoolSettings:
        context = self._context
        return PoolSettings(
            pool=context.name,
            nodes=context.nodes,
            slots=context.worker.concurrency,
            emit=context.emit,
            listening=context.listening,
            release=self.store.release,
            gang=context.forms_groups,
            local=context.local,
            lease=0.0 if context.local else context.access.lease,
            directory=self.store.directory,
            replaces=self._supply is not None,
            reboots=not context.local
            and self._supply is self._adoption is None
            and not any(m.joined for m in self._machines),
            stall_timeout=context.stall_timeout,
            present=context.nodes - len(missing),
            session=self._session,
            epoch=self._adoption.epoch if self._adoption is not None else 0,
        )

    def _start(self, host: Host, addresses: Sequence[Address], deadline: float) -> None:
        wait = self._context.access.notices
        nodes: list[AgentOrder] = [
            {
                "node": node,
                "local": self._context.local,
                "host": "127.0.0.1" if self._blocked else addresses[node].ip,
                "notices": wait and f"{wait.__module__}:{wait.__qualname__}",
                "identity": self.certificates.of_node(node) if self.certificates else None,
                "session": self._session,
            }
            for node in host.nodes
        ]
        for node in host.nodes:
            self._context.tell_placed(node, host.machine, host.cwd, host.env)
        own_scratch = not self._context.local or self._context.handing is not None
        host.keeper.start(nodes, own_scratch, deadline)

    def _check_layout(self, layout: Layout) -> str | None:
        context = self._context
        if context.access.network == "star" and context.nodes > 1 and not context.local:
            why = 'the pool was opened with network="star"; leave that out to have it tried'
        elif layout.star:
            why = layout.explain(self._names)
        else:
            return None
        if context.forms_groups:
            asking = ", ".join(plugin.name for plugin in context.plugins if plugin.around_app)
            raise BootstrapError(
                "network",
                f"the nodes cannot form the group that plugins=[{asking}] needs: {why}. Open the hosts' firewalls to "
                "each other, or leave the plugin out: calls with >> go through this computer and work without.",
            )
        if layout.star:
            context.warn(f"{why}. Calls still work, through this computer; groups of nodes (torch, jax) do not.")
        return why

    def _explain(self, error: BootstrapError) -> None:
        if error.node is None or error.step != "connecting":
            return
        message = self.by_node[error.node].keeper.shell.said()
        if "prohibited" in message:
            raise BootstrapError(
                "connecting",
                f"{self._names[error.node]}: its sshd does not let us reach ports through it. Set AllowTcpForwarding "
                f"yes (or local) in its sshd_config.\nssh said: {message.strip()}",
                error.node,
            ) from error

    def _close_supply(self) -> None:
        """Waits for requests to the provider, and abandons hosts still being set up."""
        if self._supply is not None:
            self._supply.close(0.5 if self._context.hurried() else _SUPPLY_CLOSING)
        if self._supply is not None or self._joining is not None:
            self._setup.abort()

    def _close_engine(self) -> None:
        hurried = self._context.hurried()
        if hurried:
            self.engine.abandon()
        else:
            self.engine.close(self._context.grace)
        for waiting in (self._replacements, self._joining):
            if waiting is not None:
                waiting.close(0.0 if hurried else _REPLACING_CLOSING)


def _name(machine: Machine) -> str:
    return str(machine.ssh or machine.joined or machine.id)


# Packages that plugins of an open pool add beside those of the environment.


class AddedPackages:
    def __init__(self, context: PoolContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._added: dict[str, None] = {}
        self._image: Image | None = None
        self._packages: Packages | None = None
        self._paths: tuple[str, ...] = ()

    def add(self, pip: Sequence[str], hosts: Collection[Host]) -> tuple[str, ...]:
        """One path per node; skips packages that the nodes have."""
        with self._lock:
            if self._context.local:
                return self._add_local(pip)
            from skyward.setup.env.remote import Packages

            installed = Packages(self._context.image).installed()
            new = [entry for entry in pip if _project(entry) not in installed and entry not in self._added]
            if new:
                self._context.report(f"adding {', '.join(new)}")
                self._added.update(dict.fromkeys(new))
                self._image = self._context.image.adding(pip=[*self._added, *filter(None, installed.values())])
                self._packages = Packages(self._image)
                unique = list({id(host.keeper): host for host in hosts}.values())
                self._paths = tuple(dict.fromkeys(each(self._make, unique)))
            return self._paths

    def renew(self, host: Host) -> None:
        with self._lock:
            if self._packages is not None:
                self._paths = tuple(dict.fromkeys([*self._paths, self._make(host)]))

    def _add_local(self, pip: Sequence[str]) -> tuple[str, ...]:
        self._added.update(dict.fromkeys(pip))
        made = prepare(self._context.image.adding(pip=self._added), report=self._context.report)
        home = made.env.get("VIRTUAL_ENV")
        return (_site_packages(home),) if home else ()  # without one it is the interpreter of the client

    def _make(self, host: Host) -> str:
        from skyward.setup.env.remote import prepare_host

        assert self._image is not None
        assert self._packages is not None
        shell = host.keeper.shell
        made = prepare_host(
            shell,
            self._image,
            pool=self._context.name,
            deadline=time.monotonic() + self._image.bootstrap_timeout,
            report=lambda text, _: self._context.report(text, host.nodes[0]),
            packages=self._packages,
        )
        shell.run(["rmdir", made.directory], timeout=20)  # the pool has one already
        return _site_packages(made.env["VIRTUAL_ENV"])


def _site_packages(home: str) -> str:
    return f"{home}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def _project(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else requirement


# The dask cluster of a pool, started on its nodes when it is first asked for.


_STARTING = 60.0


class DaskCluster:
    """A scheduler on node 0 and a worker per node, with their own certificate authority: tasks can read its keys."""

    def __init__(
        self, pool: str, ttl: float, hosts: Mapping[int, Host], addresses: Sequence[Address], blocked: str | None
    ) -> None:
        self._pool, self._ttl, self._hosts, self._addresses, self._blocked = pool, ttl, hosts, addresses, blocked
        self._authority: Authority | None = None
        self._lock = threading.Lock()

    def connect(self) -> Any:
        if self._blocked:
            raise SkywardError(
                f"the nodes of this pool cannot reach each other ({self._blocked}), so they form no dask cluster; "
                "calls with >> and @ work."
            )
        if importlib.util.find_spec("distributed") is None:
            raise MissingPackage(
                "pool.dask() needs the package distributed on this computer. Run: pip install distributed"
            )
        from skyward.node.dask_worker import connect
        from skyward.transport.certificates import Authority

        with self._lock:
            authority = self._authority = self._authority or Authority(f"{self._pool}-dask", self._ttl)
            scheduler = self._scheduler(authority)
            for node in self._hosts:
                self._start_worker(node, scheduler, authority)
        return connect(scheduler, authority.issue(CLIENT), self._hosts[0].keeper.shell.reach)

    def rejoin(self, node: int) -> None:
        scheduler = self._hosts[0].keeper.scheduler
        if self._authority is not None and scheduler is not None:
            self._start_worker(node, scheduler, self._authority)

    def _scheduler(self, authority: Authority) -> str:
        keeper = self._hosts[0].keeper
        if keeper.scheduler is not None:
            return keeper.scheduler
        order: SchedulerOrder = {
            "host": self._addresses[0].ip,
            "directory": keeper.scratch,
            "identity": vars(authority.issue("scheduler")),
        }
        failure = keeper.start_scheduler(order, time.monotonic() + _STARTING)
        if keeper.scheduler is not None:
            return keeper.scheduler
        if "No module named" in failure:
            raise SkywardError(
                f"pool.dask() needs the package distributed on the nodes, too ({failure}). "
                'Give the pool image=sky.Image(pip=["distributed"]): it is installed in the version that you have here.'
            )
        raise BootstrapError("dask", f"the dask scheduler did not start on {keeper.shell.name}: {failure}", 0)

    def _start_worker(self, node: int, scheduler: str, authority: Authority) -> None:
        host = self._hosts[node]
        order: WorkerOrder = {
            "node": node,
            "host": self._addresses[node].ip,
            "scheduler": scheduler,
            "directory": host.keeper.scratch,
            "identity": vars(authority.issue(node_role(node))),
            "env": host.env,
            "cwd": host.cwd,
            "paths": list(host.paths),
        }
        with suppress(BootstrapError):  # a node that is gone; it gets its worker when it is set up again
            host.keeper.tell(ClientToKeeper.DaskWorker(order))
