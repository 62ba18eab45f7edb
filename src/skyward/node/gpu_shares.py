"""Which GPUs belong to which node and process. Pure; the client uses it too.

GPUs are named as in CUDA_VISIBLE_DEVICES: by index, UUID, or UUID of a MIG slice. CUDA shows a process at most one
slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from skyward.api.hardware import Gpu

__all__ = [
    "CUDA",
    "HIP",
    "GpuMachine",
    "PoolGpus",
    "deal",
    "dealt_out",
    "memory_share",
    "names",
    "own_gpus",
    "restricted",
    "variable",
    "variables",
]

CUDA, HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
# By default JAX takes 75 % of a GPU's memory when it starts, and TensorFlow all of it: then a second process gets none.
_MODEST = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
# JAX refuses both names together; older versions know the first one only.
_FRACTION, _NEW_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
_SHARED_MEMORY = 0.9  # of a GPU, for all processes together; each needs some beside, for its context and libraries


@dataclass(frozen=True)
class GpuMachine:
    name: str
    gpus: Sequence[str]
    ranks: Mapping[int, int]


@dataclass(frozen=True)
class PoolGpus:
    by_node: Mapping[int, tuple[str, ...]]
    counts: Mapping[int, int]
    total: int
    conflict: str | None
    """Why NCCL cannot connect the ranks: some share a GPU."""
    sharers: Mapping[int, int]


def names(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[str]:
    if any(gpu.is_slice for gpu in gpus):
        return [gpu.uuid for gpu in gpus]
    value = environ.get(variable(gpus), environ.get(CUDA))
    if value is None:
        return [str(index) for index in range(len(gpus))]
    return [entry.strip() for entry in value.split(",")][: len(gpus)]


def variable(gpus: Sequence[Gpu]) -> str:
    return HIP if gpus and all(gpu.vendor == "amd" for gpu in gpus) else CUDA


def restricted(gpus: Sequence[str], visible: str | None) -> list[str]:
    """The GPUs that this CUDA_VISIBLE_DEVICES shows; CUDA stops at an invalid entry."""
    if visible is None or not gpus:
        return list(gpus)
    chosen: list[str] = []
    for entry in map(str.strip, visible.split(",")):
        if not (entry.startswith(("GPU-", "MIG-")) or (entry.isdecimal() and int(entry) < len(gpus))):
            break
        chosen.append(entry)
    return chosen if len(set(chosen)) == len(chosen) else []  # CUDA shows nothing when one is named twice


def deal(gpus: Sequence[str], takers: int) -> list[tuple[str, ...]]:
    count = len(gpus)
    if count < takers:
        return [(gpus[taker * count // takers],) if count else () for taker in range(takers)]
    ends = [taker * count // takers for taker in range(takers + 1)]
    return [tuple(gpus[begin:end]) for begin, end in pairwise(ends)]


def own_gpus(gpus: Sequence[str], ranks: int) -> list[tuple[str, ...]]:
    return [part[:1] if any(map(_is_slice, part)) else part for part in deal(gpus, ranks)]


def variables(gpus: Sequence[str], sharers: int, env: Mapping[str, str], variable: str = CUDA) -> dict[str, str]:
    """GPU variables of a process; those already in `env` win."""
    if sharers < 2:
        return {variable: ",".join(gpus)}
    modest = {**_MODEST, _FRACTION: f"{memory_share(sharers):g}"}
    kept = {*env, _FRACTION} if _NEW_FRACTION in env else set(env)
    return {variable: ",".join(gpus), **{name: value for name, value in modest.items() if name not in kept}}


def memory_share(sharers: int) -> float:
    return int(1000 * _SHARED_MEMORY / sharers) / 1000


def dealt_out(machines: Sequence[GpuMachine]) -> PoolGpus:
    by_node: dict[int, tuple[str, ...]] = {}
    counts: dict[int, int] = {}
    total = 0
    for machine in machines:
        by_node.update(zip(machine.ranks, deal(machine.gpus, len(machine.ranks)), strict=True))
        used = {node: _used(by_node[node], ranks) for node, ranks in machine.ranks.items()}
        counts |= {node: len(gpus) for node, gpus in used.items()}
        total += len(frozenset[str]().union(*used.values()))
    sharers = {node: count for machine in machines for node, count in _sharers(machine, by_node).items() if count > 1}
    return PoolGpus(by_node, counts, total, _conflict(machines, by_node), sharers)


def _used(gpus: Sequence[str], ranks: int) -> set[str]:
    return {gpu for own in own_gpus(gpus, ranks) for gpu in own}


def _is_slice(name: str) -> bool:
    return name.startswith("MIG-")


def _sharers(machine: GpuMachine, by_node: Mapping[int, tuple[str, ...]]) -> dict[int, int]:
    users: Counter[tuple[str, ...]] = Counter()
    for node, ranks in machine.ranks.items():
        users[by_node[node]] += ranks
    return {node: -(-users[by_node[node]] // len(by_node[node])) for node in machine.ranks if by_node[node]}


def _conflict(machines: Sequence[GpuMachine], by_node: Mapping[int, tuple[str, ...]]) -> str | None:
    without = [str(node) for node, gpus in by_node.items() if not gpus]
    if len(without) == len(by_node) or sum(sum(machine.ranks.values()) for machine in machines) < 2:
        return None
    if without:
        return f"node {without[0]} has no GPU" if len(without) == 1 else f"nodes {', '.join(without)} have no GPU"
    for machine in machines:
        own = [part for node, ranks in machine.ranks.items() for part in own_gpus(by_node[node], ranks)]
        used = [gpu for part in own for gpu in part]
        count = len(set(used))
        if len(used) > count:
            return f"{len(own)} ranks share {count} GPU{'' if count == 1 else 's'} on {machine.name}"
        if len(own) > 1 and any(map(_is_slice, used)):
            # NCCL tells cards apart, and takes two slices for one card.
            return f"{len(own)} ranks use slices (MIG) of GPUs on {machine.name}"
    return None
