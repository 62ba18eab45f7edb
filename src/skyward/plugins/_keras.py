"""Keras 3: sets its backend before anything imports it; on JAX all nodes train one model.

The distribution applies to broadcasts: a call on one node trains alone.
"""

from __future__ import annotations

import inspect
import json
import operator
import os
import secrets
import sys
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Literal, ParamSpec, TypeVar, get_args, overload

from skyward.api.image import Image, check_one_of
from skyward.api.info import InstanceInfo, current_broadcast, pool_info
from skyward.api.plugin import Cluster, Plugin, makes_plugin
from skyward.api.usage_errors import corrects_call
from skyward.errors import InvalidArgument, SkywardError
from skyward.node.decorators import await_turn
from skyward.plugins import _jax, _torch
from skyward.plugins._ranks import framework, unpickled_first, within

__all__ = ["Backend", "decorated", "keras"]

P = ParamSpec("P")
R = TypeVar("R")
Backend = Literal["jax", "torch", "tensorflow"]

VARIABLE = "KERAS_BACKEND"


@makes_plugin("keras")
def keras(backend: Backend = "jax", seed: int | None = None) -> Plugin:
    """Keras on every node.

    Args:
        backend: "jax", "torch" or "tensorflow". Default: "jax".
        seed: random seed of every call. Default: None, different numbers each time.
    """
    seed = _checked_seed(backend, seed)
    return Plugin(
        "keras",
        transform=partial(install, backend=backend),
        around_app=partial(configured, backend=backend, seed=seed),
        decorate=partial(within, enter=partial(_around_body, seed), name="keras"),
    )


@overload
def decorated(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def decorated(*, backend: Backend = "jax", seed: int | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@corrects_call("sky.integrations.keras")
def decorated(
    fn: Callable[..., Any] | None = None, /, *, backend: Backend = "jax", seed: int | None = None
) -> Callable[..., Any]:
    """Sets the Keras backend for the body `fn` and forms the nodes' group: `@sky.integrations.keras`.

    Args:
        backend: "jax", "torch" or "tensorflow". Default: "jax".
        seed: random seed of every call. Default: None, different numbers each time.
    """
    seed = _checked_seed(backend, seed)
    return partial(_decorated, backend=backend, seed=seed) if fn is None else _decorated(fn, backend, seed)


def install(image: Image, cluster: Cluster, *, backend: Backend) -> Image:
    chosen = image.env.get(VARIABLE, backend)
    if chosen != backend:
        raise InvalidArgument(
            f"{VARIABLE} is {chosen!r} in the image already, but this plugin asks for {backend!r}; a process has one "
            "backend. Leave one of the two out, or open a pool for each."
        )
    image = image.adding(pip=["keras"], env={VARIABLE: backend})
    if backend == "torch":
        with_wheels = _torch.torch().transform
        return image if with_wheels is None else with_wheels(image, cluster)
    if any(_jax.has_package(image, name) for name in (backend, f"{backend}-cpu")):
        return image
    accelerator = cluster.spec.accelerator
    if backend == "jax":
        return image.adding(pip=[_jax.requirement(accelerator)])
    cuda = accelerator is not None and accelerator.supports_cuda
    return image.adding(pip=["tensorflow[and-cuda]" if cuda else "tensorflow"])


@contextmanager
def configured(info: InstanceInfo, *, backend: Backend, seed: int | None) -> Generator[None]:
    claim(backend)
    if backend != "jax" or info.world_size < 2:
        yield
        return
    with _jax.distributed(info):  # nothing more where the JAX plugin has been: without a group each would train apart
        _distribute(seed)
        yield


def claim(backend: Backend) -> None:
    used = _used()
    if used not in (None, backend):
        raise InvalidArgument(
            f"this process uses Keras on {used!r} already, and cannot change to {backend!r}: Keras reads {VARIABLE} "
            "once, when it is imported. Open a pool for each backend, or ask for the same one everywhere."
        )
    _state.backend = backend
    os.environ[VARIABLE] = backend
    _share_cores(backend)


def tf_config(info: InstanceInfo) -> str:
    first = info.ports.get("tensorflow", info.head_port)
    hosts = [info.peers[info.node_of(rank)].private_ip for rank in range(info.world_size)]
    # Every worker has a server: those that share a machine need a port each.
    ports = [first + hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    addresses = [
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)
    ]
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": info.rank}})


@dataclass
class _State:
    backend: Backend | None = None
    distribution: Any = None
    seed: int | None = None


_state = _State()


def _checked_seed(backend: object, seed: Any) -> int | None:
    check_one_of("backend", backend, get_args(Backend))
    if seed is None:
        return None
    whole = operator.index(seed) if hasattr(seed, "__index__") and not isinstance(seed, bool) else -1
    if not 0 <= whole < 2**32:
        raise InvalidArgument(f"seed={seed!r} cannot be used; a seed is a whole number from 0 to 4294967295.")
    return whole


def _decorated(fn: Callable[P, R], backend: Backend, seed: int | None) -> Callable[P, R]:
    body = within(fn, partial(_around_body, seed), "keras")
    if backend == "torch":
        body = _torch.decorated(body)
    body = within(body, partial(_around_call, backend, seed), "keras")
    return unpickled_first(body, "__skyward_keras__", _Claim(backend))


class _Claim:
    """Unpickled on a node before the body, of which keras may be a global."""

    def __init__(self, backend: Backend) -> None:
        self.backend: Backend = backend

    def __reduce__(self) -> Any:
        return _claimed, (self.backend,)


def _claimed(backend: Backend) -> _Claim:
    if pool_info() is not None and _used() is None:
        claim(backend)
    return _Claim(backend)


@contextmanager
def _around_call(backend: Backend, seed: int | None) -> Generator[None]:
    await_turn()
    info = pool_info()
    if info is not None:
        claim(backend)
        if info.world_size > 1 and backend == "jax" and _state.distribution is None:
            _jax.ensure_group(info)
            _distribute(seed)
        if info.world_size > 1 and backend == "tensorflow":
            os.environ.setdefault("TF_CONFIG", tf_config(info))
    yield


@contextmanager
def _around_body(seed: int | None) -> Generator[None]:
    """Applied per call: Keras keeps its distribution and seed per thread."""
    if pool_info() is not None and (seed is not None or _state.distribution is not None):
        keras = framework("keras", "keras")
        if _state.distribution is not None:
            broadcast = current_broadcast()
            keras.distribution.set_distribution(_state.distribution if broadcast else None)
            if seed is None and broadcast:  # what earlier calls to this node alone have drawn must not matter
                seed = zlib.crc32(f"{_state.seed} {broadcast}".encode())
        if seed is not None:
            _seed_all(keras, seed)
    yield


def _distribute(seed: int | None) -> None:
    keras = framework("keras", "keras")
    devices = keras.distribution.list_devices()
    if not devices:
        return
    if "auto_shard_dataset" not in inspect.signature(keras.distribution.DataParallel).parameters:
        raise SkywardError(
            f"Keras {keras.__version__} has no DataParallel(auto_shard_dataset=...), which tells it that nodes "
            'bring their own data. Ask for a version that has it, e.g. image=sky.Image(pip=["keras>=3.9"]).'
        )
    _state.distribution = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)
    keras.distribution.set_distribution(_state.distribution)
    _state.seed = _agreed_seed() if seed is None else seed
    _seed_all(keras, _state.seed)
    framework("keras.src.backend.jax.distribution_lib", "keras").initialize_rng()


def _seed_all(keras: Any, seed: int) -> None:
    """Like `keras.utils.set_random_seed`, without importing TensorFlow."""
    plain: Any = keras.utils.set_random_seed
    if "tensorflow" not in sys.modules:
        _late_seed.seed = seed
        if _late_seed not in sys.meta_path:
            sys.meta_path.insert(0, _late_seed)
        without = plain.__globals__ | {"tf": SimpleNamespace(available=False)}
        plain = FunctionType(plain.__code__, without, closure=plain.__closure__)
    plain(seed)


class _LateSeed:
    """For bodies that import TensorFlow later, e.g. for `tf.data`."""

    seed = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "tensorflow" else None
        loader: Any = spec and spec.loader
        if loader is not None:
            loader.exec_module = partial(self._exec, loader.exec_module)
        return spec

    def _exec(self, plain: Callable[[ModuleType], None], module: Any) -> None:
        plain(module)
        module.random.set_seed(self.seed)


_late_seed = _LateSeed()


def _agreed_seed() -> int:
    import numpy

    own = numpy.uint32(secrets.randbits(32))
    return int(framework("jax.experimental.multihost_utils", "keras").broadcast_one_to_all(own))


def _used() -> str | None:
    loaded = sys.modules.get("keras")
    config = getattr(loaded, "config", None)
    return _state.backend if config is None else config.backend()


def _share_cores(backend: Backend) -> None:
    if backend == "jax":
        _jax.share_cores()
    if backend == "tensorflow" and (share := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", share)
        os.environ.setdefault("TF_NUM_INTEROP_THREADS", share)
