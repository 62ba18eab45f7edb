"""What every layer below a pool knows about it: its options, who hears of events, whether the user is in a hurry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from time import time

from skyward import events
from skyward.api.image import Image
from skyward.api.plugin import Cluster, Plugin
from skyward.api.provider import Machine, Provider
from skyward.api.secret import hide
from skyward.api.shell import Access
from skyward.api.spec import Spec, Worker

__all__ = ["PoolContext"]


@dataclass(frozen=True)
class PoolContext:
    """Made by the pool and handed down to whatever opens, uses and closes machines."""

    name: str
    provider: Provider
    spec: Spec
    nodes: int
    image: Image
    """The image as the plugins have changed it."""
    plugins: tuple[Plugin, ...]
    worker: Worker
    provision_timeout: float
    replace: bool | None
    grace: float
    max_result: int
    stall_timeout: float | None
    emit: Callable[[events.Event], None]
    listening: Callable[[], object]
    """Whether anybody listens to events of calls; an `events.KeepEnd` if it is enough to give it their ends."""
    hurried: Callable[[], bool]
    """Whether the user has pressed Ctrl-C while the pool was closing: then nothing waits any more."""
    prices: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]], compare=False)
    """What machines have cost an hour, each with the time since when, in seconds since 1970: other clocks stand still
    while this computer sleeps, and the machines run."""

    @property
    def access(self) -> Access:
        """How the machines are reached."""
        return self.provider.access

    @property
    def local(self) -> bool:
        """Whether the nodes are processes of this computer."""
        return self.access.local

    @property
    def cluster(self) -> Cluster:
        """What plugins are told about the pool."""
        return Cluster(self.name, self.nodes, self.worker, self.spec)

    @property
    def min_nodes(self) -> int:
        """With how many nodes the pool opens if not all can be had."""
        return self.spec.min_nodes or self.nodes

    @property
    def forms_groups(self) -> bool:
        """Whether plugins connect the runners, if there are several."""
        several = self.nodes > 1 or self.spec.processes != 1
        return several and any(plugin.around_app for plugin in self.plugins)

    def tell_cost(self, hourly: float) -> None:
        """Tells what the pool's machines cost an hour, where they cost anything."""
        if hourly:
            self.prices.append((time(), hourly))
            self.emit(events.PoolCost(self.name, hourly))

    def tell_placed(self, node: int, machine: Machine | None, directory: str, env: Mapping[str, str]) -> None:
        """Tells on which machine a node is, None for this computer, and what a shell there needs; nothing secret."""
        name = "this computer" if machine is None else str(machine.ssh or machine.joined or machine.id)
        ssh = asdict(machine.ssh) if machine is not None and machine.ssh is not None else {}
        command = "" if machine is None else machine.shell_command
        where = name, directory, env.get("VIRTUAL_ENV", "")
        self.emit(events.NodePlaced(self.name, node, *where, ssh, command, machine is None))

    def report(self, text: str, node: int | None = None) -> None:
        """Says what is being done, for all nodes or for one."""
        self.emit(events.NodePhase(self.name, node, hide(text)))

    def warn(self, text: str) -> None:
        """Shows the user a warning."""
        self.emit(events.Notice(self.name, hide(text), "warning"))
