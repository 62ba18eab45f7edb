"""Builds the settings of a node as plain values; nothing here talks to a machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from skyward.accelerators import Accelerator
from skyward.api.context import PoolContext
from skyward.api.hardware import Found
from skyward.api.info import AcceleratorInfo, InstanceInfo, NetworkInfo, Peer
from skyward.api.matching import compare, models_of
from skyward.api.plugin import Plugin
from skyward.api.provider import Machine
from skyward.api.spec import Ranks
from skyward.client import output
from skyward.errors import AcceleratorMismatch, BootstrapError
from skyward.node.gpu_shares import CUDA, GpuMachine, PoolGpus, dealt_out, memory_share, own_gpus, restricted, variables
from skyward.node.settings import Greeting, NodeSettings
from skyward.setup.hosts import Host
from skyward.setup.network import Address
from skyward.transport.blobs import SCRATCH
from skyward.transport.payload import Packer

__all__ = [
    "agent_settings",
    "counted_ranks",
    "doubts",
    "instance_info",
    "packed_hooks",
    "pool_gpus",
    "refusal",
    "shared_gpus",
]


_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC"),  # XLA reads NPROC
)


def agent_settings(
    context: PoolContext, node: int, host: Host, info: InstanceInfo, greeting: Greeting, gpus: PoolGpus
) -> NodeSettings:
    """What an agent needs to start its runners; `greeting` is its own."""
    slots, ranks = context.worker.concurrency, info.local_world_size
    processes, threads = (slots * ranks, 1) if context.worker.process else (ranks, slots)
    counts = thread_counts(len(host.nodes) * processes, greeting.get("cpus", 1), host.env, context.local, os.environ)
    return {
        "shared": context.local,
        "info": info.to_json(),
        "env": {**counts, **host.env, SCRATCH: host.keeper.scratch},
        "cwd": host.cwd,
        "grace": context.grace,
        "ready_within": context.provision_timeout,
        "threads": threads,
        "processes": processes,
        "gpus": list(gpus.by_node[node]),
        "places": _gpu_variables(context, node, host, greeting, gpus, ranks),
        "runner": {
            "node": node,
            "threads": threads,
            "paths": list(host.paths),
            "blobs": host.keeper.scratch,
            "max_result": context.max_result,
            "stall_timeout": context.stall_timeout,
            "shared": host.keeper.sockets.get(0),
            "log": output.snapshot(),
        },
    }


def instance_info(
    context: PoolContext,
    node: int,
    machines: Sequence[Machine],
    addresses: Sequence[Address],
    blocked: str | None,
    gpus: PoolGpus,
    ports: Sequence[int],
    ranks: Ranks,
) -> InstanceInfo:
    requested, own = context.spec.accelerator, gpus.by_node[node]
    counts = tuple(count for count in ranks.counts if count)  # nodes that are missing come last
    return InstanceInfo(
        node=node,
        total_nodes=len(counts),
        workers_per_node=counts[node],
        ranks_per_node=() if len(set(counts)) == 1 else counts,
        accelerators=gpus.counts[node],
        total_accelerators=gpus.total,
        node_gpus=own,
        gpu_conflict=gpus.conflict,
        processes_given=context.spec.processes_per_node is not None,
        head_addr=addresses[0].ip,
        head_port=ports[0],
        job_id=context.name,
        peers=tuple(Peer(i, addresses[i].ip, machines[i].public_ip) for i in range(len(counts))),
        accelerator=None
        if requested is None
        else AcceleratorInfo(
            type=requested.name,
            count=gpus.counts[node],
            memory_gb=requested.memory_gb or 0.0,
            is_trainium=requested.name.lower().startswith("trainium"),
        ),
        network=NetworkInfo(interface=addresses[node].interface, blocked=blocked),
        ports={"torch": ports[0], "jax": ports[1], "tensorflow": ports[2]},
    )


def counted_ranks(
    context: PoolContext, hosts: Mapping[int, Host], greetings: Sequence[Greeting], names: Sequence[str]
) -> Ranks:
    """With "gpu" one process per GPU. Missing nodes come last and have no greeting."""
    asked, there = context.spec.processes, [1 if greeting else 0 for greeting in greetings]
    if asked != "gpu":
        return Ranks([asked * count for count in there])
    by_node = pool_gpus(context, hosts, greetings, Ranks(there)).by_node
    for node in range(sum(there)):
        if not by_node[node]:
            raise BootstrapError(
                "starting runners",
                f'processes_per_node="gpu" asks for one process for each GPU, and {names[node]} shows none. Ask for '
                "machines that have GPUs, with accelerator=...; or say how many processes a node runs, such as "
                "processes_per_node=2, which also works without GPUs.",
                node,
            )
    return Ranks([len(by_node.get(node, ())) for node in range(context.nodes)])


def pool_gpus(context: PoolContext, hosts: Mapping[int, Host], greetings: Sequence[Greeting], ranks: Ranks) -> PoolGpus:
    machines: list[GpuMachine] = []
    there = [node for node, count in enumerate(ranks.counts) if count]
    for host in (hosts[node] for node in there if hosts[node].nodes[0] == node):
        name = "this computer" if context.local else f"node {host.nodes[0]}"
        found = _machine_gpus(context, host, greetings[host.nodes[0]])
        machines.append(GpuMachine(name, found, {node: ranks.counts[node] for node in host.nodes}))
    return dealt_out(machines)


def _machine_gpus(context: PoolContext, host: Host, greeting: Greeting) -> list[str]:
    found = greeting.get("gpu_names", [])
    # On this computer the agent's own environment has the image's variables already.
    return found if context.local else restricted(found, host.env.get(greeting.get("gpu_variable", CUDA)))


def _gpu_variables(
    context: PoolContext, node: int, host: Host, greeting: Greeting, gpus: PoolGpus, ranks: int
) -> list[dict[str, str]]:
    own, sharers = gpus.by_node[node], _sharers(context, node, gpus)
    if sharers < 2 and list(own) == _machine_gpus(context, host, greeting) and (ranks == 1 or not own):
        return [{} for _ in range(ranks)]
    env = {**(os.environ if context.local else {}), **host.env}
    return [variables(part, sharers, env, greeting.get("gpu_variable", CUDA)) for part in own_gpus(own, ranks)]


def _sharers(context: PoolContext, node: int, gpus: PoolGpus) -> int:
    if not gpus.by_node[node]:
        return 0
    return gpus.sharers.get(node, 1) * (context.worker.concurrency if context.worker.process else 1)


def shared_gpus(context: PoolContext, gpus: PoolGpus) -> str:
    sharers = max((_sharers(context, node, gpus) for node in gpus.by_node), default=0)
    if sharers < 2:
        return ""
    share = memory_share(sharers)
    return (
        f"{sharers} processes share a GPU: JAX uses at most {share:.1%} of its memory in each of them "
        f"(XLA_PYTHON_CLIENT_MEM_FRACTION, unless you set it). torch has no limit: in the body, call "
        f"torch.cuda.set_per_process_memory_fraction({share:g})."
    )


def packed_hooks(plugins: Sequence[Plugin], hosts: Sequence[Host]) -> list[Any]:
    hooks = [(p.name, p.around_app, p.decorate) for p in plugins if p.around_app or p.decorate]
    if not hooks:
        return []
    head, buffers = Packer([path for host in hosts for path in host.paths]).pack(hooks, "the plugins' hooks")
    return [head, *map(bytes, buffers)]


def thread_counts(
    runners: int, cpus: int, env: Mapping[str, str], local: bool, client_env: Mapping[str, str]
) -> dict[str, str]:
    if runners == 1 and not local:
        return {}
    if any(name in env or (local and name in client_env) for name in _THREAD_VARIABLES):
        return {}  # the user has decided
    return dict.fromkeys(_THREAD_VARIABLES, str(max(1, cpus // runners)))


def refusal(requested: Accelerator | None, name: str, node: int, greeting: Greeting) -> AcceleratorMismatch | None:
    if requested is None:
        return None
    found = Found.of(greeting)
    reason = compare(requested, found).refusal
    if not reason:
        return None
    text = f"{name} {reason}; {requested.described()} was asked for. {_advice(found)}"
    return AcceleratorMismatch("accelerator", text, node)


def doubts(requested: Accelerator | None, greetings: Mapping[str, Greeting]) -> list[str]:
    found = {name: Found.of(greeting) for name, greeting in greetings.items()}
    if requested is None:
        broken = {name: one.problem for name, one in found.items() if one.problem}
        return [f"{_all(names)}: {text}. Programs cannot use GPUs there." for text, names in _grouped(broken).items()]
    unsure = {name: compare(requested, one).doubt for name, one in found.items()}
    return [f"{_all(names)} {text}." for text, names in _grouped(unsure).items() if text]


def _advice(found: Found) -> str:
    models = models_of(found.gpus[0].name) if found.gpus and not found.gpus[0].is_slice else []
    if not models:
        return "Leave `accelerator` out to run on what is there, or use machines that have it."
    count = f":{len(found.gpus)}" if len(found.gpus) > 1 else ""
    return f'Ask for what is there, accelerator="{models[0].name}{count}", or use other machines.'


def _grouped(texts: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return names


def _all(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
