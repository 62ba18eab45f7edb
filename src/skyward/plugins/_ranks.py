"""What the plugins of frameworks know of a rank: what messages call it, which GPUs it sees, and what is said once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable

from skyward.api.info import InstanceInfo
from skyward.node.gpu_shares import CUDA, HIP, own_gpus

__all__ = [
    "called",
    "everyone",
    "explain_lost_peer",
    "gpu_by_local_rank",
    "gpu_positions",
    "on_one_machine",
    "say",
    "show_node_gpus",
    "this_rank",
]


_HOLD_BACK = 2.0
"""Seconds that an error waits that only echoes the failure of another rank."""


def called(info: InstanceInfo, ranks: Iterable[int]) -> str:
    """Some ranks in words: nodes, where each node has one."""
    numbers = [str(rank) for rank in ranks]
    if _one_each(info):
        names, kind = numbers, "node"
    else:
        names, kind = [f"{rank} (on node {info.node_of(int(rank))})" for rank in numbers], "rank"
    return f"{kind} {names[0]}" if len(names) == 1 else f"{kind}s {', '.join(names[:-1])} and {names[-1]}"


def this_rank(info: InstanceInfo) -> str:
    """This process in words."""
    return called(info, [info.rank])


def explain_lost_peer(error: Exception, info: InstanceInfo, group: str) -> None:
    """Lets an error that only echoes another rank's end wait for the other's own, and says what it means."""
    time.sleep(_HOLD_BACK)  # the pool stops this call when it hears of the other
    error.add_note(
        f"{this_rank(info).capitalize()} lost its connection to another one of {group}: that one left the "
        "function, raised, or was killed before this one was done. Look at the others' output."
    )


def on_one_machine(info: InstanceInfo) -> bool:
    """Whether all ranks run on the same machine, and see the same files."""
    return all(peer.private_ip == info.head_addr for peer in info.peers)


def everyone(info: InstanceInfo) -> str:
    """How many there are in all."""
    return f"all {info.world_size} {'nodes' if _one_each(info) else 'ranks'}"


def say(info: InstanceInfo, text: str) -> None:
    """Tells the user something about the whole pool: rank 0 says it, once."""
    if info.is_head and text not in _said:
        _said.add(text)
        print(text, file=sys.stderr, flush=True)


def show_node_gpus(info: InstanceInfo) -> None:
    """Lets this process see all GPUs of its node, as torchrun does: its own is the one with its local rank.

    Without a framework's plugin a process sees its own GPUs only. CUDA reads the variable once, when it is first used.
    """
    if info.local_world_size > 1 and _has_own_card(info):
        os.environ[_variable()] = ",".join(info.node_gpus)


def gpu_by_local_rank(info: InstanceInfo) -> int | None:
    """The number by which a program for torchrun addresses its GPU; None without GPUs."""
    positions = gpu_positions(info)
    if not positions:
        return None
    shows_all = _shown(info) == list(info.node_gpus)
    return info.local_rank if shows_all and _has_own_card(info) else positions[0]


def gpu_positions(info: InstanceInfo) -> list[int]:
    """The numbers by which this process addresses its own GPUs, among those that it sees."""
    if not info.node_gpus:
        return list(range(info.accelerators))
    own = own_gpus(info.node_gpus, info.local_world_size)[info.local_rank]
    seen = _shown(info)
    return [seen.index(gpu) for gpu in own if gpu in seen] or list(range(len(own)))


def _one_each(info: InstanceInfo) -> bool:
    return info.world_size == info.total_nodes


def _shown(info: InstanceInfo) -> list[str]:
    value = os.environ.get(_variable())
    return list(info.node_gpus) if value is None else [entry.strip() for entry in value.split(",")]


def _variable() -> str:
    return HIP if HIP in os.environ else CUDA


def _has_own_card(info: InstanceInfo) -> bool:
    slices = any(gpu.startswith("MIG-") for gpu in info.node_gpus)
    return len(info.node_gpus) >= info.local_world_size and not slices


_said: set[str] = set()
