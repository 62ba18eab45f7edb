"""The lazy call: what `@sky.compute` makes of a function, and the operators that send it somewhere.

    train(x)            PendingCompute: a frozen value, nothing runs
    train(x) >> pool    one node            -> T
    train(x) @ pool     every node          -> list[T], in node order
    train(x) > pool     one node, later     -> AwaitableFuture[T]
    (a() & b()) >> pool several at once     -> tuple[A, B]

This module knows no pool: a target is anything with the methods of `Target`.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MethodType, ModuleType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, TypeVarTuple, cast, overload

from skyward.api.brief import brief, described
from skyward.api.futures import AwaitableFuture, Stream, Untyped
from skyward.api.keywords import FOR_FUNCTIONS, corrects_call
from skyward.api.targets import Target, resolve
from skyward.api.unsent import Unsent
from skyward.errors import InvalidArgument

if typing.TYPE_CHECKING:
    from skyward.api.ref import Ref

__all__ = [
    "Compute",
    "PendingCompute",
    "PendingComputeGroup",
    "PendingStream",
    "checked_member",
    "checked_retries",
    "compute",
    "name_of",
]

_ELSEWHERE = frozenset({"remote", "delay", "submit", "spawn", "starmap", "map", "apply_async", "options"})

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True)
class Chunk:
    """Several items in one call: of `pool.map` from number `first` on, or of joblib.

    With `keep`, one that fails does not stop the others.
    """

    items: int
    first: int | None = None
    keep: bool = False


@dataclass(frozen=True, eq=False)
class PendingCompute(Unsent, Generic[T_co]):
    """A call that has not been sent yet."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    timeout: float | None = None
    retries: int | None = None
    label: str = ""
    kept: bool = False
    chunk: Chunk | None = None

    @property
    def name(self) -> str:
        """What the call is named in messages and in the live view."""
        return self.label or name_of(self.fn)

    def with_timeout(self, seconds: float | None) -> Self:
        """Returns this call with a time limit of so many `seconds` (None: no limit)."""
        return replace(self, timeout=_checked_timeout(seconds))

    def with_retries(self, retries: int) -> Self:
        """Returns this call with other `retries`: how often it is started again after the loss of its node."""
        return replace(self, retries=checked_retries(retries))

    def keep(self) -> PendingKept[T_co]:
        """Returns this call with its result left on its node; sending it gives a `sky.Ref` to it.

        `ref = load().keep() >> pool`, then `train(ref) >> pool` goes to that node if it is free.
        """
        from skyward.api.ref import checked_keep  # not every process needs it

        checked_keep(self.fn, self.name)
        return cast("PendingKept[T_co]", replace(self, kept=True))

    @overload
    def __rshift__(self: PendingCompute[Untyped], target: Target | ModuleType) -> Any: ...
    @overload
    def __rshift__(self: PendingCompute[Iterator[U]], target: Target | ModuleType) -> Stream[U]: ...
    @overload
    def __rshift__(self, target: Target | ModuleType) -> T_co: ...
    def __rshift__(self, target: Target | ModuleType) -> Any:
        return resolve(target, ">>").run(self)

    @overload
    def __matmul__(self: PendingCompute[Untyped], target: Target | ModuleType) -> list[Any]: ...
    @overload
    def __matmul__(self: PendingCompute[Iterator[U]], target: Target | ModuleType) -> list[Stream[U]]: ...
    @overload
    def __matmul__(self, target: Target | ModuleType) -> list[T_co]: ...
    def __matmul__(self, target: Target | ModuleType) -> Any:
        return resolve(target, "@").broadcast(self)

    @overload
    def __gt__(self: PendingCompute[Untyped], target: Target | ModuleType) -> AwaitableFuture[Any]: ...
    @overload
    def __gt__(self: PendingCompute[Iterator[U]], target: Target | ModuleType) -> AwaitableFuture[Stream[U]]: ...
    @overload
    def __gt__(self, target: Target | ModuleType) -> AwaitableFuture[T_co]: ...
    def __gt__(self, target: Target | ModuleType) -> Any:
        return resolve(target, ">").submit(self)

    def __and__(self, other: PendingCompute[U]) -> PendingComputeGroup[T_co, U]:
        return PendingComputeGroup((self, checked_member(other)))

    def _spelled(self) -> str:
        return f"{self.name}(...)"

    def __repr__(self) -> str:
        return f"<PendingCompute {described(self.name, self.args, self.kwargs)}>"

    def _repr_html_(self) -> str:
        from skyward.api.html import call_card

        return call_card(self.name, self.args, self.kwargs, self.timeout)


if typing.TYPE_CHECKING:

    class PendingKept(PendingCompute[Ref[T_co]]):
        """What `keep()` gives, for type checkers: a Ref passes for anything, so overloads alone cannot name it."""

        def __rshift__(self, target: Target | ModuleType) -> Ref[T_co]: ...
        def __matmul__(self, target: Target | ModuleType) -> list[Ref[T_co]]: ...  # pyright: ignore[reportIncompatibleMethodOverride]
        def __gt__(self, target: Target | ModuleType) -> AwaitableFuture[Ref[T_co]]: ...  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclass(frozen=True, eq=False)
class PendingComputeGroup(Unsent, Generic[*Ts]):
    """Several calls to be sent together; the result is a tuple in the same order."""

    items: tuple[PendingCompute[Any], ...]
    timeout: float | None = None
    return_exceptions: bool = False
    progress: bool = True

    def __and__(self, other: PendingCompute[U]) -> PendingComputeGroup[*Ts, U]:
        return replace(cast(Any, self), items=(*self.items, checked_member(other)))

    def with_timeout(self, seconds: float | None) -> PendingComputeGroup[*Ts]:
        """Returns this group with a time limit of so many `seconds` for each of its calls."""
        return replace(self, timeout=_checked_timeout(seconds))

    def calls(self) -> list[PendingCompute[Any]]:
        """The calls, with the group's time limit where they have none of their own."""
        if self.timeout is None:
            return list(self.items)
        return [c if c.timeout is not None else replace(c, timeout=self.timeout) for c in self.items]

    def __rshift__(self, target: Target | ModuleType) -> tuple[*Ts]:
        return resolve(target, ">>").run_parallel(self)

    def __gt__(self, target: Target | ModuleType) -> AwaitableFuture[tuple[*Ts]]:
        return resolve(target, ">").submit_parallel(self)

    def _spelled(self) -> str:
        return "sky.gather(...)"

    def __matmul__(self, target: Any) -> typing.NoReturn:
        raise TypeError("a group cannot be broadcast; broadcast its calls one by one: `a() @ pool`, `b() @ pool`.")


@dataclass(frozen=True, eq=False)
class PendingStream(Unsent, Generic[T]):
    """Several calls whose results are wanted one by one, as they come or in order."""

    items: tuple[PendingCompute[Any], ...]
    ordered: bool = True
    return_exceptions: bool = False
    progress: bool = True

    def __rshift__(self, target: Target | ModuleType) -> Stream[T]:
        return resolve(target, ">>").stream_parallel(self)

    if not typing.TYPE_CHECKING:

        def __gt__(self, target: Any) -> typing.NoReturn:
            raise TypeError(f"a stream is read as it comes: `for result in {self._spelled()} >> pool:`.")

        def __matmul__(self, target: Any) -> typing.NoReturn:
            raise TypeError("a stream cannot be broadcast; broadcast its calls one by one: `a() @ pool`, `b() @ pool`.")

    def _spelled(self) -> str:
        return "sky.gather(..., stream=True)"


class Compute(Generic[P, T]):
    """A function that is called lazily: calling it gives a PendingCompute."""

    def __init__(self, fn: Callable[P, Any], timeout: float | None = None, retries: int | None = None) -> None:
        if isinstance(fn, Compute):
            raise InvalidArgument(f"{fn!r} is a compute function already; leave out the second @sky.compute.")
        if isinstance(fn, staticmethod | classmethod):
            raise InvalidArgument("put @staticmethod or @classmethod above @sky.compute, not below it.")
        if not callable(fn):
            raise InvalidArgument(f"@sky.compute wants a function, not {fn!r}.")
        self.fn = fn
        self.timeout = _checked_timeout(timeout)
        self.retries = None if retries is None else checked_retries(retries)
        functools.update_wrapper(self, fn)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> PendingCompute[T]:
        signature, fewest, most = self._signature
        if signature is not None and (kwargs or not fewest <= len(args) <= most):
            try:
                bound = signature.bind(*args, **kwargs)
                for name in self._positional_only[len(args) :]:  # Python 3.13.0 overlooks one given by keyword
                    if name not in bound.arguments:
                        raise TypeError(f"missing a required positional-only argument: {name!r}")
            except TypeError as exc:
                raise TypeError(f"{name_of(self.fn)}(): {exc}") from None
        return PendingCompute(self.fn, args, kwargs, self.timeout, self.retries)

    def local(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the function here and now, with the same `args` and `kwargs`, without a pool."""
        result = self.fn(*args, **kwargs)
        if inspect.iscoroutine(result):
            import asyncio

            return asyncio.run(cast("Coroutine[Any, Any, T]", result))
        return result

    if not typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _ELSEWHERE:
                called = name_of(self.fn) if "fn" in self.__dict__ else "f"
                raise AttributeError(f"{called}.{name}(...): a call is made first, then sent, `{called}(...) >> pool`.")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _not_called(self, other: object) -> typing.NoReturn:
        name = name_of(self.fn)
        raise TypeError(f"{name} has not been called: add parentheses, `{name}(...)`, before it is sent.")

    __rshift__ = __matmul__ = __gt__ = __and__ = __rand__ = _not_called

    @overload
    def __get__(self, instance: None, owner: type, /) -> Compute[P, T]: ...
    @overload
    def __get__(self: Compute[Concatenate[Any, Q], T], instance: object, owner: type, /) -> Compute[Q, T]: ...
    def __get__(self, instance: object | None, owner: type, /) -> Any:
        if instance is None:
            return self
        return Compute[..., T](MethodType(self.fn, instance), self.timeout, self.retries)

    def __reduce__(self) -> tuple[Any, ...]:
        return Compute, (self.fn, self.timeout, self.retries)

    def __repr__(self) -> str:
        return f"<compute {name_of(self.fn)}>"

    @functools.cached_property
    def _signature(self) -> tuple[inspect.Signature | None, int, int]:
        """The signature, and from and up to how many arguments without names it certainly takes."""
        try:
            signature = inspect.signature(self.fn)
        except (TypeError, ValueError):
            return None, 0, 0  # some built-in callables have none; Python itself checks those on the node
        fewest = most = 0
        for parameter in signature.parameters.values():
            required = parameter.default is parameter.empty
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                fewest, most = fewest + required, most + 1
            elif parameter.kind is parameter.KEYWORD_ONLY and required:
                return signature, 1, 0  # none: a name is missing
        return signature, fewest, most

    @functools.cached_property
    def _positional_only(self) -> list[str]:
        signature = self._signature[0]
        found = signature.parameters.values() if signature is not None else ()
        return [p.name for p in found if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]


@overload
def compute(fn: Callable[P, Coroutine[Any, Any, T]], /) -> Compute[P, T]: ...
@overload
def compute(fn: Callable[P, AsyncIterator[T]], /) -> Compute[P, Iterator[T]]: ...
@overload
def compute(fn: Callable[P, T], /) -> Compute[P, T]: ...
@overload
def compute(*, timeout: float | None = ..., retries: int | None = ...) -> _Decorator: ...
@corrects_call("sky.compute", FOR_FUNCTIONS)
def compute(fn: Any = None, /, *, timeout: float | None = None, retries: int | None = None) -> Any:
    """Marks a function for computing elsewhere; works bare or as `@sky.compute(timeout=60)`.

    Args:
        fn: the function; left out where options are given.
        timeout: time limit of each call in seconds, from the start of its body. Default: the pool's.
        retries: how often a call is started again after the loss of its node. Default: the pool's, which is 3.
    """
    if fn is None:
        _checked_timeout(timeout)
        if retries is not None:
            checked_retries(retries)
        return functools.partial(Compute[..., Any], timeout=timeout, retries=retries)
    return Compute[..., Any](fn, timeout, retries)


class _Decorator(Protocol):
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> Compute[P, T]: ...
    @overload
    def __call__(self, fn: Callable[P, AsyncIterator[T]], /) -> Compute[P, Iterator[T]]: ...
    @overload
    def __call__(self, fn: Callable[P, T], /) -> Compute[P, T]: ...


def name_of(fn: Callable[..., Any]) -> str:
    """A short name for a function, method, partial or callable object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__


def checked_member(call: object) -> PendingCompute[Any]:
    """The call, if it is one that can be part of a group."""
    if isinstance(call, PendingCompute):
        return cast("PendingCompute[Any]", call)
    if isinstance(call, list | tuple | Iterator):
        raise TypeError("gather() takes calls, not a list of them: put a star before it, `sky.gather(*calls)`.")
    if isinstance(call, AwaitableFuture):
        raise TypeError(
            "gather() takes calls that were not sent yet, and this is a future: it runs already. Its result is "
            "`future.result()`; of several, `[future.result() for future in futures]`."
        )
    if isinstance(call, Compute):
        call._not_called(None)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType] - same module
    raise TypeError(
        f"`&` and gather() join calls, not {brief(call)}. Was it returned by a plain function, or sent already? Put "
        "parentheses around a group, `(a() & b()) >> pool`: without them `b() >> pool` comes first."
    )


def _checked_timeout(seconds: Any) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise InvalidArgument(f"timeout={seconds!r}: a time limit is a positive number of seconds, or None for none.")
    return float(seconds)


def checked_retries(retries: Any) -> int:
    """How often a call may be started again after the loss of a node, if it is a number of times."""
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise InvalidArgument(f"retries={retries!r}: a whole number of restarts, 0 or more, is wanted.")
    return retries
