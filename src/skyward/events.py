"""What happens in a pool, as frozen records for listeners."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from skyward.api.stacks import Stacks

__all__ = [
    "BroadcastStalled",
    "CallEnded",
    "CallStarted",
    "Event",
    "GpuSample",
    "GroupProgress",
    "Log",
    "NodeDown",
    "NodeLeaving",
    "NodePhase",
    "NodePlaced",
    "NodeSample",
    "NodeUp",
    "Notice",
    "Output",
    "PoolClosed",
    "PoolClosing",
    "PoolCost",
    "PoolOpened",
    "PoolOpening",
    "Progress",
    "QueueLength",
    "Warned",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in the pool named `pool`."""

    pool: str
    time: float = field(default_factory=time.time, kw_only=True)


@dataclass(frozen=True, slots=True)
class PoolOpening(Event):
    """The pool gets its machines and sets them up."""

    nodes: int
    provider: str
    processes_per_node: int | str = 1


@dataclass(frozen=True, slots=True)
class NodePhase(Event):
    """A node began a setup step; `node` is None for steps of all."""

    node: int | None
    phase: str


@dataclass(frozen=True, slots=True)
class NodePlaced(Event):
    """A node is started on a machine; for `sky ssh`. It holds no secret."""

    node: int
    machine: str
    directory: str
    """Where bodies start there."""
    environment: str = ""
    """The directory of their environment; empty for this program's own."""
    ssh: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The fields of `api.shell.SshTarget`, where ssh is the way."""
    shell_command: str = ""
    """What gives a shell where ssh is not the way."""
    local: bool = False
    pod: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The fields of `api.shell.PodTarget`, where it is a pod reached by `kubectl exec`."""


@dataclass(frozen=True, slots=True)
class PoolOpened(Event):
    """Every node is ready for calls."""

    nodes: int
    slots: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PoolCost(Event):
    """What the machines cost from now on; not sent for free ones."""

    hourly: float
    """Dollars per hour for all, with disks and public addresses; infinite if a price is unknown."""
    budget: float | None = None
    """Dollars that they may cost in all."""


@dataclass(frozen=True, slots=True)
class QueueLength(Event):
    """How many calls wait for a free slot; at most about once per second."""

    calls: int


@dataclass(frozen=True, slots=True)
class CallStarted(Event):
    """A body began on a node, in the process that is `rank`."""

    call: str
    name: str
    node: int
    attempt: int
    rank: int | None = None
    arguments: str = ""
    """What it was called with, shortened."""
    group: str = ""
    """The same for all ranks of a broadcast."""
    waited: float = 0.0
    """Seconds in the queue."""


@dataclass(frozen=True, slots=True)
class CallEnded(Event):
    """A body ended; `outcome` says how. `rank` is None if it never began.

    `pool.map` sends several items as one call. It ends with "error" if one of them has failed.
    """

    call: str
    name: str
    node: int
    outcome: Literal["ok", "error", "crashed", "timeout", "cancelled", "lost"]
    seconds: float
    rank: int | None = None
    error: str = ""
    """Type and message, then the traceback if there is one."""
    attempt: int = 0
    arguments: str = ""
    """What it was called with, shortened."""
    items: int = 1
    """Items of `pool.map`; 1 for other calls."""
    failed_items: int = 0
    """How many of them failed, if `return_exceptions` lets the others continue."""
    group: str = ""
    """The same for all ranks of a broadcast."""
    waited: float = 0.0
    """Seconds in the queue."""

    @property
    def done(self) -> int:
        """Calls that it counts as having ended well: every item is one."""
        return self.items - self.failed_items if self.failed_items or self.outcome == "ok" else 0

    @property
    def failed(self) -> int:
        """Calls that it counts as failed."""
        return self.failed_items or int(self.outcome not in ("ok", "cancelled"))


EndOfCall = tuple[str, str, int, str, float, int | None, str, int, str, int, int, str, float]
"""The fields of a `CallEnded` without its pool: the event is made only for those who read it."""
KeepEnd = Callable[[EndOfCall], None]


@dataclass(frozen=True, slots=True)
class Output(Event):
    """One line of a node's process (`rank`), without its line end. `call` is None where it is unknown (C code beside
    threads). `progress` marks a line that a carriage return will overwrite; its last state is an ordinary line.
    """

    node: int
    stream: Literal["stdout", "stderr"]
    text: str
    call: str | None = None
    progress: bool = False
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Log(Event):
    """A record that a body logged, where this program has handlers."""

    node: int
    logger: str
    level: int
    created: float
    text: str
    path: str
    line: int
    function: str
    call: str | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Warned(Event):
    """A warning of a body (`warnings.warn`) that this program's filters let through."""

    node: int
    kinds: tuple[str, ...]
    """Its category and base classes, as `module:name`."""
    text: str
    path: str
    line: int
    source: str
    """Its line of code, if known."""
    call: str | None = None
    rank: int | None = None

    @property
    def category(self) -> str:
        """Such as `UserWarning`."""
        return self.kinds[0].rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class Progress(Event):
    """A body reported progress, with `sky.progress`."""

    node: int
    step: float
    total: float | None
    metrics: Mapping[str, float]
    call: str | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class GroupProgress(Event):
    """Progress of a group of calls (`sky.gather`, `pool.map`, joblib), a few times per second, and at its end."""

    group: int
    name: str
    done: int
    """How many have ended well."""
    total: int | None
    """How many there are; None while unknown."""
    seconds: float
    """Since it began."""
    failed: int = 0
    over: bool = False
    """Whether this is the last: what is neither done nor failed was stopped."""

    @property
    def rate(self) -> float:
        """How many end per second, well or not."""
        return (self.done + self.failed) / self.seconds if self.seconds else 0.0

    @property
    def left(self) -> float | None:
        """Seconds for the rest at this rate; None while unknown."""
        if self.over:
            return 0.0
        ended = self.done + self.failed
        return max(0, self.total - ended) * self.seconds / ended if self.total is not None and ended else None


@dataclass(frozen=True, slots=True)
class GpuSample:
    """How busy a GPU is, other programs included; None where its driver does not say (as of a MIG slice)."""

    index: int
    """As `nvidia-smi` counts on its machine."""
    name: str
    utilization: float | None = None
    """Per cent of the time in which the GPU had something to do."""
    memory_used: int | None = None
    """In bytes, as `memory_total`."""
    memory_total: int | None = None
    temperature: float | None = None
    """In degrees Celsius."""
    power: float | None = None
    """In watts."""


@dataclass(frozen=True, slots=True)
class NodeSample(Event):
    """How busy a node's own processes are, about once per second: CPU in per cent of one core, memory in bytes. `gpus`
    is empty until they have answered.
    """

    node: int
    cpu: float
    memory: int
    running: int
    gpus: tuple[GpuSample, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeDown(Event):
    """A node, or its agent, is gone."""

    node: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeLeaving(Event):
    """A node's machine will be taken away in so many seconds; it gets no new calls."""

    node: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NodeUp(Event):
    """A node that was down takes calls again."""

    node: int


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """A sentence that the user should see."""

    text: str
    level: Literal["info", "warning"] = "info"


@dataclass(frozen=True, slots=True)
class BroadcastStalled(Event):
    """Some ranks of a broadcast, or of one node's call in a group, wait for others. Sent once."""

    name: str
    waiting: tuple[int, ...]
    """The ranks that have not returned."""
    text: str
    """Which ranks have returned, where the others are, and the likely cause."""
    stacks: Stacks


@dataclass(frozen=True, slots=True)
class PoolClosing(Event):
    """The pool takes no more calls and gives its machines back."""


@dataclass(frozen=True, slots=True)
class PoolClosed(Event):
    """Nothing of the pool is left."""

    seconds: float
    calls: int
    """How many ended, in any way; every item of `pool.map` is one."""
    failed: int = 0
    stopped: int = 0
    """How many neither returned nor failed: cancelled, or ended with the block or the pool."""
