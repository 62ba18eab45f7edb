"""What every layer below a pool knows about it: options, listeners, whether the user is in a hurry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from threading import Event
from time import time

from skyward import events
from skyward.api.budget import LAST_MACHINE, spent_at
from skyward.api.image import Image
from skyward.api.plugin import Cluster, Plugin
from skyward.api.provider import Machine, Provider
from skyward.api.secret import hide
from skyward.api.shell import Access
from skyward.api.spec import Spec, Worker

__all__ = ["PoolContext"]


@dataclass(frozen=True)
class PoolContext:
    name: str
    provider: Provider
    spec: Spec
    nodes: int
    image: Image
    plugins: tuple[Plugin, ...]
    worker: Worker
    provision_timeout: float
    replace: bool | None
    grace: float
    max_result: int
    stall_timeout: float | None
    emit: Callable[[events.Event], None]
    listening: Callable[[], object]
    """Whether anybody listens to calls; an `events.KeepEnd` if only their ends are needed."""
    hurried: Callable[[], bool]
    handing: Event | None = None
    """For a detached run: set when its steward has the machines."""
    budget: float | None = None
    prices: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]], compare=False)
    """Dollars per hour, each with its start in seconds since 1970: monotonic clocks stop during sleep."""

    @property
    def access(self) -> Access:
        return self.provider.access

    @property
    def local(self) -> bool:
        return self.access.local

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.name, self.nodes, self.worker, self.spec)

    @property
    def min_nodes(self) -> int:
        return self.spec.min_nodes or self.nodes

    @property
    def forms_groups(self) -> bool:
        several = self.nodes > 1 or self.spec.processes != 1
        return several and any(plugin.around_app for plugin in self.plugins)

    @property
    def handed_over(self) -> bool:
        return self.handing is not None and self.handing.is_set()

    @property
    def ends_at(self) -> float:
        return inf if self.budget is None else spent_at(self.budget, self.prices)

    @property
    def takes_more(self) -> bool:
        return self.ends_at - time() > LAST_MACHINE

    def tell_cost(self, hourly: float, since: float | None = None) -> None:
        if hourly:
            self.prices.append((since or time(), hourly))
            self.emit(events.PoolCost(self.name, hourly, self.budget))

    def tell_placed(self, node: int, machine: Machine | None, directory: str, env: Mapping[str, str]) -> None:
        """`machine` is None for this computer. Emits nothing secret."""
        name = "this computer" if machine is None else str(machine.ssh or machine.joined or machine.id)
        ssh = asdict(machine.ssh) if machine is not None and machine.ssh is not None else {}
        command = "" if machine is None else machine.shell_command
        where = name, directory, env.get("VIRTUAL_ENV", "")
        pod = asdict(machine.pod) if machine is not None and machine.pod is not None else {}
        self.emit(events.NodePlaced(self.name, node, *where, ssh, command, machine is None, pod))

    def report(self, text: str, node: int | None = None) -> None:
        self.emit(events.NodePhase(self.name, node, hide(text)))

    def warn(self, text: str) -> None:
        self.emit(events.Notice(self.name, hide(text), "warning"))
