"""What a user asks for: machines, and how calls run on them; frozen, and checked when made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, cast, get_args

from skyward.accelerators import Accelerator, Model, resolve
from skyward.api.image import Image, PipIndex, check_number, check_one_of
from skyward.api.usage_errors import FOR_POOLS, corrects
from skyward.errors import InvalidArgument

__all__ = [
    "Allocation",
    "Architecture",
    "Image",
    "PipIndex",
    "Ranks",
    "Spec",
    "Transfer",
    "Worker",
    "check_min_nodes",
    "check_nodes",
    "check_processes",
]


Allocation = Literal["spot", "on-demand", "spot-if-available", "cheapest"]
Architecture = Literal["x86_64", "arm64"]
Executor = Literal["auto", "thread", "process"]


def check_nodes(nodes: object) -> None:
    if not isinstance(nodes, tuple):
        return check_number("nodes", nodes)
    bounds = cast("tuple[object, ...]", nodes)
    if len(bounds) != 2:
        raise InvalidArgument(f"nodes={nodes!r} has {len(bounds)} parts. Give a number, or (min, max).")
    for bound in bounds:
        check_number("nodes", bound)
    low, high = cast("tuple[int, int]", nodes)
    if low > high:
        raise InvalidArgument(
            f"nodes={nodes!r} asks for at least {low} and at most {high}. Write nodes=({high}, {low})."
        )
    return None


def check_min_nodes(min_nodes: object, nodes: int | tuple[int, int]) -> None:
    if min_nodes is None:
        return
    check_number("min_nodes", min_nodes)
    most = nodes if isinstance(nodes, int) else nodes[1]
    if cast(int, min_nodes) > most:
        raise InvalidArgument(
            f"min_nodes={min_nodes} is more than nodes={nodes}. min_nodes is how many nodes the pool opens with if "
            "not all are available: give a number from 1 to that of the nodes."
        )


def check_processes(processes_per_node: object) -> None:
    if processes_per_node != "gpu" and not (type(processes_per_node) is int and processes_per_node > 0):
        raise InvalidArgument(
            f"processes_per_node={processes_per_node!r}: it must be a whole number from 1 up, or 'gpu': one per GPU."
        )


@corrects({"slots": "`concurrency=`", "threads": "`concurrency=`", "processes": '`executor="process"`'})
@dataclass(frozen=True)
class Worker:
    """How a process runs calls. A node has one such process, or as many as `processes_per_node` says.

    Args:
        concurrency: how many calls it runs at a time. Default: 1.
        executor: "thread", or "process": each slot is a process of its own. Default: "auto", which means threads.
    """

    concurrency: int = 1
    executor: Executor = "auto"

    def __post_init__(self) -> None:
        check_number("concurrency", self.concurrency)
        check_one_of("executor", self.executor, get_args(Executor))

    @property
    def process(self) -> bool:
        """Whether every slot has a process of its own."""
        return self.executor == "process"


WEEK = 7 * 24 * 3600.0


@corrects(FOR_POOLS)
@dataclass(frozen=True, init=False)
class Spec:
    """One kind of machines that would do for a pool: which, how many, from whom.

    Args:
        provider: where machines come from, such as `sky.AWS()`. Default: this computer.
        accelerator: what each machine has, such as "A100", "A100-80GB" or "H100:8" (eight). Default: none.
        nodes: how many machines. Default: 1.
        vcpus: least virtual CPUs of each machine. Default: 2, with an accelerator any number.
        memory_gb: least memory of each machine, in GB. Default: 4, with an accelerator any.
        architecture: "x86_64" or "arm64". Default: "x86_64", with an accelerator either.
        allocation: "spot", "on-demand", "spot-if-available" or "cheapest", as in `sky.ComputePool`. Default:
            "spot-if-available".
        region: where, if not where the provider says. Default: the provider's.
        max_hourly_cost: dollars per hour for all nodes together; what costs more is not taken. Default: no limit.
        ttl: seconds after which machines end themselves, in use or not. Default: 604800, a week.
        processes_per_node: how many processes each machine runs, each of them one rank; "gpu": one per GPU. Default: 1.
            If it is given, `sky.plugins.torch()` forms a group for a single rank too, as torchrun does.
        min_nodes: with how many nodes the pool opens if not all are available; the others join when they come. Default:
            all of them.
    """

    provider: object
    accelerator: Accelerator | None
    nodes: int | tuple[int, int]
    vcpus: float | None
    memory_gb: float | None
    architecture: Architecture | None
    allocation: Allocation
    region: str | None
    max_hourly_cost: float | None
    ttl: float
    processes_per_node: int | Literal["gpu"] | None
    min_nodes: int | None

    # Written out because `accelerator` is given as a string and read as an Accelerator.
    def __init__(
        self,
        provider: object = None,
        accelerator: str | Accelerator | Model | None = None,
        nodes: int = 1,
        vcpus: float | None = None,
        memory_gb: float | None = None,
        architecture: Architecture | None = None,
        allocation: Allocation = "spot-if-available",
        region: str | None = None,
        max_hourly_cost: float | None = None,
        ttl: float = WEEK,
        processes_per_node: int | Literal["gpu"] | None = None,
        min_nodes: int | None = None,
    ) -> None:
        check_nodes(nodes)
        check_min_nodes(min_nodes, nodes)
        if processes_per_node is not None:
            check_processes(processes_per_node)
        for name, value in (("vcpus", vcpus), ("memory_gb", memory_gb), ("max_hourly_cost", max_hourly_cost)):
            if value is not None:
                check_number(name, value, whole=False)
        check_number("ttl", ttl, whole=False)
        check_one_of("allocation", allocation, get_args(Allocation))
        if architecture is not None:
            check_one_of("architecture", architecture, get_args(Architecture))
        if region is not None and (not isinstance(region, str) or not re.fullmatch(r"[\w.-]+", region)):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise InvalidArgument(f'region={region!r} is not the name of a region. Write it like "us-east-1".')
        values = {
            "provider": provider,
            "accelerator": resolve(accelerator),
            "nodes": nodes,
            "vcpus": vcpus,
            "memory_gb": memory_gb,
            "architecture": architecture,
            "allocation": allocation,
            "region": region,
            "max_hourly_cost": max_hourly_cost,
            "ttl": ttl,
            "processes_per_node": processes_per_node,
            "min_nodes": min_nodes,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def processes(self) -> int | Literal["gpu"]:
        """How many processes each machine runs, given or not."""
        return self.processes_per_node or 1


@dataclass(frozen=True)
class Transfer:
    """How many files were copied, and how many were there already."""

    files: int
    """Files that were copied; `pull` counts those of all nodes, `push` each file once."""
    bytes: int
    """Bytes copied now; what an earlier attempt copied does not count."""
    unchanged: int
    """Files that were there already, with the same size and time of last change."""
    left_out: tuple[str, ...] = ()
    """What was not copied, and why: links that lead out of the folder, sockets, pipes, devices, nodes without it."""


class Ranks:
    """The ranks of a pool whose nodes have `counts` processes each; a missing node has none."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self._firsts = tuple(accumulate(self.counts, initial=0))
        self.many = any(count > 1 for count in self.counts)

    def __len__(self) -> int:
        return self._firsts[-1]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        return tuple((node, local) for node, count in enumerate(self.counts) for local in range(count))

    def rank(self, node: int, local_rank: int) -> int:
        return self._firsts[node] + local_rank

    def on(self, node: int) -> range:
        return range(self._firsts[node], self._firsts[node + 1])
