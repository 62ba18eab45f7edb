"""What a node is told about itself and its pool, as values: nothing here talks to a machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from skyward.api.context import PoolContext
from skyward.api.info import AcceleratorInfo, InstanceInfo, NetworkInfo, Peer
from skyward.api.provider import Machine
from skyward.setup.hosts import Host
from skyward.setup.network import Address
from skyward.transport.blobs import SCRATCH
from skyward.transport.payload import Packer

__all__ = ["agent_settings", "instance_info", "packed_hooks", "thread_counts"]

_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC"),  # XLA reads NPROC
)


def agent_settings(context: PoolContext, node: int, host: Host, info: InstanceInfo, cpus: int) -> dict[str, Any]:
    """What an agent needs to start its runners."""
    slots = context.worker.concurrency
    processes, threads = (slots, 1) if context.worker.process else (1, slots)
    counts = thread_counts(len(host.nodes) * processes, cpus, host.env, context.local, os.environ)
    return {
        "shared": context.local,
        "info": info.to_json(),
        "env": {**counts, **host.env, SCRATCH: host.keeper.scratch},
        "cwd": host.cwd,
        "grace": context.grace,
        "threads": threads,
        "processes": processes,
        "runner": {
            "node": node,
            "threads": threads,
            "paths": list(host.paths),
            "blobs": host.keeper.scratch,
            "max_result": context.max_result,
        },
    }


def instance_info(
    context: PoolContext,
    node: int,
    machines: Sequence[Machine],
    addresses: Sequence[Address],
    blocked: str | None,
    accelerators: Sequence[int],
    ports: Sequence[int],
) -> InstanceInfo:
    """What user code on a node can ask about the pool; `accelerators` is how many each node has."""
    requested = context.spec.accelerator
    return InstanceInfo(
        node=node,
        total_nodes=context.nodes,
        accelerators=accelerators[node],
        total_accelerators=sum(accelerators),
        head_addr=addresses[0].ip,
        head_port=ports[0],
        job_id=context.name,
        peers=tuple(Peer(i, addresses[i].ip, machine.public_ip) for i, machine in enumerate(machines)),
        accelerator=None
        if requested is None
        else AcceleratorInfo(
            type=requested.name,
            count=accelerators[node],
            memory_gb=requested.memory_gb or 0.0,
            is_trainium=requested.name.lower().startswith("trainium"),
        ),
        network=NetworkInfo(interface=addresses[node].interface, blocked=blocked),
        ports={"torch": ports[0], "jax": ports[1], "tensorflow": ports[2]},
    )


def packed_hooks(context: PoolContext, hosts: Sequence[Host]) -> list[Any]:
    """The plugins' hooks for runners, pickled; empty if there are none."""
    hooks = [(p.name, p.around_app, p.decorate) for p in context.plugins if p.around_app or p.decorate]
    if not hooks:
        return []
    head, buffers = Packer([path for host in hosts for path in host.paths]).pack(hooks, "the plugins' hooks")
    return [head, *map(bytes, buffers)]


def thread_counts(
    runners: int, cpus: int, env: Mapping[str, str], local: bool, client_env: Mapping[str, str]
) -> dict[str, str]:
    """Variables by which runners that share a machine's cores do not each start a thread for every core."""
    if runners == 1 and not local:
        return {}
    if any(name in env or (local and name in client_env) for name in _THREAD_VARIABLES):
        return {}  # the user has decided
    return dict.fromkeys(_THREAD_VARIABLES, str(max(1, cpus // runners)))
