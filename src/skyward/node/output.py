"""Output decorators: which nodes show what a body prints, and where else it goes.

What happens is decided on the node when the body starts. It holds while the body's own code runs, not while a generator
waits for the next request. Outside a pool these decorators do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any, Literal, Never, ParamSpec, TypeVar, overload

from skyward.api.info import InstanceInfo, instance_info
from skyward.errors import InvalidArgument
from skyward.node.decorators import Enter, inside
from skyward.node.stdio import STREAMS, CallbackWriter, Route, Stream, drain, install

__all__ = ["CallbackWriter", "Redirect", "drain", "install", "redirect_output", "silent", "stderr", "stdout"]

P = ParamSpec("P")
R = TypeVar("R")
Only = Literal["head"] | Callable[[InstanceInfo], object]


def stdout(*bare: Never, only: Only | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Shows what the body prints on some ranks alone: `@sky.stdout(only="head")`.

    Args:
        only: "head" for rank 0, or a function of `sky.InstanceInfo` that says whether this rank is heard. Required.
    """
    return functools.partial(_decorated, choose=_unless(only, "stdout", bare))


def stderr(*bare: Never, only: Only | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """As `stdout`, for what the body writes to standard error: `@sky.stderr(only="head")`.

    Args:
        only: "head" for rank 0, or a function of `sky.InstanceInfo` that says whether this rank is heard. Required.
    """
    return functools.partial(_decorated, choose=_unless(only, "stderr", bare))


@overload
def silent(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def silent() -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def silent(fn: Callable[..., Any] | None = None, /) -> Callable[..., Any]:
    """Drops everything that the body `fn` prints, on every node: `@sky.silent`."""
    choose = functools.partial(_in_pool, _silence, STREAMS)
    return functools.partial(_decorated, choose=choose) if fn is None else _decorated(fn, choose)


def redirect_output(
    callback: Callable[[str], object], *, stream: Literal["stdout", "stderr", "both"] = "stdout"
) -> Redirect:
    """Hands what is printed to a function on the node, line by line; a decorator and a context manager.

    Args:
        callback: called with each line, without its line end.
        stream: "stdout", "stderr" or "both". Default: "stdout".
    """
    if not callable(callback):
        raise InvalidArgument(f"redirect_output() got {callback!r}, not a function. Give one that takes a text.")
    if stream not in (*STREAMS, "both"):
        raise _unknown("stream", stream, (*STREAMS, "both"))
    return Redirect(callback, STREAMS if stream == "both" else (stream,))


def _unless(only: Only | None, stream: Stream, bare: tuple[object, ...]) -> Enter:
    if only is None or bare:
        raise InvalidArgument(
            f"@sky.{stream} does not say which nodes are heard. Write @sky.{stream}(only='head'), or "
            f"@sky.{stream}(only=lambda info: info.node < 2); @sky.silent is the one for none."
        )
    if not callable(only) and only != "head":
        raise _unknown("only", only, ("head",), " or a predicate such as lambda info: info.node < 2")
    return functools.partial(_in_pool, _silence, (stream,), only)


def _in_pool(
    make: Callable[[tuple[Stream, ...]], Route], streams: tuple[Stream, ...], only: Only | None = None
) -> AbstractContextManager[None]:
    info = instance_info()
    if info is None:
        return nullcontext()
    spared = only is not None and (info.is_head if only == "head" else only(info))
    return nullcontext() if spared else make(streams)


def _silence(streams: tuple[Stream, ...]) -> Route:
    return Route(streams, None)


def _unknown(name: str, value: object, known: tuple[str, ...], other: str = "") -> InvalidArgument:
    import difflib  # for weight: only a mistake needs it

    near = difflib.get_close_matches(str(value), known, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return InvalidArgument(f"{name}={value!r} is not known. {hint}It takes {', '.join(map(repr, known))}{other}.")


def _decorated(fn: Callable[P, R], choose: Enter) -> Callable[P, R]:
    """`fn` with its text redirected as `choose` says at its start, whenever its own code runs."""
    return inside(fn, choose, "an output decorator", each_step=True)


def _to_callback(callback: Callable[[str], object], streams: tuple[Stream, ...]) -> Route:
    return Route(streams, CallbackWriter(callback, lines=True))


class Redirect:
    """What `redirect_output` gives."""

    def __init__(self, callback: Callable[[str], object], streams: tuple[Stream, ...]) -> None:
        # Nothing of self goes into a decorated function, which must be able to travel.
        self._choose: Enter = functools.partial(_in_pool, functools.partial(_to_callback, callback), streams)
        self._open: dict[int, list[AbstractContextManager[object]]] = {}

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]:
        return _decorated(fn, self._choose)

    def __enter__(self) -> None:
        route = self._choose()
        route.__enter__()
        self._open.setdefault(get_ident(), []).append(route)

    def __exit__(self, *error: object) -> None:
        self._open[get_ident()].pop().__exit__(None, None, None)
