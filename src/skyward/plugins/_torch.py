"""PyTorch: wheels that fit the accelerator, and a process group over all ranks."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, ParamSpec, TypeVar, get_args, overload

from skyward.api.image import check_number, check_one_of
from skyward.api.info import InstanceInfo, count_by, current_broadcast, current_call, pool_info, stop_counting
from skyward.api.plugin import Plugin, makes_plugin
from skyward.api.usage_errors import corrects_call
from skyward.errors import InvalidArgument, SkywardError
from skyward.node.decorators import Enter, around_each_call, await_turn
from skyward.plugins import _accelerate
from skyward.plugins._ranks import (
    Rendezvous,
    called,
    explain_lost_peer,
    framework,
    gpu_by_local_rank,
    on_one_machine,
    say,
    show_node_gpus,
    this_rank,
    unpickled_first,
    within,
)
from skyward.transport.blobs import SCRATCH

__all__ = ["Backend", "decorated", "torch"]

P = ParamSpec("P")
R = TypeVar("R")
Backend = Literal["nccl", "gloo"]

log = logging.getLogger("skyward")

_LETTING_GO = 0.01  # seconds in which gloo's threads let go of a group
_STEP = 0.02
_NOTICE = 10.0
_NOTICE_ALONE = 0.5
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
        time.sleep(_LETTING_GO)
        groups.clear()


@contextmanager
def _ending(dist: Any) -> Generator[None]:
    failed = True
    try:
        yield
        failed = False
    finally:
        end_group(dist, failed=failed)


# Programs that form their own torch group: in a body, `init_process_group` uses the ranks of the pool.


class OwnGroups:
    def __init__(self, dist: Any, info: InstanceInfo, store: Any, timeout: float) -> None:
        self._dist, self._info, self._store, self._timeout = dist, info, store, timeout
        self._prefix, self._count = "skyward/own", 0
        self._pools: Any = None
        self._kept: list[Any] = []  # a group that is let go of too early can hang, see `end_group`

    def begin(self, group: Any, prefix: str) -> None:
        """`prefix` must be new: leftovers in a store confuse the next group."""
        self._pools, self._prefix, self._count = group, prefix, 0
        time.sleep(_LETTING_GO if self._kept else 0)
        self._kept.clear()

    @contextmanager
    def offered(self) -> Generator[None]:
        replace_init(self._dist)
        _offered.append(self)
        try:
            yield
        finally:
            _offered.remove(self)

    def form(self, init: Callable[..., None], asked: dict[str, Any]) -> None:
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
        backend = str(asked.get("backend") or self._dist.get_backend()).lower()
        limit = asked.get("timeout") or timedelta(seconds=self._timeout)
        usual = backend == self._dist.get_backend() and limit == timedelta(seconds=self._timeout)
        return usual and asked.get("pg_options") is None and asked.get("device_id") is None


def replace_init(dist: Any) -> None:
    """Bodies must be unpickled after that."""
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
    """Calls `replace_init` when unpickled on a node."""

    def __reduce__(self) -> Any:
        return _replaced, ()


def _replaced() -> ReplacesInit:
    if pool_info() is not None:
        try:
            replace_init(import_module("torch.distributed"))
        except ModuleNotFoundError:
            pass  # said when the call begins
    return ReplacesInit()


def await_ranks(store: Any, prefix: str, info: InstanceInfo, seconds: float, purpose: str) -> None:
    """In short steps: torch itself cannot be interrupted."""
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
    if not dist.is_initialized():
        return
    if failed and dist.get_backend() == "nccl" and hasattr(dist.group.WORLD, "abort"):
        dist.group.WORLD.abort()  # ending it in order would wait for collectives that others never enter
    # Gloo's threads may need Python's lock to let go of the last gradients. Destroying the group waits for these
    # threads while it holds the lock, so give it to them first.
    time.sleep(_LETTING_GO)
    dist.destroy_process_group()


_ADVICE = (
    "A group needs the call on every rank: send it with `call() @ pool`; `>>` sends it to one. If it was, find out "
    "what keeps the others from reaching the same line."
)
_MARK = "__skyward_offers__"
_PLACE = {"init_method", "store", "rank", "world_size", "timeout"}
_offered: list[OwnGroups] = []


# Where the ranks of a torch group leave their addresses for each other: a private file, or a port of node 0.
#
# On one machine it is a file in the pool's directory, which no other user can open. Between machines it is torch's
# own store, which has no way to know who connects: it listens at the address by which nodes reach each other, and
# not, as it would by itself, at all of them.


def new_store(dist: Any, info: InstanceInfo, timeout: float, port: int = 0) -> Any:
    """Shared by all ranks; a used one has leftovers. `port` is for torch's own store; 0 picks a free one."""
    rendezvous = Rendezvous("the torch group", info, info.ports["torch"], timeout, "timeout")
    limit = timedelta(seconds=timeout)
    if on_one_machine(info):
        return _file_store(dist, info, rendezvous, limit)
    if info.rank > 0:
        return dist.TCPStore(info.head_addr, rendezvous.meet(), timeout=limit)
    family = socket.AF_INET6 if ":" in info.head_addr else socket.AF_INET
    try:
        listener = socket.create_server((info.head_addr, port), family=family, backlog=1024)
    except OSError as exc:
        raise rendezvous.port_taken(str(exc.strerror)) from exc
    port = listener.getsockname()[1]
    options = {"is_master": True, "wait_for_workers": False, "multi_tenant": True, "timeout": limit}
    store = dist.TCPStore(info.head_addr, port, master_listen_fd=listener.detach(), **options)
    rendezvous.meet(port)
    return store


def _file_store(dist: Any, info: InstanceInfo, rendezvous: Rendezvous, limit: timedelta) -> Any:
    path = None
    if info.rank == 0:
        fd, path = tempfile.mkstemp(prefix="torch-", dir=os.environ.get(SCRATCH))  # the last one to leave removes it
        os.close(fd)
    store = dist.FileStore(rendezvous.meet(path), info.world_size)
    store.set_timeout(limit)
    return store


_GLOO = "{why}: the torch group uses gloo, since NCCL needs a GPU for each rank."
_TRAINER = " accelerate and the Trainer use the CPU."


def _gloo(info: InstanceInfo) -> str:
    return _GLOO.format(why=info.gpu_conflict) + (_TRAINER if find_spec("accelerate") else "")


def check_backend(backend: Backend | None, info: InstanceInfo) -> None:
    if backend == "nccl" and not _finds_cuda():
        torch = framework("torch", "torch")
        raise InvalidArgument(
            f'backend="nccl" cannot work on {this_rank(info)}: PyTorch {torch.__version__} finds no CUDA device there. '
            'Write backend="gloo" for CPUs, or leave backend out to have it chosen by what the node has.'
        )


def agreed_backend(backend: Backend | None, info: InstanceInfo, store: Any) -> Backend:
    if backend is not None:
        return backend
    if info.gpu_conflict is not None:
        say(info, _gloo(info))
        return "gloo"
    if not info.node_gpus:
        return "gloo"  # none of the others has one either, or there would be a conflict
    return _voted_backend(info, store, _finds_cuda())


def possible(asked: dict[str, Any], info: InstanceInfo) -> dict[str, Any]:
    if info.gpu_conflict is None or "nccl" not in (asked.get("backend") or "nccl").lower():
        return asked
    say(info, _gloo(info))
    return {**asked, "backend": "gloo", "device_id": None}


def use_own_gpu(info: InstanceInfo) -> None:
    own = gpu_by_local_rank(info)
    if own and _finds_cuda():  # number 0 is what torch takes anyway
        framework("torch", "torch").cuda.set_device(own)


@contextmanager
def on_own_gpu(info: InstanceInfo) -> Generator[None]:
    """torch stores the current GPU per thread."""
    use_own_gpu(info)
    yield


def _finds_cuda() -> bool:
    return framework("torch", "torch").cuda.is_available()


def _voted_backend(info: InstanceInfo, store: Any, found: bool) -> Backend:
    """NCCL only if torch finds a GPU on every rank."""
    votes = [f"skyward/cuda/{rank}" for rank in range(info.world_size)]
    store.set(votes[info.rank], "1" if found else "0")
    without = [rank for rank, vote in enumerate(store.multi_get(votes)) if vote == b"0"]
    if without and len(without) < info.world_size:
        say(info, f"torch finds no GPU on {called(info, without)}: the torch group uses gloo.")
    return "gloo" if without else "nccl"


# The plugin's torch group between calls: formed again on all nodes once it is broken, and its errors explained.
#
# A rank whose collective failed, whose body raised, or whose body destroyed the group, says so in the group's store.
# All ranks look there before a broadcast begins, so all of them form the group again, or none does.


_PEER_GONE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|socket (closed|error)", re.I
)


class PoolGroup:
    def __init__(self, dist: Any, info: InstanceInfo, backend: str, timeout: float) -> None:
        self._dist, self._info, self._backend, self._timeout = dist, info, backend, timeout
        self._store = dist.distributed_c10d._get_default_store()  # held here, it outlives the group
        self._group = dist.group.WORLD
        self._generation = 0
        self._own = OwnGroups(dist, info, self._store, timeout)
        self._own.begin(self._group, self._key("own"))
        self.offered = self._own.offered
        self._users = 0
        self._changed = threading.Condition()
        count_by(functools.partial(entered, dist))

    @contextmanager
    def around_call(self) -> Generator[None]:
        await_turn()
        broadcast = current_broadcast() is not None
        with self._changed:
            if broadcast and self._is_broken():
                self._changed.wait_for(lambda: not self._users)
                if self._is_broken():
                    self._form_again()
            self._users += 1
        broken = broadcast  # whatever leaves a broadcast early leaves its collectives out of step
        try:
            yield
            broken = False
        except Exception as exc:  # the user's, or torch's; it goes on its way with a note
            if isinstance(exc, RuntimeError):
                broken = explain(exc, self._info, self._timeout, "sky.plugins.torch") or broken
            raise
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()
                if broken or self._dist.group.WORLD is not self._group:
                    self._store.add(self._key("broken"), 1)

    def _is_broken(self) -> bool:
        return self._store.check([self._key("broken")])

    def _form_again(self) -> None:
        end_group(self._dist, failed=True)  # first: a rank that still waits in it is let go
        await_ranks(self._store, self._key("again"), self._info, self._timeout, "form the torch group again")
        store = self._dist.PrefixStore(self._key("group"), self._store)
        limit, size = timedelta(seconds=self._timeout), self._info.world_size
        self._dist.init_process_group(self._backend, store=store, rank=self._info.rank, world_size=size, timeout=limit)
        self._group = self._dist.group.WORLD
        self._generation += 1
        self._own.begin(self._group, self._key("own"))

    def _key(self, name: str) -> str:
        return f"skyward/{self._generation}/{name}"


def entered(dist: Any) -> int:
    return dist.group.WORLD._get_sequence_number_for_group()


def explain(exc: RuntimeError, info: InstanceInfo, timeout: float, option: str) -> bool:
    """False if it is no error of a collective."""
    if _PEER_GONE.search(str(exc)):
        explain_lost_peer(exc, info, "its torch group")
        return True
    if "duplicate gpu" in str(exc).lower():
        exc.add_note(
            f"NCCL needs a GPU for each rank, but {info.gpu_conflict or 'two ranks use the same one'}. Leave "
            'backend="nccl" out, or write backend="gloo": then ranks can share a GPU.'
        )
        return True
    if "timed out" in str(exc).lower():
        exc.add_note(
            f"The torch group's limit is timeout={timeout:g} s: a node did not enter this collective in that time. "
            "All nodes must enter the same collectives in the same order, and make equally many steps; if one is only "
            f"slow, raise {option}(timeout=...)."
        )
        return True
    return False
