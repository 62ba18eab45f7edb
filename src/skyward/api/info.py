"""Where a body runs: its place in the pool, from COMPUTE_POOL, and the current call, set by the runner."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, cast

from skyward.errors import InvalidArgument, SkywardError

__all__ = [
    "AcceleratorInfo",
    "InstanceInfo",
    "NetworkInfo",
    "Peer",
    "Preemption",
    "announce",
    "call_context",
    "count_by",
    "current_broadcast",
    "current_call",
    "facts",
    "holds_group",
    "instance_info",
    "is_head",
    "mark_group",
    "note_shard",
    "pool_info",
    "preempted",
    "require_peers",
    "set_stall_timeout",
    "stall_timeout",
    "stop_counting",
]


VARIABLE = "COMPUTE_POOL"

Call = tuple[str, int]
_Served = tuple[Call, str | None]


def instance_info() -> InstanceInfo:
    """This process's place in the pool, with the current call's id and attempt.

    Outside a pool, as in `f.local(x)`, it is rank 0 of 1 on node 0 of 1, and `job_id` is empty.
    """
    return pool_info() or _ALONE


def pool_info() -> InstanceInfo | None:
    raw = os.environ.get(VARIABLE)
    if not raw:
        return None
    info = _parsed(raw)
    call = current_call()
    return info if call is None else replace(info, task_id=call[0], attempt=call[1])


def is_head(info: InstanceInfo | None = None) -> bool:
    """Whether this (or `info`) is rank 0, the pool's first process; True outside a pool."""
    return (info or instance_info()).is_head


def call_context(
    task_id: str, attempt: int, *, threads: bool, broadcast: str | None = None
) -> AbstractContextManager[None]:
    """Names the call inside the block, for the process or (`threads`) for this context alone."""
    return (_ContextCall if threads else _ProcessCall)(((task_id, attempt), broadcast))


def current_call() -> Call | None:
    served = _context_call.get() or _process_call
    return served[0] if served else None


def current_broadcast() -> str | None:
    served = _context_call.get() or _process_call
    return served[1] if served else None


def require_peers(info: InstanceInfo) -> None:
    if info.network.blocked and info.total_nodes > 1:
        raise SkywardError(
            f"the nodes of this pool cannot form a group: {info.network.blocked}. Open their firewalls to each other, "
            "or run the function on one node, with >>."
        )


def mark_group() -> None:
    """This process is in a group: none of its processes can be replaced alone."""
    global _grouped
    _grouped = True


def holds_group() -> bool:
    return _grouped


def set_stall_timeout(seconds: float | None) -> None:
    global _stall_timeout
    _stall_timeout = seconds


def stall_timeout() -> float | None:
    return _stall_timeout


_grouped = False
_stall_timeout: float | None = None


@lru_cache(maxsize=8)
def _parsed(raw: str) -> InstanceInfo:
    return InstanceInfo.from_json(raw)


_context_call: ContextVar[_Served | None] = ContextVar("skyward_call", default=None)
_process_call: _Served | None = None


class _ProcessCall(AbstractContextManager[None]):
    __slots__ = ("before", "call")

    def __init__(self, call: _Served) -> None:
        self.call = call

    def __enter__(self) -> None:
        global _process_call
        self.before, _process_call = _process_call, self.call

    def __exit__(self, *error: object) -> None:
        global _process_call
        _process_call = self.before


class _ContextCall(AbstractContextManager[None]):
    __slots__ = ("before", "call")

    def __init__(self, call: _Served) -> None:
        self.call = call

    def __enter__(self) -> None:
        self.before = _context_call.get()
        _context_call.set(self.call)

    def __exit__(self, *error: object) -> None:
        # Not reset(token): a body that streams may be left in another context than it was entered in.
        _context_call.set(self.before)


@dataclass(frozen=True)
class Peer:
    """A node, and the addresses by which others reach it."""

    node: int
    private_ip: str
    public_ip: str | None = None


@dataclass(frozen=True)
class AcceleratorInfo:
    """The kind of accelerator of a node, and how many."""

    type: str
    count: int = 1
    memory_gb: float = 0.0
    is_trainium: bool = False


@dataclass(frozen=True)
class NetworkInfo:
    """The interface of the node's address, and why nodes cannot reach each other."""

    interface: str | None = None
    bandwidth_gbps: float | None = None
    blocked: str | None = None


@dataclass(frozen=True, kw_only=True)
class InstanceInfo:
    """One process's place in the pool: its rank, its node, the other nodes, where the head listens.

    A node is a machine. It runs `workers_per_node` processes, each of which is one rank; ranks are counted up node by
    node.

    Attributes:
        node: the number of this node, from 0.
        worker: the number of this process on its node.
        total_nodes: how many nodes the pool has.
        workers_per_node: how many processes this node runs.
        accelerators: how many accelerators this node has, all of its processes together.
        total_accelerators: how many all nodes have.
        head_addr: the address of node 0, for frameworks that form a group.
        head_port: a free port there for them.
        job_id: the name of the pool.
        peers: all nodes with their addresses, in their order.
        accelerator: the kind of accelerator, if any.
        network: the interface of this node's address, and its speed where known.
        ports: more free ports of node 0, by purpose.
        task_id: the id of the current call; None in a plugin's hook.
        attempt: how often the call was started before, after the loss of a node.
    """

    node: int
    worker: int = 0
    total_nodes: int
    workers_per_node: int = 1
    ranks_per_node: tuple[int, ...] = ()
    """Processes of each node, if nodes differ; empty if all have `workers_per_node`."""
    accelerators: int = 0
    total_accelerators: int = 0
    node_gpus: tuple[str, ...] = ()
    """Of this node, as CUDA_VISIBLE_DEVICES names them."""
    gpu_conflict: str | None = None
    """Why not every rank has a GPU of its own; None if each has, or the pool has none."""
    processes_given: bool = False
    """Whether the pool was given `processes_per_node`: then a single rank is a group too, as under torchrun."""
    head_addr: str
    head_port: int
    job_id: str
    peers: tuple[Peer, ...]
    accelerator: AcceleratorInfo | None = None
    network: NetworkInfo = NetworkInfo()
    ports: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    task_id: str | None = None
    attempt: int = 0

    @property
    def rank(self) -> int:
        """This process's number among all of the pool; the node's number if each node has one process."""
        before = sum(self.ranks_per_node[: self.node]) if self.ranks_per_node else self.node * self.workers_per_node
        return before + self.worker

    @property
    def world_size(self) -> int:
        """How many processes the pool has."""
        return sum(self.ranks_per_node) or self.total_nodes * self.workers_per_node

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return self.worker

    @property
    def local_world_size(self) -> int:
        """How many processes this node has."""
        return self.workers_per_node

    @property
    def global_worker_index(self) -> int:
        """The same as `rank`."""
        return self.rank

    @property
    def total_workers(self) -> int:
        """The same as `world_size`."""
        return self.world_size

    @property
    def is_head(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def node_of(self, rank: int) -> int:
        """The node that a rank runs on."""
        for node, count in enumerate(self.ranks_per_node):
            if rank < count:
                return node
            rank -= count
        return rank // self.workers_per_node

    @property
    def hostname(self) -> str:
        """The name of the machine that asks."""
        return os.uname().nodename

    def to_json(self) -> str:
        """The text that COMPUTE_POOL holds on this node."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, raw: str) -> InstanceInfo:
        """Reads what `to_json` wrote; any other value is refused, with the wrong field."""
        try:
            data: object = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise _refusal("it", f"is not JSON ({error})", raw) from None
        return _instance_info(_record(data, cls, "it"))


_ALONE = InstanceInfo(
    node=0, total_nodes=1, head_addr="127.0.0.1", head_port=29500, job_id="", peers=(Peer(0, "127.0.0.1"),)
)


def _instance_info(data: dict[str, Any]) -> InstanceInfo:
    nodes = _integer(data, "total_nodes", 1, 1_000_000)
    workers = _integer(data, "workers_per_node", 1, 1_000_000, 1)
    info = InstanceInfo(
        node=_integer(data, "node", 0, nodes - 1),
        worker=_integer(data, "worker", 0, workers - 1, 0),
        total_nodes=nodes,
        workers_per_node=workers,
        ranks_per_node=_ranks(data, nodes),
        accelerators=_integer(data, "accelerators", 0, 100_000, 0),
        total_accelerators=_integer(data, "total_accelerators", 0, 10**9, 0),
        node_gpus=tuple(_gpu(item) for item in _items(data, "node_gpus", [])),
        gpu_conflict=_optional_text(data, "gpu_conflict", SENTENCE),
        processes_given=_boolean(data, "processes_given"),
        head_addr=_text(data, "head_addr", ADDRESS),
        head_port=_integer(data, "head_port", 1, 65535),
        job_id=_text(data, "job_id", WORD),
        peers=tuple(_peer(_record(item, Peer, "peers"), nodes) for item in _items(data, "peers")),
        accelerator=None if data.get("accelerator") is None else _accelerator(data["accelerator"]),
        network=NetworkInfo() if data.get("network") is None else _network(data["network"]),
        ports=_ports(data.get("ports")),
        task_id=_optional_text(data, "task_id", WORD),
        attempt=_integer(data, "attempt", 0, 1_000_000, 0),
    )
    if [peer.node for peer in info.peers] != list(range(nodes)):
        raise _refusal("peers", f"must list nodes 0 to {nodes - 1}, once each and in order", data["peers"])
    if info.ranks_per_node and info.ranks_per_node[info.node] != workers:
        raise _refusal("ranks_per_node", f"must say {workers} for node {info.node}", info.ranks_per_node)
    return info


def _ranks(data: dict[str, Any], nodes: int) -> tuple[int, ...]:
    counts = _items(data, "ranks_per_node") if data.get("ranks_per_node") else []
    if counts and len(counts) != nodes:
        raise _refusal("ranks_per_node", f"must have {nodes} numbers, one for each node", counts)
    return tuple(_integer({"ranks_per_node": count}, "ranks_per_node", 1, 1_000_000) for count in counts)


def _peer(data: dict[str, Any], nodes: int) -> Peer:
    node, private = _integer(data, "node", 0, nodes - 1), _text(data, "private_ip", ADDRESS)
    return Peer(node, private, _optional_text(data, "public_ip", ADDRESS))


def _gpu(value: object) -> str:
    return _text({"node_gpus": value}, "node_gpus", WORD)


def _accelerator(value: object) -> AcceleratorInfo:
    data = _record(value, AcceleratorInfo, "accelerator")
    trainium = _boolean(data, "is_trainium")
    count, memory = _integer(data, "count", 0, 100_000, 1), _number(data, "memory_gb")
    return AcceleratorInfo(_text(data, "type", WORD), count, memory or 0.0, trainium)


def _boolean(data: dict[str, Any], name: str) -> bool:
    value = data.get(name, False)
    if not isinstance(value, bool):
        raise _refusal(name, "must be true or false", value)
    return value


def _network(value: object) -> NetworkInfo:
    data = _record(value, NetworkInfo, "network")
    interface, blocked = _optional_text(data, "interface", INTERFACE), _optional_text(data, "blocked", SENTENCE)
    return NetworkInfo(interface, _number(data, "bandwidth_gbps"), blocked)


def _ports(value: object) -> dict[str, int]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _refusal("ports", "must be an object", value)
    ports = cast("dict[str, Any]", value)
    for name in ports:
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", name):
            raise _refusal("ports", "must have short lower-case names", name)
    return {name: _integer(ports, name, 1, 65535) for name in ports}


# What these texts may hold ends up in the environment and on command lines of frameworks: nothing a shell would read.
ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}|[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,15})?")
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}")
SENTENCE = re.compile(r"[^\x00-\x1f\x7f]{1,1000}")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:/+@#-]{0,199}")


def _record(value: object, kind: type[Any], name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(name, "must be an object", value)
    data = cast("dict[str, Any]", value)
    if unknown := data.keys() - {field.name for field in fields(kind)}:
        raise _refusal(name, f"has fields that {kind.__name__} does not know", sorted(unknown))
    return data


def _items(data: dict[str, Any], name: str, default: list[object] | None = None) -> list[object]:
    value = data.get(name, default)
    if not isinstance(value, list):
        raise _refusal(name, "must be a list", value)
    return cast("list[object]", value)


def _integer(data: dict[str, Any], name: str, low: int, high: int, default: int | None = None) -> int:
    value = data.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refusal(name, f"must be a whole number from {low} to {high}", value)
    return value


def _number(data: dict[str, Any], name: str) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
        raise _refusal(name, "must be a number from 0 to 1e9", value)
    return float(value)


def _text(data: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise _refusal(name, f"must be a text of the form {pattern.pattern}", value)
    return value


def _optional_text(data: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str | None:
    return None if data.get(name) is None else _text(data, name, pattern)


def _refusal(name: str, rule: str, value: object) -> InvalidArgument:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidArgument(
        f"{VARIABLE} cannot be used: {name} {rule}, found {shown}. The variable is written by the pool for its nodes; "
        "something else has set or changed it. Unset it to run outside a pool."
    )


@dataclass(frozen=True)
class Preemption:
    """The cloud takes this machine back at `deadline` (as of time.time())."""

    deadline: float
    _end: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_end", time.monotonic() + self.deadline - time.time())

    def __reduce__(self) -> tuple[type[Preemption], tuple[float]]:
        return Preemption, (self.deadline,)  # another process may be on another machine

    @property
    def seconds_left(self) -> float:
        """How long the machine still has, even if its clock is set meanwhile; 0 afterwards."""
        return max(0.0, self._end - time.monotonic())


def preempted() -> Preemption | None:
    """The notice that this machine will be taken away, if there is one: save what matters before its deadline."""
    return _notice


def announce(seconds: float) -> None:
    global _notice
    _notice = Preemption(time.time() + seconds)


_notice: Preemption | None = None


# What a process can say of its part in a group: uneven shards that its bodies took, and collectives that it entered.
#
# Nothing is written down as long as shards are even, and nothing is counted here: a framework's own counter is asked.


_KEPT = 8

_shards: dict[str, list[int]] = {}
_counter: Callable[[], int] | None = None


def note_shard(length: int, ranks: int, own: int) -> None:
    broadcast = current_broadcast()
    if broadcast is not None:
        _shards.pop(broadcast, None)
        _shards[broadcast] = [length, ranks, own]
        while len(_shards) > _KEPT:
            del _shards[next(iter(_shards))]


def count_by(counter: Callable[[], int] | None) -> None:
    global _counter
    _counter = counter


def stop_counting() -> None:
    last = facts().get("collectives")
    count_by(None if last is None else lambda: last)


def facts() -> dict[str, Any]:
    found: dict[str, Any] = {"shards": dict(_shards)}
    if _counter is not None:
        try:
            found["collectives"] = _counter()
        except Exception:  # a group that has ended, or that counts nothing; then it is not known
            pass
    return found
