"""A concurrent.futures.Executor over a pool, for code that expects one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any, Never, NoReturn, ParamSpec, TypeVar

from skyward.api.brief import brief
from skyward.api.compute import Compute, PendingCompute
from skyward.client.callbacks import when_done

__all__ = ["PoolExecutor"]

P = ParamSpec("P")
T = TypeVar("T")


class PoolExecutor(Executor):
    """Submits plain functions to a pool."""

    def __init__(self, send: Callable[[Sequence[PendingCompute[Any]]], Sequence[Future[Any]]]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Sends a call to one node."""
        plain = fn.fn if isinstance(fn, Compute) else fn
        if isinstance(plain, PendingCompute):
            name = plain.name
            raise TypeError(
                f"an executor takes a function and its arguments, `submit({name}, ...)`; `{name}(...) > pool` "
                "sends a call."
            )
        if not callable(plain):
            raise TypeError(f"an executor takes a function and its arguments, `submit(fn, x)`, not {brief(plain)}.")
        with self._lock:
            if self._shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future: Future[T] = self._send([PendingCompute(plain, args, kwargs)])[0]
            self._pending.add(future)
        when_done(future, self._settled)
        return future

    def __call__(self, *_: Never) -> NoReturn:
        raise TypeError("pool.executor is no method: `pool.executor.submit(fn, x)`, without brackets after its name.")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more calls; the pool itself stays open."""
        with self._lock:
            self._shut = True
            pending = set(self._pending)
        if cancel_futures:
            for future in pending:
                if not future.running():
                    future.cancel()
        if wait:
            _wait(pending)

    def _settled(self, future: Future[Any]) -> None:
        self._pending.discard(future)


_wait = wait
