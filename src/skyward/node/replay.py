"""Makes the runners of a local pool like the node on which a call failed: the hooks of `sky replay`."""

from __future__ import annotations

import builtins
import functools
import linecache
import os
import re
import resource
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from skyward.api.info import VARIABLE, InstanceInfo, Peer
from skyward.node import body, stdio
from skyward.node.items import EachItem
from skyward.transport import exceptions

__all__ = ["Order", "around_app", "decorate"]


@dataclass(frozen=True, kw_only=True)
class Order:
    info: str
    rank: int
    """That the user wants to see; a single process stands for it."""
    directory: str
    paths: Sequence[str]
    sources: Mapping[str, str]
    """The user's files at that time, to be shown."""
    memory: int | None = None
    """Bytes that the function may use; more is a MemoryError at its line."""
    terminal: str = ""
    """Where the debugger is opened."""
    patience: float = 0.0
    """How long other failed ranks wait for `rank`, which may fail, too."""


@contextmanager
def around_app(order: Order, info: InstanceInfo) -> Generator[None]:
    """Before all other hooks: directory, variables, place in the pool, and listeners to failures."""
    rank = info.rank if info.world_size > 1 else order.rank
    os.environ[VARIABLE] = _placed(order, rank, info).to_json()
    if os.path.isdir(order.directory):
        os.chdir(order.directory)
    sys.path[:0] = order.paths
    for path, text in order.sources.items():
        linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
    body.on_failure.append(functools.partial(_failed, order, rank))
    yield


def decorate(order: Order, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Inside all other hooks: limits, items one by one, generators to their end."""
    if isinstance(fn, EachItem):
        fn.keep = False
    if order.memory is not None:
        _limit_memory(order.memory)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if isinstance(result, AsyncGenerator):
            return _drained(cast("AsyncGenerator[Any, None]", result))
        return list(cast("Iterator[Any]", result)) if isinstance(result, Generator) else result

    return run


def _placed(order: Order, rank: int, here: InstanceInfo) -> InstanceInfo:
    """As on the node, at addresses of this computer and with its GPUs."""
    there = InstanceInfo.from_json(order.info)
    counts = there.ranks_per_node or (there.workers_per_node,) * there.total_nodes
    node, gpus = there.node_of(rank), here.node_gpus
    return replace(
        there,
        node=node,
        worker=rank - sum(counts[:node]),
        workers_per_node=counts[node],
        accelerators=len(gpus),
        total_accelerators=len(gpus),
        node_gpus=gpus,
        gpu_conflict=None,
        accelerator=there.accelerator and replace(there.accelerator, count=len(gpus)),
        head_addr=here.head_addr,
        head_port=here.head_port,
        peers=tuple(Peer(peer.node, here.head_addr) for peer in there.peers),
        network=here.network,
        ports=here.ports,
    )


def _failed(order: Order, rank: int, exc: BaseException) -> None:
    stopped = isinstance(exc, body.Stopped)
    if rank != order.rank and not stopped:
        told = exceptions.capture(exc)[0]
        print(f"it has failed: {told['type']}: {told['message']}", file=sys.stderr, flush=True)
        end = time.monotonic() + order.patience
        while time.monotonic() < end:  # in short steps, between which it can be stopped
            time.sleep(0.05)
    elif rank == order.rank and order.terminal:
        where = last = exceptions.users_part(exc.__traceback__)
        while stopped and last is not None and (following := last.tb_next) is not None:
            if following.tb_frame.f_code.co_name == "_on_sigterm":  # by which the runner stops a body
                last.tb_next = None
            last = following
        _debug(order.terminal, where)


def _debug(terminal: str, where: TracebackType | None) -> None:
    import pdb  # takes long to load

    opened = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    before = [os.dup(fd) for fd in range(3)]
    streams = sys.stdin, sys.stdout
    try:
        for fd in range(3):
            os.dup2(opened, fd)  # where lines are edited: that needs the real ones
        builtins.input = stdio.keyboard
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        if where is None:
            print("no line of the function has failed: there is nothing to debug")
        else:
            pdb.post_mortem(where)
        sys.stdout.flush()
    finally:
        sys.stdin, sys.stdout = streams
        for fd, old in enumerate(before):
            os.dup2(old, fd)
            os.close(old)
        os.close(opened)


async def _drained(items: AsyncGenerator[Any, None]) -> list[Any]:
    return [item async for item in items]


def _limit_memory(more: int) -> None:
    """To what this process has now, and so much `more`; beyond is a MemoryError."""
    taken = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    if taken:
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (int(taken[1]) * 1024 + more, most))
