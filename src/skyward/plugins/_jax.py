"""JAX over the ranks of a pool: packages, one distributed runtime, one mesh of all devices."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, ParamSpec, TypeVar, overload

from skyward.accelerators import Accelerator
from skyward.api.image import Image
from skyward.api.info import InstanceInfo, mark_group, pool_info
from skyward.api.plugin import Cluster, Plugin, makes_plugin
from skyward.api.usage_errors import corrects_call
from skyward.errors import InvalidArgument
from skyward.node.decorators import await_turn
from skyward.plugins._ranks import Rendezvous, explain_lost_peer, framework, gpu_positions, on_one_machine, say, within
from skyward.transport.blobs import SCRATCH

__all__ = [
    "avoid_shared_gpus",
    "close",
    "decorated",
    "ensure_group",
    "has_package",
    "jax",
    "requirement",
    "share_cores",
]

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("skyward.jax")

_MEETING_SECONDS = 600.0
_FORMING_SECONDS = 60
_CLOSING_SECONDS = 5
_PEER_GONE = re.compile(r"connection (closed|reset|refused)|broken pipe|socket closed|heartbeat|task .* died", re.I)
_LONGEST_PATH = 103  # of a socket file
_TAKES_FILES = (0, 10)  # of JAX: the first version with which it was tried
_lock = threading.Lock()


@makes_plugin("jax")
def jax(cuda: str = "cuda12") -> Plugin:
    """JAX on every node, and one distributed runtime over all of them if there are several.

    Args:
        cuda: for nodes with NVIDIA GPUs: "cuda12", "cuda13", or as torch writes it, "cu128". Default: "cuda12".
    """
    return Plugin(
        "jax",
        transform=partial(install, cuda=_cuda_extra(cuda)),
        around_app=distributed,
        decorate=partial(within, enter=_explained, name="jax"),
    )


@overload
def decorated(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def decorated() -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@corrects_call("sky.integrations.jax")
def decorated(fn: Callable[..., Any] | None = None, /) -> Callable[..., Any]:
    """Forms JAX's distributed runtime before the body `fn` starts, once per process."""
    return partial(within, enter=_around_call, name="jax") if fn is None else within(fn, _around_call, "jax")


def install(image: Image, cluster: Cluster, cuda: str = "cuda12") -> Image:
    return image.adding(pip=[requirement(cluster.spec.accelerator, cuda)])


@contextmanager
def distributed(info: InstanceInfo) -> Generator[None]:
    share_cores()
    if info.world_size < 2:
        yield
        return
    ensure_group(info)
    try:
        yield
    finally:
        close()


def ensure_group(info: InstanceInfo) -> None:
    jax = framework("jax", "jax")
    with _lock:
        if jax.distributed.is_initialized():
            return
        share_cores()
        avoid_shared_gpus(jax, info)
        if info.network.interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", info.network.interface)
        os.environ.update(variables(info))
        rendezvous = Rendezvous("JAX's group", info, _port(info), _MEETING_SECONDS)
        address = rendezvous.meet(_coordinator(jax, info) if info.rank == 0 else None)
        _initialize(jax, info, address)
        mark_group()
        atexit.register(close)


def close() -> None:
    jax = framework("jax", "jax")
    if not jax.distributed.is_initialized():
        return
    try:
        # JAX ends the process, with a page of text, when it shuts down and another node does not. So first see that
        # all are about to: this barrier can fail in words.
        client = import_module("jax._src.distributed").global_state.client
        client.wait_at_barrier("skyward-closing", _CLOSING_SECONDS * 1000)
    except Exception as error:  # a node is gone or busy: this process ends without a farewell, which JAX allows
        log.info("JAX's group was left without the others: %s", error)
        return
    jax.distributed.shutdown()


def variables(info: InstanceInfo) -> dict[str, str]:
    return {
        "JAX_COORDINATOR_ADDRESS": _port_of_head(info),
        "JAX_NUM_PROCESSES": str(info.world_size),
        "JAX_PROCESS_ID": str(info.rank),
        "JAX_LOCAL_DEVICE_COUNT": str(len(_device_ids(info)) or 1),
    }


def avoid_shared_gpus(jax: Any, info: InstanceInfo) -> None:
    if info.gpu_conflict is None or os.environ.get("JAX_PLATFORMS"):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")  # for a JAX that was imported before
    say(info, f"{info.gpu_conflict}: JAX uses the CPU, since its ranks need a GPU each.")


def requirement(accelerator: Accelerator | None, cuda: str = "cuda12") -> str:
    if accelerator is None:
        return "jax"
    if accelerator.supports_cuda:
        return f"jax[{cuda}]"
    return "jax[tpu]" if accelerator.name.startswith("TPU") else "jax"


def has_package(image: Image, name: str) -> bool:
    return any(re.match(rf"{re.escape(name)}(?![A-Za-z0-9._-])", entry.strip(), re.IGNORECASE) for entry in image.pip)


def share_cores() -> None:
    # XLA on CPUs has no flag for it: the size of its pool is the number of cores, or what NPROC says.
    share = os.environ.get("OMP_NUM_THREADS", "")
    if share.isdecimal():
        os.environ.setdefault("NPROC", share)


@contextmanager
def _around_call() -> Generator[None]:
    await_turn()
    info = pool_info()
    if info is not None:
        ensure_group(info)
    with _explained():
        yield


@contextmanager
def _explained() -> Generator[None]:
    await_turn()
    try:
        yield
    except Exception as error:
        info = pool_info()
        if info is not None and info.world_size > 1 and _PEER_GONE.search(str(error)):
            explain_lost_peer(error, info, "JAX's group")
        raise


def _bind_collectives(info: InstanceInfo) -> None:
    # JAX has no setting for it. By default gloo takes what the host's name stands for, and where that is the loopback,
    # as on Debian, nodes on different machines never meet.
    own = next((peer.private_ip for peer in info.peers if peer.node == info.node), None)
    library: Any = next(filter(None, map(sys.modules.get, ("jaxlib._jax", "jaxlib.xla_extension"))), None)
    make = getattr(library, "make_gloo_tcp_collectives", None)
    if own is not None and make is not None and not isinstance(make, partial):
        library.make_gloo_tcp_collectives = partial(make, hostname=own)


def _initialize(jax: Any, info: InstanceInfo, address: str) -> None:
    config = jax.config
    _bind_collectives(info)
    if getattr(config, "jax_cpu_collectives_implementation", "gloo") is None:
        config.update("jax_cpu_collectives_implementation", "gloo")  # older versions have none by default
    if getattr(config, "jax_enable_preemption_service", False):
        config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away, by which the pool stops a body
    options: dict[str, Any] = {
        "local_device_ids": _device_ids(info) or None,
        "cluster_detection_method": "deactivate",  # the pool says who is who, not a Slurm that happens to be around
        "coordinator_bind_address": address,  # by default it would listen on every interface
        "initialization_timeout": _FORMING_SECONDS,
        "shutdown_timeout_seconds": _CLOSING_SECONDS,
    }
    known = inspect.signature(jax.distributed.initialize).parameters
    options = {name: value for name, value in options.items() if name in known}
    try:
        jax.distributed.initialize(address, info.world_size, info.rank, **options)
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        if info.world_size == 1:
            return  # one process is a group as it is
        raise RuntimeError(
            "JAX was used in this process before it could join the other nodes: by an earlier call, or by a plugin "
            "listed before this one. Give the pool plugins=[sky.plugins.jax(), ...] with jax first, also before "
            "sky.plugins.keras(): then the nodes are joined before anything else.",
        ) from error


def _device_ids(info: InstanceInfo) -> list[int]:
    return [] if os.environ.get("JAX_PLATFORMS") == "cpu" else gpu_positions(info)


def _port(info: InstanceInfo) -> int:
    return info.ports.get("jax", info.head_port)


def _coordinator(jax: Any, info: InstanceInfo) -> str:
    directory = os.environ.get(SCRATCH)
    if directory and on_one_machine(info):
        path = os.path.join(directory, f"jax-{os.urandom(6).hex()}")
        if len(os.fsencode(path)) <= _LONGEST_PATH and jax.__version_info__ >= _TAKES_FILES:
            return f"unix:{path}"
    return _port_of_head(info)


def _port_of_head(info: InstanceInfo) -> str:
    host = f"[{info.head_addr}]" if ":" in info.head_addr else info.head_addr
    return f"{host}:{_port(info)}"


def _cuda_extra(cuda: str) -> str:
    found = re.fullmatch(r"(?:cu|cuda)(\d\d)\d*(-local)?", cuda) if isinstance(cuda, str) else None
    if found is None:
        raise InvalidArgument(
            f"cuda={cuda!r} is not a version of CUDA as JAX names it; its packages are made for a major version. "
            'Write cuda="cuda12" or cuda="cuda13".'
        )
    return f"cuda{found[1]}{found[2] or ''}"
