"""Where calls are sent: pools, and `sky` for the one opened last."""

from __future__ import annotations

import os
import threading
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple, cast

from skyward.api.brief import brief
from skyward.api.futures import AwaitableFuture, Stream
from skyward.errors import PoolClosed

if TYPE_CHECKING:
    from skyward.api.compute import PendingCompute, PendingComputeGroup, PendingStream

__all__ = ["Target", "enter_target", "innermost", "leave_target", "resolve", "sky"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Target(Protocol):
    """Where a call can be sent."""

    def run(self, call: PendingCompute[T], /) -> T: ...
    def submit(self, call: PendingCompute[T], /) -> AwaitableFuture[T]: ...
    def broadcast(self, call: PendingCompute[T], /) -> list[T]: ...
    def run_parallel(self, group: PendingComputeGroup[*Ts], /) -> tuple[*Ts]: ...
    def submit_parallel(self, group: PendingComputeGroup[*Ts], /) -> AwaitableFuture[tuple[*Ts]]: ...
    def stream_parallel(self, group: PendingStream[T], /) -> Stream[T]: ...


class Innermost:
    """Stands for the pool opened last: `call() >> sky` inside a with-block."""

    def __repr__(self) -> str:
        return "sky"

    def run(self, call: PendingCompute[T], /) -> T:
        return innermost().run(call)

    def submit(self, call: PendingCompute[T], /) -> AwaitableFuture[T]:
        return innermost().submit(call)

    def broadcast(self, call: PendingCompute[T], /) -> list[T]:
        return innermost().broadcast(call)

    def run_parallel(self, group: PendingComputeGroup[*Ts], /) -> tuple[*Ts]:
        return innermost().run_parallel(group)

    def submit_parallel(self, group: PendingComputeGroup[*Ts], /) -> AwaitableFuture[tuple[*Ts]]:
        return innermost().submit_parallel(group)

    def stream_parallel(self, group: PendingStream[T], /) -> Stream[T]:
        return innermost().stream_parallel(group)


sky = Innermost()
_open: list[weakref.ref[Target]] = []  # weak: a pool that nobody else refers to has been dropped
_open_lock = threading.Lock()


def enter_target(target: Target) -> None:
    """Makes `target` the one that `>> sky` means."""
    with _open_lock:
        _open.append(weakref.ref(target))


def leave_target(target: Target) -> None:
    """Takes `target` away again."""
    with _open_lock:
        _open[:] = [ref for ref in _open if ref() not in (target, None)]


def resolve(target: object, operator: str = ">>") -> Target:
    """The target that is meant: a pool itself, or the innermost open one for the module `skyward`."""
    if isinstance(target, ModuleType):
        if target.__name__ == "skyward":
            return innermost()
        raise TypeError(f"`{operator} {target.__name__}`: a call is sent to a pool or to `sky`, not to another module.")
    if isinstance(target, type) and hasattr(target, "run_parallel"):
        raise TypeError(
            f"`call {operator} {target.__name__}`: a call is sent to a pool; "
            f"open it first, `with {target.__name__}(...) as pool:`."
        )
    if hasattr(target, "run_parallel"):
        return cast(Target, target)
    raise TypeError(
        f"`call {operator} {brief(target)}`: a call is sent to a sky.ComputePool, or to `sky` inside its with-block."
    )


def innermost() -> Target:
    """The pool opened last."""
    with _open_lock:
        for ref in reversed(_open):
            if (target := ref()) is not None:
                return target
    if "COMPUTE_POOL" in os.environ:  # on a node
        raise PoolClosed(
            "this code runs on a node, where no pool is open: a body does not send calls. Return what is to be done "
            "next, and send it from your program; or run the function here and now, `fn.local(...)`."
        )
    raise PoolClosed("no pool is open: `>> sky` works inside `with sky.ComputePool(...):` only.")
