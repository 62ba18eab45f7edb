"""The lazy call: what `@sky.compute` makes of a function, and the operators that send it.

    train(x)              PendingCompute: a frozen value, nothing runs
    train(x) >> pool      one node  ->  T
    train(x) @ pool       every node  ->  list[T], in node order
    train(x) > pool       one node, later  ->  AwaitableFuture[T]
    (a() & b()) >> pool   several at once  ->  tuple[A, B]

A target is anything with the methods of `Target`.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import threading
import typing
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MethodType, ModuleType
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    TypeVarTuple,
    Unpack,
    cast,
    overload,
)

from skyward.api.brief import brief, described
from skyward.api.checks import check_switches
from skyward.api.futures import AwaitableFuture, LocalItems, Stream, Untyped
from skyward.api.usage_errors import FOR_FUNCTIONS, FOR_GROUPS, Unsent, corrects_call, hide_frames, usable
from skyward.errors import InvalidArgument, PoolClosed

__all__ = [
    "Compute",
    "GroupOptions",
    "PendingCompute",
    "PendingComputeGroup",
    "PendingStream",
    "Resume",
    "Target",
    "as_compute",
    "checked_member",
    "checked_retries",
    "compute",
    "enter_target",
    "gather",
    "innermost",
    "leave_target",
    "name_of",
    "resolve",
    "resume_options",
    "sky",
]


if typing.TYPE_CHECKING:
    from skyward.api.ref import Ref

_LONGEST_NAME = 1000
_NO_LIMIT = 1e15  # seconds: nobody waits that long
_FIRST = "a call is made first, then sent, `{f}(...) >> pool`."
_ELSEWHERE = {
    **dict.fromkeys(("remote", "delay", "submit", "spawn", "apply_async"), _FIRST),
    "map": "the pool maps, `pool.map({f}, items)`.",
    "starmap": "calls are made first, then sent, `sky.gather(*({f}(*args) for args in items)) >> pool`.",
    "options": "a call has `{f}(...).with_timeout(seconds)` and `.with_retries(n)`; GPUs and memory are the pool's, "
    '`sky.ComputePool(accelerator="A100")`.',
}

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True)
class Chunk:
    """Several items in one call: of `pool.map` from number `first` on, or of joblib. With `keep`, failures do not stop
    others.
    """

    items: int
    first: int | None = None
    keep: bool = False


@dataclass(frozen=True)
class Resume:
    """See `client/resume.py`."""

    name: str
    changed: Literal["keep", "redo"] | None = None
    extra: object = field(default=None, repr=False)


class GroupOptions(TypedDict, total=False):
    progress: bool
    resume: str | None
    changed: Literal["keep", "redo"] | None
    resume_with: object


def resume_options(name: object, changed: object, extra: object) -> Resume | None:
    if name is None:
        for option, given in (("changed", changed), ("resume_with", extra)):
            if given is not None:
                raise InvalidArgument(f"{option}= needs resume=, a name for the results: resume='grid-1'.")
        return None
    if not isinstance(name, str) or not usable(name):
        raise InvalidArgument(
            f"resume={brief(name)}: expected a name for the results, of letters, digits, '.', '_' and '-', such as "
            "'grid-1'."
        )
    if changed not in (None, "keep", "redo"):
        raise InvalidArgument(
            f'changed={brief(changed)}: "keep" takes results of other code, "redo" computes them again.'
        )
    return Resume(name, cast("Any", changed), extra)


@dataclass(frozen=True, eq=False)
class PendingCompute(Unsent, Generic[T_co]):
    """A call that has not been sent yet."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    timeout: float | None = None
    """In seconds: infinite for none, None for that of its group or pool."""
    retries: int | None = None
    label: str = ""
    kept: bool = False
    chunk: Chunk | None = None

    @property
    def name(self) -> str:
        """What messages and the live view call it."""
        return self.label or name_of(self.fn)

    def with_timeout(self, seconds: float | None) -> Self:
        """This call with a time limit of `seconds` (None: no limit, whatever the pool's is)."""
        return replace(self, timeout=_checked_limit(seconds))

    def with_retries(self, retries: int) -> Self:
        """This call with other `retries`: how often it is restarted after the loss of its node."""
        return replace(self, retries=checked_retries(retries))

    def keep(self) -> PendingKept[T_co]:
        """This call with its result left on its node; sending it gives a `sky.Ref` to it.

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
        try:
            return resolve(target, ">>").run(self)
        except Exception as exc:
            __tracebackhide__ = True
            hide_frames(exc)
            raise

    @overload
    def __matmul__(self: PendingCompute[Untyped], target: Target | ModuleType) -> list[Any]: ...
    @overload
    def __matmul__(self: PendingCompute[Iterator[U]], target: Target | ModuleType) -> list[Stream[U]]: ...
    @overload
    def __matmul__(self, target: Target | ModuleType) -> list[T_co]: ...
    def __matmul__(self, target: Target | ModuleType) -> Any:
        try:
            return resolve(target, "@").broadcast(self)
        except Exception as exc:
            __tracebackhide__ = True
            hide_frames(exc)
            raise

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
        """For type checkers."""

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
    resume: Resume | None = None

    def __and__(self, other: PendingCompute[U]) -> PendingComputeGroup[*Ts, U]:
        return replace(cast(Any, self), items=(*self.items, checked_member(other)))

    def with_timeout(self, seconds: float | None) -> PendingComputeGroup[*Ts]:
        """This group with a time limit of `seconds` for each call that has none (None: no limit)."""
        return replace(self, timeout=_checked_limit(seconds))

    def calls(self) -> list[PendingCompute[Any]]:
        if self.timeout is None:
            return list(self.items)
        return [c if c.timeout is not None else replace(c, timeout=self.timeout) for c in self.items]

    def __rshift__(self, target: Target | ModuleType) -> tuple[*Ts]:
        try:
            return resolve(target, ">>").run_parallel(self)
        except Exception as exc:
            __tracebackhide__ = True
            hide_frames(exc)
            raise

    def __gt__(self, target: Target | ModuleType) -> AwaitableFuture[tuple[*Ts]]:
        return resolve(target, ">").submit_parallel(self)

    def _spelled(self) -> str:
        return "sky.gather(...)"

    def __matmul__(self, target: Any) -> typing.NoReturn:
        raise TypeError("a group cannot be broadcast; broadcast its calls one by one: `a() @ pool`, `b() @ pool`.")


@dataclass(frozen=True, eq=False)
class PendingStream(Unsent, Generic[T]):
    """Several calls whose results are read one by one, in order or as they come."""

    items: tuple[PendingCompute[Any], ...]
    ordered: bool = True
    return_exceptions: bool = False
    progress: bool = True
    resume: Resume | None = None

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
    """A function that is called lazily, for a PendingCompute."""

    def __init__(self, fn: Callable[P, Any], timeout: float | None = None, retries: int | None = None) -> None:
        if isinstance(fn, Compute):
            raise InvalidArgument(f"{fn!r} is a compute function already; leave out the second @sky.compute.")
        self._method: Any = fn if isinstance(cast(object, fn), staticmethod | classmethod) else None  # it binds `fn`
        fn = fn if self._method is None else self._method.__func__
        if not callable(fn):
            raise InvalidArgument(f"@sky.compute takes a function, not {fn!r}.")
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
        self._check_class(args, kwargs)
        result = self.fn(*args, **kwargs)
        if inspect.iscoroutine(result):
            import asyncio

            return asyncio.run(cast("Coroutine[Any, Any, T]", result))
        if inspect.isasyncgen(result):
            return cast(T, LocalItems(cast("AsyncGenerator[Any, None]", result)))
        return result

    if not typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _ELSEWHERE:
                called = name_of(self.fn) if "fn" in self.__dict__ else "f"
                raise AttributeError(f"{called}.{name}(...): {_ELSEWHERE[name].format(f=called)}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _check_class(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = self._signature[0]
        if signature is None or next(iter(signature.parameters), "") != "cls":
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(
                f"{name_of(self.fn)}.local(): {exc}. If it is a class method: put @sky.compute above @classmethod. The "
                "other way round, Python from 3.13 on does not say of which class it is."
            ) from None

    def _not_called(self, other: object) -> typing.NoReturn:
        name = name_of(self.fn)
        raise TypeError(f"{name} has not been called: add parentheses, `{name}(...)`, before it is sent.")

    __rshift__ = __matmul__ = __gt__ = __and__ = __rand__ = _not_called

    @overload  # a class method's; `self` is a function, since mypy would take every Compute for one of a class
    def __get__(
        self: Callable[Concatenate[type[U], Q], PendingCompute[T]], instance: None, owner: type[U], /
    ) -> Compute[Q, T]: ...
    @overload
    def __get__(self, instance: None, owner: type, /) -> Compute[P, T]: ...
    @overload
    def __get__(self: Compute[Concatenate[Any, Q], T], instance: object, owner: type, /) -> Compute[Q, T]: ...
    def __get__(self, instance: object | None, owner: type, /) -> Any:
        if self._method is not None:
            bound = self._method.__get__(instance, owner)
        elif instance is None:
            return self
        else:
            bound = MethodType(self.fn, instance)
        return Compute[..., T](bound, self.timeout, self.retries)

    def __reduce__(self) -> tuple[Any, ...]:
        return Compute, (self._method or self.fn, self.timeout, self.retries)

    def __repr__(self) -> str:
        return f"<compute {name_of(self.fn)}>"

    @functools.cached_property
    def _signature(self) -> tuple[inspect.Signature | None, int, int]:
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
        timeout: time limit of each call in seconds, from the start of its body (`math.inf`: none). Default: the pool's.
        retries: how often a call is restarted after the loss of its node. Default: the pool's, which is 3.
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


def as_compute(fn: Any) -> Any:
    """For `@classmethod` over `@sky.compute`, a compute function; else the same."""
    if isinstance(fn, MethodType) and isinstance(fn.__func__, Compute):
        return cast("Compute[..., Any]", fn.__func__).__get__(fn.__self__, type(fn.__self__))
    return fn


def name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name: Any = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    return name[:_LONGEST_NAME] if isinstance(name, str) and name else type(fn).__name__


def checked_member(call: object) -> PendingCompute[Any]:
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
    return None if seconds is None else _checked_limit(seconds)


def _checked_limit(seconds: Any) -> float:
    if seconds is None:
        return math.inf
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise InvalidArgument(f"timeout={seconds!r}: expected a positive number of seconds, or None for no limit.")
    return float(seconds) if seconds < _NO_LIMIT else math.inf


def checked_retries(retries: Any) -> int:
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise InvalidArgument(f"retries={retries!r}: expected a whole number of restarts, 0 or more.")
    return retries


class Target(Protocol):
    def run(self, call: PendingCompute[T], /) -> T: ...
    def submit(self, call: PendingCompute[T], /) -> AwaitableFuture[T]: ...
    def broadcast(self, call: PendingCompute[T], /) -> list[T]: ...
    def run_parallel(self, group: PendingComputeGroup[*Ts], /) -> tuple[*Ts]: ...
    def submit_parallel(self, group: PendingComputeGroup[*Ts], /) -> AwaitableFuture[tuple[*Ts]]: ...
    def stream_parallel(self, group: PendingStream[T], /) -> Stream[T]: ...


class Innermost:
    """The pool opened last: `call() >> sky`."""

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
    with _open_lock:
        _open.append(weakref.ref(target))


def leave_target(target: Target) -> None:
    with _open_lock:
        _open[:] = [ref for ref in _open if ref() not in (target, None)]


def resolve(target: object, operator: str = ">>") -> Target:
    """A pool itself, or the innermost open one for the module `skyward`."""
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
    with _open_lock:
        for ref in reversed(_open):
            if (target := ref()) is not None:
                return target
    if "COMPUTE_POOL" in os.environ:  # on a node
        raise PoolClosed(
            "this code runs on a node, where no pool is open: a body does not send calls. Return what should be done "
            "next, and send it from your program; or run the function here and now, `fn.local(...)`."
        )
    raise PoolClosed("no pool is open: `>> sky` works inside `with sky.ComputePool(...):` only.")


A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")

No = Literal[False]
Yes = Literal[True]


@overload
def gather(
    a: PendingCompute[A], /, *, stream: No = ..., return_exceptions: No = ..., **more: Unpack[GroupOptions]
) -> PendingComputeGroup[A]: ...
@overload
def gather(
    a: PendingCompute[A],
    b: PendingCompute[B],
    /,
    *,
    stream: No = ...,
    return_exceptions: No = ...,
    **more: Unpack[GroupOptions],
) -> PendingComputeGroup[A, B]: ...
@overload
def gather(
    a: PendingCompute[A],
    b: PendingCompute[B],
    c: PendingCompute[C],
    /,
    *,
    stream: No = ...,
    return_exceptions: No = ...,
    **more: Unpack[GroupOptions],
) -> PendingComputeGroup[A, B, C]: ...
@overload
def gather(
    a: PendingCompute[A],
    b: PendingCompute[B],
    c: PendingCompute[C],
    d: PendingCompute[D],
    /,
    *,
    stream: No = ...,
    return_exceptions: No = ...,
    **more: Unpack[GroupOptions],
) -> PendingComputeGroup[A, B, C, D]: ...
@overload
def gather(
    *calls: PendingCompute[T],
    stream: No = ...,
    ordered: bool = ...,
    return_exceptions: No = ...,
    **more: Unpack[GroupOptions],
) -> PendingComputeGroup[*tuple[T, ...]]: ...
@overload
def gather(
    *calls: PendingCompute[T],
    stream: No = ...,
    ordered: bool = ...,
    return_exceptions: Yes,
    **more: Unpack[GroupOptions],
) -> PendingComputeGroup[*tuple[T | BaseException, ...]]: ...
@overload
def gather(
    *calls: PendingCompute[T],
    stream: Yes,
    ordered: bool = ...,
    return_exceptions: No = ...,
    **more: Unpack[GroupOptions],
) -> PendingStream[T]: ...
@overload
def gather(
    *calls: PendingCompute[T], stream: Yes, ordered: bool = ..., return_exceptions: Yes, **more: Unpack[GroupOptions]
) -> PendingStream[T | BaseException]: ...
@corrects_call("sky.gather", FOR_GROUPS)
def gather(
    *calls: PendingCompute[Any],
    stream: bool = False,
    ordered: bool = True,
    return_exceptions: bool = False,
    progress: bool = True,
    resume: str | None = None,
    changed: Literal["keep", "redo"] | None = None,
    resume_with: object = None,
) -> Any:
    """Groups calls, to be sent with `>> pool` or `> pool`; the result is a tuple in their order.

    `stream`: results come one by one, as an iterator; with `ordered=False`, as they are ready. `return_exceptions`: a
    failed call has its exception in its place, and the others continue. Otherwise (the default) the first failure is
    raised and the others are stopped; what had finished is in the `partial` of the exception. `progress`: whether the
    live view shows how many are done, how many per second, and the time left (the default).

    `resume`: a name under which results are kept as they finish; given again, only what is missing is computed.
    `changed`: "keep" or "redo" kept results of code that has changed since. Default: an error. `resume_with`: what else
    results depend on, such as the version of a file that bodies read. Default: nothing.
    """
    check_switches(stream=stream, ordered=ordered, return_exceptions=return_exceptions, progress=progress)
    kept = resume_options(resume, changed, resume_with)
    items = tuple(checked_member(c) for c in calls)
    if stream:
        return PendingStream[Any](items, ordered, return_exceptions, progress, kept)
    return PendingComputeGroup[Any](items, None, return_exceptions, progress, kept)
