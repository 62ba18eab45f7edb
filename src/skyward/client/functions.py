"""What is known of a callable by looking at it: streamed parameters, what it carries, which function it wraps."""

from __future__ import annotations

import functools
import inspect
import typing
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, cast

from skyward.api.compute import PendingCompute

__all__ = ["remembers_nothing", "streamed_parameters", "unbound"]


def streamed_parameters(call: PendingCompute[Any]) -> tuple[set[int], set[str]]:
    """Positions and names of arguments that travel as streams.

    A parameter annotated `Iterator[T]` is streamed; one annotated `Iterable[T]` only when the value is not a
    collection (a list may be iterated twice, so it is sent as it is).
    """
    annotated = _iterator_annotations(call.fn)
    if not annotated:
        return set(), set()
    positions: set[int] = set()
    names: set[str] = set()
    for index, value in enumerate(call.args):
        if index < len(annotated) and _travels_as_stream(annotated[index][1], value):
            positions.add(index)
    kinds = dict(annotated)
    for name, value in call.kwargs.items():
        if _travels_as_stream(kinds.get(name), value):
            names.add(name)
    return positions, names


def _travels_as_stream(kind: type | None, value: object) -> bool:
    if kind is None or not isinstance(value, Iterable):
        return False
    if isinstance(value, GeneratorType) and value.gi_frame is None:
        raise TypeError(
            f"the generator {value.__qualname__} was read to its end already, by an earlier call or a loop: it would "
            "give nothing. Make a new one for each call."
        )
    return kind is Iterator or not isinstance(value, Collection)


def _iterator_annotations(fn: Callable[..., Any]) -> tuple[tuple[str, type | None], ...]:
    """The parameters in order, each with Iterator, Iterable or None; empty when there is no such parameter."""
    if not isinstance(fn, FunctionType):
        return _read_annotations(fn)
    known = _annotations.get(fn)
    if known is None:
        known = _annotations[fn] = _read_annotations(fn)
    return known


_annotations: weakref.WeakKeyDictionary[FunctionType, tuple[tuple[str, type | None], ...]] = weakref.WeakKeyDictionary()


def _read_annotations(fn: Callable[..., Any]) -> tuple[tuple[str, type | None], ...]:
    plain: Any = fn
    while isinstance(plain, functools.partial):
        plain = plain.func
    if not isinstance(plain, FunctionType | MethodType | type):
        plain = getattr(cast(Any, type(plain)), "__call__", plain)  # noqa: B004 - its annotations are wanted
    try:
        hints = typing.get_type_hints(plain)
    except Exception:  # unresolvable annotations are the user's business; such a parameter is not streamed
        hints = getattr(plain, "__annotations__", {})
    kinds = {name: _iterator_kind(hint) for name, hint in hints.items() if name != "return"}
    if not any(kinds.values()):
        return ()
    return tuple((name, kinds.get(name)) for name in inspect.signature(fn).parameters)


def unbound(call: PendingCompute[Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The plain function of a call, with a method's object and a partial's arguments put among the arguments."""
    fn, args, kwargs = call.fn, call.args, dict(call.kwargs)
    while True:
        if isinstance(fn, functools.partial):
            fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
        elif isinstance(fn, MethodType):
            fn, args = fn.__func__, (fn.__self__, *args)
        else:
            return fn, args, kwargs


def remembers_nothing(fn: object) -> bool:
    """Whether a function may be kept on a node between calls: no call can change what it carries with it."""
    if not isinstance(fn, FunctionType):
        return isinstance(fn, type | BuiltinFunctionType)
    carried = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for cell in fn.__closure__ or ():
        try:
            carried.append(cell.cell_contents)
        except ValueError:
            return False  # not filled yet
    return all(value is fn or _is_constant(value) for value in carried)


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant(v) for v in cast("tuple[object, ...]", value))
    if isinstance(value, FunctionType):
        return remembers_nothing(value)
    return value is None or isinstance(value, int | float | str | bytes | type | ModuleType | BuiltinFunctionType)


def _iterator_kind(hint: Any) -> type | None:
    origin = typing.get_origin(hint) or hint
    if isinstance(origin, type) and origin in (Iterator, Iterable):
        return origin
    return None
