"""`@sky.once`: a function that runs once in each process, and whose value is kept."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from skyward.api.brief import brief
from skyward.api.usage_errors import corrects_call
from skyward.errors import InvalidArgument

__all__ = ["Once", "arrived", "identified", "once"]

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")

_known: dict[tuple[str, str], Once[..., Any]] = {}
"""Those that came to this process with calls: the newest of each name."""
_knowing = threading.Lock()


class Once(Generic[P, T]):
    """A function that runs once for the same arguments, in each process that calls it."""

    def __init__(self, fn: Callable[P, T], identity: str = "") -> None:
        if not callable(fn) or isinstance(fn, type):
            raise InvalidArgument(f"@sky.once takes a function, not {brief(fn)}.")
        if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise InvalidArgument(
                f"@sky.once on {fn.__qualname__}: what an async function or a generator returns can be used once only. "
                "Write a plain function that returns a value to keep."
            )
        self.fn = fn
        self.identity = identity or os.urandom(8).hex()  # of this definition: written again, it is another one
        self._values: dict[Any, T] = {}
        self._running: dict[Any, tuple[int, threading.Lock]] = {}
        self._lock = threading.Lock()
        functools.update_wrapper(self, fn)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(sorted(kwargs.items())))
        try:
            if key in self._values:
                return self._values[key]
        except TypeError as exc:
            raise TypeError(
                f"{self.fn.__qualname__} is marked @sky.once: its value is kept by its arguments, so they must be "
                f"hashable ({exc}). Pass names, numbers or tuples, and load the rest inside."
            ) from None
        return self._first(key, args, kwargs)

    def _first(self, key: Any, args: Any, kwargs: Any) -> T:
        """Runs the function, or waits for the thread that does; failures are not kept."""
        mine = threading.get_ident(), threading.Lock()
        with mine[1]:
            while True:
                with self._lock:
                    if key in self._values:
                        return self._values[key]
                    running = self._running.setdefault(key, mine)
                if running is mine:
                    break
                if running[0] == mine[0]:
                    raise RuntimeError(f"{self.fn.__qualname__} is marked @sky.once, and calls itself while it runs.")
                with running[1]:
                    pass  # it has ended
            try:
                value = self._values[key] = cast(Any, self.fn)(*args, **kwargs)
                return value
            finally:
                del self._running[key]

    def forget(self) -> None:
        """Drops the values that this process has kept."""
        self._values.clear()

    @overload
    def __get__(self, instance: None, owner: type, /) -> Once[P, T]: ...
    @overload
    def __get__(self: Once[Concatenate[Any, Q], T], instance: object, owner: type, /) -> Callable[Q, T]: ...
    def __get__(self, instance: object | None, owner: type, /) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<once {self.fn.__qualname__}, {len(self._values)} kept in this process>"


@corrects_call("sky.once", example="@sky.once above the function, without brackets")
def once(fn: Callable[P, T], /) -> Once[P, T]:
    """Runs the function `fn` once in each process, and keeps its value there: a model, a connection, a table.

    Later calls in the same process get the same value. Threads wait for the one that makes it. There is one value for
    each set of arguments. Exceptions are not kept.

        @sky.once
        def model():
            return load_model("weights.pt")

        @sky.compute
        def predict(text):
            return model()(text)
    """
    return Once(fn)


def arrived(module: str, qualname: str, identity: str, fn: Callable[..., Any]) -> Once[..., Any]:
    with _knowing:
        known = _known.get((module, qualname))
        if known is None or known.identity != identity:
            known = _known[module, qualname] = Once(fn, identity)
        return known


def identified(value: Once[..., Any]) -> tuple[str, str, str, Callable[..., Any]]:
    fn = cast(Any, value.fn)
    return fn.__module__, fn.__qualname__, value.identity, fn
