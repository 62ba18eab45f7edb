"""Whose text is kept, and where it goes: decorators that stand below `@sky.compute`.

They are decided on the node when the body starts, hold while its own code runs (not while a generator waits to be
asked), end when it raises, and do nothing outside a pool.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any, Literal, Never, ParamSpec, TypeVar, cast, overload

from skyward.api.compute import Compute
from skyward.api.info import InstanceInfo, instance_info
from skyward.errors import InvalidArgument
from skyward.node.stdio import STREAMS, CallbackWriter, Route, Stream, drain, install

__all__ = ["CallbackWriter", "Redirect", "drain", "install", "redirect_output", "silent", "stderr", "stdout"]

P = ParamSpec("P")
R = TypeVar("R")
Only = Literal["head"] | Callable[[InstanceInfo], object]
Choose = Callable[[], Route | None]


def stdout(*bare: Never, only: Only | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Keep what the body prints on the head alone (`only="head"`), or where a predicate on InstanceInfo holds."""
    return functools.partial(_decorated, choose=_unless(only, "stdout", bare))


def stderr(*bare: Never, only: Only | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """As `stdout`, for what the body writes to standard error."""
    return functools.partial(_decorated, choose=_unless(only, "stderr", bare))


@overload
def silent(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def silent() -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def silent(fn: Callable[..., Any] | None = None, /) -> Callable[..., Any]:
    """Drop everything that the body prints, on every node."""
    choose = functools.partial(_in_pool, _silence, STREAMS)
    return functools.partial(_decorated, choose=choose) if fn is None else _decorated(fn, choose)


def redirect_output(
    callback: Callable[[str], object], *, stream: Literal["stdout", "stderr", "both"] = "stdout"
) -> Redirect:
    """Hand what is printed to `callback` on the node, line by line; a decorator and a context manager."""
    if not callable(callback):
        raise InvalidArgument(f"redirect_output() got {callback!r}, not a function. Give one that takes a text.")
    if stream not in (*STREAMS, "both"):
        raise _unknown("stream", stream, (*STREAMS, "both"))
    return Redirect(callback, STREAMS if stream == "both" else (stream,))


def _unless(only: Only | None, stream: Stream, bare: tuple[object, ...]) -> Choose:
    if only is None or bare:
        raise InvalidArgument(
            f"@sky.{stream} does not say which nodes are heard. Write @sky.{stream}(only='head'), or "
            f"@sky.{stream}(only=lambda info: info.node < 2); @sky.silent is the one for none."
        )
    if not callable(only) and only != "head":
        raise _unknown("only", only, ("head",), " or a predicate such as lambda info: info.node < 2")
    return functools.partial(_in_pool, _silence, (stream,), only)


def _in_pool(
    make: Callable[[tuple[Stream, ...]], R], streams: tuple[Stream, ...], only: Only | None = None
) -> R | None:
    info = instance_info()
    if info is None:
        return None
    spared = only is not None and (info.is_head if only == "head" else only(info))
    return None if spared else make(streams)


def _silence(streams: tuple[Stream, ...]) -> Route:
    return Route(streams, None)


def _unknown(name: str, value: object, known: tuple[str, ...], other: str = "") -> InvalidArgument:
    near = difflib.get_close_matches(str(value), known, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return InvalidArgument(f"{name}={value!r} is not known. {hint}It takes {', '.join(map(repr, known))}{other}.")


def _decorated(fn: Callable[P, R], choose: Choose) -> Callable[P, R]:
    """`fn` with its text redirected as `choose` says at its start, whenever its own code runs."""
    if not callable(fn):
        raise InvalidArgument(f"an output decorator got {fn!r}, not a function. Put it right above a def.")
    if isinstance(cast("Any", fn), Compute):
        raise InvalidArgument(
            f"an output decorator stands above @sky.compute on {getattr(fn, '__name__', fn)}: there it would act on "
            "your computer, not on the nodes. Put it below @sky.compute."
        )
    return cast("Callable[P, R]", functools.wraps(fn)(_wrapper(fn, choose)))


def _wrapper(body: Callable[..., Any], choose: Choose) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(body):

        def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            route: AbstractContextManager[None] = choose() or nullcontext()
            generator = body(*args, **kwargs)
            step = functools.partial(generator.send, None)
            try:
                while True:
                    with route:
                        try:
                            item = step()
                        except StopIteration as end:
                            return end.value
                    try:
                        step = functools.partial(generator.send, (yield item))
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # thrown in here: the body's own generator shall see it
                        step = functools.partial(generator.throw, error)
            finally:
                with route:
                    generator.close()

        return generate

    if inspect.isasyncgenfunction(body):

        async def generate_async(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            route: AbstractContextManager[None] = choose() or nullcontext()
            generator = body(*args, **kwargs)
            step = functools.partial(generator.asend, None)
            try:
                while True:
                    with route:
                        try:
                            item = await step()
                        except StopAsyncIteration:
                            return
                    try:
                        step = functools.partial(generator.asend, (yield item))
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # thrown in here: the body's own generator shall see it
                        step = functools.partial(generator.athrow, error)
            finally:
                with route:
                    await generator.aclose()

        return generate_async

    if inspect.iscoroutinefunction(body):

        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with choose() or nullcontext():
                return await body(*args, **kwargs)

        return run_async

    def run(*args: Any, **kwargs: Any) -> Any:
        with choose() or nullcontext():
            return body(*args, **kwargs)

    return run


def _to_callback(callback: Callable[[str], object], streams: tuple[Stream, ...]) -> Route:
    return Route(streams, CallbackWriter(callback, lines=True))


class Redirect:
    """What `redirect_output` gives."""

    def __init__(self, callback: Callable[[str], object], streams: tuple[Stream, ...]) -> None:
        # Nothing of self goes into a decorated function, which must be able to travel.
        self._choose: Choose = functools.partial(_in_pool, functools.partial(_to_callback, callback), streams)
        self._open: dict[int, list[AbstractContextManager[None]]] = {}

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]:
        return _decorated(fn, self._choose)

    def __enter__(self) -> None:
        route = self._choose() or nullcontext()
        route.__enter__()
        self._open.setdefault(get_ident(), []).append(route)

    def __exit__(self, *error: object) -> None:
        self._open[get_ident()].pop().__exit__(None, None, None)
