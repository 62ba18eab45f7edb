"""PyTorch: wheels that fit the accelerator, and a process group over all ranks."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, get_args, overload

from skyward.api.image import check_number, check_one_of
from skyward.api.info import InstanceInfo, count_by, pool_info, stop_counting
from skyward.api.plugin import Plugin, makes_plugin
from skyward.api.usage_errors import corrects_call
from skyward.errors import InvalidArgument
from skyward.node.decorators import Enter, around_each_call, await_turn
from skyward.plugins import _accelerate
from skyward.plugins._ranks import framework, gpu_by_local_rank, show_node_gpus, unpickled_first, within
from skyward.plugins._torch_init import (
    LETTING_GO,
    Backend,
    OwnGroups,
    PoolGroup,
    ReplacesInit,
    agreed_backend,
    check_backend,
    end_group,
    entered,
    explain,
    new_store,
    on_own_gpu,
    use_own_gpu,
)

__all__ = ["Backend", "decorated", "torch"]

P = ParamSpec("P")
R = TypeVar("R")

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@makes_plugin("torch", {"torchvision": '`vision="latest"`', "torchaudio": '`audio="latest"`'})
def torch(
    backend: Backend | None = None,
    cuda: str = "cu128",
    version: str = "latest",
    vision: str | None = None,
    audio: str | None = None,
    timeout: float = 600,
) -> Plugin:
    """PyTorch on every node; with several ranks, or `processes_per_node`, also a process group that all calls share.

    Args:
        backend: of the group: "nccl" or "gloo". Default: NCCL where each rank has a GPU, else gloo.
        cuda: which wheels nodes with NVIDIA GPUs get. Default: "cu128".
        version: of torch, such as "2.13.0". Default: "latest".
        vision: the version of torchvision, or "latest". Default: not installed.
        audio: the version of torchaudio, or "latest". Default: not installed.
        timeout: seconds that ranks wait for each other, when the group is formed and in its collectives. Default: 600.
    """
    from skyward.plugins._torch_wheels import PACKAGES, requirement, with_wheels  # for weight

    _check_group(backend, timeout)
    if not isinstance(cuda, str) or not re.fullmatch(r"cu\d{2,3}", cuda):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise InvalidArgument(
            f'cuda={cuda!r} is not the name of a wheel index; it is "cu" and the version of CUDA without its point. '
            'Write cuda="cu128" for CUDA 12.8.'
        )
    versions = zip(PACKAGES, (version, vision, audio), strict=True)
    pip = tuple(requirement(name, value) for name, value in versions if value is not None or name == "torch")
    return Plugin(
        "torch",
        transform=functools.partial(with_wheels, pip=pip, cuda=cuda),
        around_app=functools.partial(_around_app, backend=backend, timeout=timeout),
    )


@overload
def decorated(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def decorated(
    *, backend: Backend | None = None, timeout: float = 600, init: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@corrects_call("sky.integrations.torch")
def decorated(
    fn: Callable[..., Any] | None = None, /, *, backend: Backend | None = None, timeout: float = 600, init: bool = True
) -> Callable[..., Any]:
    """Forms a process group over all ranks before the body `fn`, and ends it after: `@sky.integrations.torch`.

    Args:
        backend: "nccl" or "gloo". Default: NCCL where each rank has a GPU, else gloo.
        timeout: seconds that ranks wait for each other. Default: 600.
        init: False leaves forming the group to the body, as torchrun does. Default: True.
    """
    _check_group(backend, timeout)
    enter = functools.partial(_around_call, backend=backend, timeout=timeout, init=init)
    return functools.partial(_decorated, enter=enter) if fn is None else _decorated(fn, enter)


@contextmanager
def process_group(info: InstanceInfo, backend: Backend | None = None, timeout: float = 600) -> Generator[None]:
    dist = framework("torch.distributed", "torch")
    check_backend(backend, info)
    store = new_store(dist, info, timeout)
    chosen = agreed_backend(backend, info, store)
    limit = timedelta(seconds=timeout)
    own = OwnGroups(dist, info, store, timeout)
    count_by(None)
    with _variables(info), _ending(dist):
        dist.init_process_group(chosen, store=store, rank=info.rank, world_size=info.world_size, timeout=limit)
        own.begin(dist.group.WORLD, "skyward/own")
        count_by(functools.partial(entered, dist))
        try:
            with own.offered():
                yield
        finally:
            stop_counting()


def _decorated(fn: Callable[P, R], enter: Enter) -> Callable[P, R]:
    return unpickled_first(within(fn, enter, "torch"), "__skyward_torch__", ReplacesInit())


def _check_group(backend: object, timeout: object) -> None:
    if backend is not None:
        check_one_of("backend", backend, get_args(Backend))
    check_number("timeout", timeout, whole=False)


@contextmanager
def _around_app(info: InstanceInfo, *, backend: Backend | None, timeout: float) -> Generator[None]:
    """For a single rank only if the user set `processes_per_node`, as torchrun does."""
    if info.world_size < 2 and not info.processes_given:
        yield
        return
    show_node_gpus(info)
    dist = framework("torch.distributed", "torch")
    check_backend(backend, info)
    use_own_gpu(info)
    limit = timedelta(seconds=timeout)
    with _variables(info), _ending(dist):
        store = new_store(dist, info, timeout, info.ports["torch"])
        chosen = agreed_backend(backend, info, store)
        dist.init_process_group(chosen, store=store, rank=info.rank, world_size=info.world_size, timeout=limit)
        group = PoolGroup(dist, info, chosen, timeout)
        around_each_call(group.around_call)
        around_each_call(functools.partial(_accelerate.around_call, info))
        if gpu_by_local_rank(info):
            around_each_call(functools.partial(on_own_gpu, info))
        with group.offered():
            yield


@contextmanager
def _around_call(*, backend: Backend | None, timeout: float, init: bool) -> Generator[None]:
    info = pool_info()
    if info is None:
        yield
        return
    await_turn()
    show_node_gpus(info)
    dist = framework("torch.distributed", "torch")
    use_own_gpu(info)
    form = (
        functools.partial(process_group, info, backend, timeout)
        if init
        else functools.partial(_launched, info, timeout)
    )
    with _shared(dist, form), _accelerate.around_call(info):
        try:
            yield
        except Exception as exc:  # the user's, or torch's; it goes on its way with a note
            if isinstance(exc, RuntimeError) and info.world_size > 1:
                explain(exc, info, timeout, "@sky.integrations.torch")
            raise


_lock = threading.Lock()
_users = 0
_group: AbstractContextManager[object] | None = None


@contextmanager
def _shared(dist: Any, form: Callable[[], AbstractContextManager[object]]) -> Generator[None]:
    global _users, _group
    with _lock:
        ours = _users > 0 or not dist.is_initialized()
        if ours and not _users:
            group = form()
            group.__enter__()
            _group = group
        _users += ours
    try:
        yield
    finally:
        with _lock:
            _users -= ours
            if ours and not _users and _group is not None:
                group, _group = _group, None
                group.__exit__(*sys.exc_info())


@contextmanager
def _launched(info: InstanceInfo, timeout: float) -> Generator[None]:
    dist = framework("torch.distributed", "torch")
    store = new_store(dist, info, timeout)  # held until the call ends: in one process, torch shares what listens
    with (
        _variables(info, getattr(store, "port", None)),
        _kept(dist),
        _ending(dist),
        OwnGroups(dist, info, store, timeout).offered(),
    ):
        yield


@contextmanager
def _variables(info: InstanceInfo, port: int | None = None) -> Generator[None]:
    torch = framework("torch", "torch")
    values = {
        "MASTER_ADDR": info.head_addr,
        "MASTER_PORT": str(port or info.ports["torch"]),
        "WORLD_SIZE": str(info.world_size),
        "RANK": str(info.rank),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "NODE_RANK": str(info.node),
        "GROUP_RANK": str(info.node),
        "GROUP_WORLD_SIZE": str(info.total_nodes),
        "ROLE_RANK": str(info.rank),
        "ROLE_WORLD_SIZE": str(info.world_size),
        "ROLE_NAME": "default",
    }
    if info.network.interface:
        values |= {name: info.network.interface for name in _INTERFACES if name not in os.environ}
    # A rank that ends its group while another still connects fails that one, so forming ends with a barrier.
    defaults = {"TORCH_DIST_INIT_BARRIER": "1"} | _accelerate.variables(torch, info)
    values |= {name: value for name, value in defaults.items() if name not in os.environ}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _kept(dist: Any) -> Generator[None]:
    """Keeps a reference to the body's group: dropping it too early can hang, see below."""
    groups: list[Any] = []
    done = threading.Event()

    def watch() -> None:
        while not groups and not done.wait(0.005):
            groups.extend([dist.group.WORLD] if dist.is_initialized() else [])

    watcher = threading.Thread(target=watch, name="skyward-torch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        time.sleep(LETTING_GO)
        groups.clear()


@contextmanager
def _ending(dist: Any) -> Generator[None]:
    failed = True
    try:
        yield
        failed = False
    finally:
        end_group(dist, failed=failed)
