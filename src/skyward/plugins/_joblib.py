"""joblib on a pool, without importing joblib: building a pool stays light.

Parallel(n_jobs=-1)(...)  ->  batches of calls  ->  pool.submit  ->  `_Runs` on a node  ->  results, in order
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import io
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar, cast

import cloudpickle

from skyward.api.compute import PendingCompute, resolve
from skyward.api.image import Image, check_number
from skyward.api.plugin import Cluster, Plugin, makes_plugin
from skyward.errors import InvalidArgument, PoolClosed
from skyward.transport import blobs
from skyward.transport.payload import Pickler

__all__ = [
    "Lacking",
    "Slots",
    "Tasks",
    "install",
    "joblib",
    "joblib_backend",
    "open_pool",
    "packages_with",
    "pinned",
    "sklearn",
]

__all__ += ["register", "runs"]

T = TypeVar("T", bound="Slots")

_COMPANIONS = ("numpy", "scipy")
Item = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Slots(Protocol):
    @property
    def slots(self) -> int: ...
    @property
    def is_active(self) -> bool: ...
    def submit(self, call: PendingCompute[Any], /) -> Any: ...
    def _send(self, calls: Sequence[PendingCompute[Any]], /) -> list[Any]: ...
    def _add_packages(self, pip: Sequence[str], /) -> Sequence[str]: ...
    def _follow_group(self, name: str, total: int | None) -> Any: ...


@makes_plugin("joblib")
def joblib(version: str | None = None, *, max_inflight: int | None = None, progress: bool = True) -> Plugin:
    """joblib on the nodes; its `Parallel` runs there while the pool is open.

    Args:
        version: a number or a constraint such as ">=1.4". Default: this computer's version.
        max_inflight: the most batches that are on the nodes at once. Default: as many as keep them busy.
        progress: whether to show tasks done, tasks per second and the time left. Default: yes.
    """
    check_options("joblib", version, max_inflight)
    return Plugin(
        "joblib",
        transform=partial(install, {"joblib": version}),
        around_client=partial(_around, max_inflight, progress),
    )


@contextmanager
def joblib_backend(pool: T, *, max_inflight: int | None = None, progress: bool = True) -> Generator[T]:
    """Sends joblib's `Parallel` to a `pool` that is already open, and leaves it open.

    `max_inflight` and `progress` are those of `sky.plugins.joblib`.
    """
    if not hasattr(pool, "concurrency") or not hasattr(pool, "submit"):
        raise InvalidArgument(f"{pool!r} is not a pool. Give the sky.ComputePool whose with-block this is in.")
    if not pool.is_active:
        raise PoolClosed("the pool is not open; use this inside `with sky.ComputePool(...) as pool:`.")
    with _activated(pool, max_inflight, progress):
        yield pool


def install(packages: dict[str, str | None], image: Image, cluster: Cluster) -> Image:
    """Pins numpy and scipy to this computer's versions, since arrays travel, unless a `version` was requested."""
    if find_spec("joblib") is None:
        raise _no_joblib()  # before machines are launched
    named = {_project(entry) for entry in image.pip}
    chosen = {name: version for name, version in packages.items() if version is not None or name not in named}
    if not any(packages.values()):
        chosen |= {name: version for name in _COMPANIONS if name not in named and (version := _here(name))}
    return image.adding(pip=[pinned(name, version) for name, version in chosen.items()])


def pinned(name: str, version: str | None) -> str:
    if version is not None:
        from skyward.plugins._torch_wheels import requirement  # for weight

        return requirement(name, version)
    here = _here(name)
    # a version made from a checkout is on no index
    return f"{name}=={here}" if here and re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?", here) else name


def check_options(name: str, version: str | None, max_inflight: int | None) -> None:
    if version is not None:
        pinned(name, version)
    if max_inflight is not None:
        check_number("max_inflight", max_inflight)


def _here(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def packages_with(module: str) -> list[str]:
    found = importlib.metadata.packages_distributions().get(module.partition(".")[0], [])
    if len(set(found)) != 1:  # the user's own file, or a namespace that several share
        return []
    return [pinned(name, None) for name in dict.fromkeys([found[0], "joblib", *_COMPANIONS]) if _here(name)]


def register() -> None:
    _backend_module()


def open_pool() -> Slots:
    try:
        return cast("Slots", resolve(sys.modules["skyward"]))
    except PoolClosed:
        raise PoolClosed(
            'the joblib backend "skyward" has no pool to send calls to: none is open. Use it inside '
            '`with sky.ComputePool(...):`, or name one, parallel_config("skyward", pool=pool).'
        ) from None


@contextmanager
def _around(max_inflight: int | None, progress: bool, pool: Slots, cluster: Cluster) -> Generator[None]:
    with _activated(pool, max_inflight, progress):
        yield


@contextmanager
def _activated(pool: Slots, max_inflight: int | None, progress: bool) -> Generator[None]:
    module = _backend_module()
    backend = module.SkywardBackend(pool=pool, max_inflight=max_inflight, progress=progress)
    config = module.parallel_config(backend=backend)
    thread = threading.get_ident()
    try:
        with module.default_for_threads(backend):
            yield
    finally:
        # joblib keeps this by thread: a pool closed by another one must not change what holds there
        if threading.get_ident() == thread:
            config.unregister()


def _backend_module() -> Any:
    try:
        return importlib.import_module("skyward.plugins._joblib_backend")
    except ModuleNotFoundError as exc:
        if exc.name != "joblib":
            raise
        raise _no_joblib() from exc


def _no_joblib() -> ModuleNotFoundError:
    return ModuleNotFoundError(
        "joblib is not installed on this computer, where its calls come from. Install it: pip install joblib.",
        name="joblib",
    )


def _project(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else requirement


# What runs on the nodes


@functools.lru_cache(maxsize=256)
def runs(name: str) -> _Runs:
    return _Runs(name)


class _Runs:
    """Runs a batch; a nested Parallel runs sequentially."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def __reduce__(self) -> Any:
        return runs, (self.__qualname__,)

    def __call__(self, tasks: Tasks | Lacking) -> list[Any] | Lacking:
        if isinstance(tasks, Lacking):
            return tasks
        try:
            from joblib.parallel import BACKENDS, SequentialBackend, parallel_config
        except ModuleNotFoundError:  # then nothing in the batch can be nested either
            return [fn(*args, **kwargs) for fn, args, kwargs in tasks.items]
        BACKENDS.setdefault("skyward", SequentialBackend)  # a body that asks for it by name is on the pool already
        with parallel_config(backend=SequentialBackend(nesting_level=tasks.level), n_jobs=None):
            return [fn(*args, **kwargs) for fn, args, kwargs in tasks.items]


@dataclass(frozen=True)
class Lacking:
    module: str


class Tasks:
    """Arrays of at least `frozen` bytes arrive read-only, as joblib's memory maps do."""

    def __init__(
        self, items: list[Item], level: int = 1, frozen: int | None = None, paths: Sequence[str] | None = None
    ) -> None:
        self.items, self.level, self.frozen, self.paths = items, level, frozen, paths

    def __reduce__(self) -> Any:
        # An inner pickle has its buffers as arguments of the outer one: there each can be marked read-only.
        buffers: list[memoryview] = []
        out = io.BytesIO()
        cast("Any", _Pickler(out, partial(_kept, buffers))).dump(self.items)
        sent = [pickle.PickleBuffer(self._marked(b)) for b in buffers]
        return _tasks, (self.level, self.frozen, self.paths, out.getvalue(), *sent)

    def _marked(self, buffer: memoryview) -> memoryview:
        large = self.frozen is not None and buffer.nbytes >= max(self.frozen, blobs.LARGE)
        return buffer.toreadonly() if large else buffer


def _tasks(level: int, frozen: int | None, paths: Sequence[str] | None, head: bytes, *buffers: Any) -> Tasks | Lacking:
    for path in paths or ():
        if path not in sys.path and os.path.isdir(path):
            sys.path.append(path)  # last: what the node runs with wins
    try:
        return Tasks(pickle.loads(head, buffers=buffers), level, frozen)
    except ModuleNotFoundError as exc:
        if paths is None or not exc.name:
            raise
        return Lacking(exc.name)


def _kept(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    try:
        buffers.append(buffer.raw())
    except BufferError:
        return True  # not contiguous: pickled in band
    return False


class _Pickler(Pickler):
    """Pickles warning classes by name: scikit-learn sends the client's filters."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and issubclass(obj, Warning) and obj.__module__ not in ("builtins", "__main__"):
            module, name = obj.__module__, obj.__qualname__
            if module not in cloudpickle.list_registry_pickle_by_value() and _warning(module, name) is obj:
                return _warning, (module, name)
        return super().reducer_override(obj)


def _warning(module: str, name: str) -> type[Warning]:
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))  # type: ignore[return-value]
    except (ImportError, AttributeError):
        return type(name, (Warning,), {"__module__": __name__})


@makes_plugin("sklearn")
def sklearn(version: str | None = None, *, max_inflight: int | None = None, progress: bool = True) -> Plugin:
    """scikit-learn on the nodes; every `n_jobs` runs there while the pool is open.

    `version` is a number or a constraint such as ">=1.5"; by default this computer's version. `max_inflight` and
    `progress` are those of `sky.plugins.joblib`.
    """
    check_options("scikit-learn", version, max_inflight)
    packages = {"scikit-learn": version, "joblib": None}
    return replace(
        joblib(max_inflight=max_inflight, progress=progress), name="sklearn", transform=partial(install, packages)
    )
