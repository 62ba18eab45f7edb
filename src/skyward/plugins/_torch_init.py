"""Programs that form their torch group themselves: in a body, `init_process_group` means the ranks of the pool.

A program for torchrun calls it at its start, and `destroy_process_group` at its end. Where the pool has formed a group
already the program gets that one. Where it asks for another backend or time limit it gets a group of its own, over the
pool's store. A group that a program has ended is formed again before the next broadcast.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

from skyward.api.info import InstanceInfo, current_broadcast, current_call, instance_info
from skyward.errors import SkywardError
from skyward.plugins._torch_gpus import possible

__all__ = ["LETTING_GO", "OwnGroups", "ReplacesInit", "await_ranks", "end_group", "replace_init"]

log = logging.getLogger("skyward")

LETTING_GO = 0.01  # seconds in which gloo's threads let go of a group
_STEP = 0.02
_NOTICE = 10.0
_NOTICE_ALONE = 0.5


class OwnGroups:
    """The groups that bodies of this process form themselves. `timeout` is in seconds, for those that name none."""

    def __init__(self, dist: Any, info: InstanceInfo, store: Any, timeout: float) -> None:
        self._dist, self._info, self._store, self._timeout = dist, info, store, timeout
        self._prefix, self._count = "skyward/own", 0
        self._pools: Any = None
        self._kept: list[Any] = []  # a group that is let go of too early can hang, see `end_group`

    def begin(self, group: Any, prefix: str) -> None:
        """The pool has formed `group`, or None. `prefix` is new: what a group leaves in a store confuses the next."""
        self._pools, self._prefix, self._count = group, prefix, 0
        time.sleep(LETTING_GO if self._kept else 0)
        self._kept.clear()

    @contextmanager
    def offered(self) -> Generator[None]:
        """While the block runs, `init_process_group` in a body asks here."""
        replace_init(self._dist)
        _offered.append(self)
        try:
            yield
        finally:
            _offered.remove(self)

    def form(self, init: Callable[..., None], asked: dict[str, Any]) -> None:
        """What the body asks for: the pool's group, another one over the pool's ranks, or one that is all its own."""
        found, asked = self._dist.group.WORLD, possible(asked, self._info)
        if found is not None and found is not self._pools:
            init(**asked)  # which says that there is one already
        elif not self._means_the_pool(asked):
            end_group(self._dist, failed=False)
            init(**asked)
        elif found is None or not self._is_enough(asked):
            end_group(self._dist, failed=False)
            self._form(init, asked)
        self._kept.append(self._dist.group.WORLD)

    def _form(self, init: Callable[..., None], asked: dict[str, Any]) -> None:
        limit: timedelta = asked.get("timeout") or timedelta(seconds=self._timeout)
        self._count += 1
        prefix = f"{self._prefix}/{self._count}"
        await_ranks(self._store, prefix, self._info, limit.total_seconds(), "form a torch group")
        other = {name: value for name, value in asked.items() if name not in _PLACE}
        store = self._dist.PrefixStore(prefix, self._store)
        init(**other, store=store, rank=self._info.rank, world_size=self._info.world_size, timeout=limit)

    def _means_the_pool(self, asked: dict[str, Any]) -> bool:
        if asked.get("store") is not None or asked.get("init_method") not in (None, "env://"):
            return False
        places = [("world_size", "WORLD_SIZE", self._info.world_size), ("rank", "RANK", self._info.rank)]
        given = all(asked.get(argument, -1) in (-1, own) for argument, _, own in places)
        return given and all(os.environ.get(variable, str(own)) == str(own) for _, variable, own in places)

    def _is_enough(self, asked: dict[str, Any]) -> bool:
        """Whether the pool's group is as the body asks for."""
        backend = str(asked.get("backend") or self._dist.get_backend()).lower()
        limit = asked.get("timeout") or timedelta(seconds=self._timeout)
        usual = backend == self._dist.get_backend() and limit == timedelta(seconds=self._timeout)
        return usual and asked.get("pg_options") is None and asked.get("device_id") is None


def replace_init(dist: Any) -> None:
    """Has `init_process_group` in this process ask what is offered. Bodies must be unpickled after that."""
    real = dist.init_process_group
    if hasattr(real, _MARK):
        return
    signature = inspect.signature(real)

    @functools.wraps(real)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not _offered or current_call() is None:
            return real(*args, **kwargs)
        return _offered[-1].form(real, signature.bind(*args, **kwargs).arguments)

    setattr(init_process_group, _MARK, True)
    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group


class ReplacesInit:
    """Calls `replace_init` where it is unpickled, on a node: `init_process_group` may be a global of the body."""

    def __reduce__(self) -> Any:
        return _replaced, ()


def _replaced() -> ReplacesInit:
    if instance_info() is not None:
        try:
            replace_init(import_module("torch.distributed"))
        except ModuleNotFoundError:
            pass  # said when the call begins
    return ReplacesInit()


def await_ranks(store: Any, prefix: str, info: InstanceInfo, seconds: float, purpose: str) -> None:
    """Waits for all ranks to `purpose`, in short steps: torch itself cannot be stopped while it waits."""
    keys = [f"{prefix}/here/{rank}" for rank in range(info.world_size)]
    own = keys[info.rank]
    store.set(own, "1")
    began, told = time.monotonic(), False
    try:
        while not store.check(keys):
            waited = time.monotonic() - began
            if waited > seconds:
                raise SkywardError(
                    f"rank {info.rank} waited timeout={seconds:g} s for the others to {purpose}. {_ADVICE}"
                )
            if waited > (_NOTICE if current_broadcast() else _NOTICE_ALONE) and not told:
                told = True
                log.warning("rank %d waits for the others to %s. %s", info.rank, purpose, _ADVICE)
            time.sleep(_STEP)
    except BaseException:
        store.delete_key(own)
        raise


def end_group(dist: Any, *, failed: bool) -> None:
    """Ends the process's group, if there is one."""
    if not dist.is_initialized():
        return
    if failed and dist.get_backend() == "nccl" and hasattr(dist.group.WORLD, "abort"):
        dist.group.WORLD.abort()  # ending it in order would wait for collectives that others never enter
    # Gloo's threads may need Python's lock to let go of the last gradients. Destroying the group waits for these
    # threads while it holds the lock, so give it to them first.
    time.sleep(LETTING_GO)
    dist.destroy_process_group()


_ADVICE = (
    "A group needs the call on every rank: send it with `call() @ pool`; `>>` sends it to one. If it was, look what "
    "keeps the others from coming to the same line."
)
_MARK = "__skyward_offers__"
_PLACE = {"init_method", "store", "rank", "world_size", "timeout"}
_offered: list[OwnGroups] = []
