"""Definitions that cloudpickle sends by name, though only this computer has them: caches, dispatchers, new types.

    @functools.lru_cache, @functools.cache      made again over the function, empty
    @functools.singledispatch                   made again with all that is registered
    functools.cached_property                   without its lock, which Python 3.11 has
    functools.singledispatchmethod              without its cache, which Python 3.13 has
    typing.NewType, ParamSpec, TypeVarTuple, `type X = ...`
    @sky.once                                   the same one for all calls in a process

Each is made empty and filled afterwards, so functions that refer to themselves find it.
"""

from __future__ import annotations

import functools
import io
import sys
import typing
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, cast

import cloudpickle

from skyward.api.once import Once, arrived, identified
from skyward.api.ref import Ref

__all__ = ["KINDS", "add", "reduce"]

_internals: Any = cloudpickle.cloudpickle
_Cached: type = type(functools.lru_cache(len))
_DISPATCHER = cast(Any, functools.singledispatch(len)).__code__


def reduce(value: Any) -> Any:
    """NotImplemented unless `value` is such a definition that only this computer has."""
    kind = cast(Any, type(value))
    make = _REDUCERS.get(kind) if kind is not FunctionType or value.__code__ is _DISPATCHER else None
    if make is None or (kind not in _NAMELESS and _is_elsewhere(value)):
        return NotImplemented
    return make(value)


def add(kind: type, reducer: Callable[[Any], Any]) -> None:
    _REDUCERS[kind] = reducer
    _NAMELESS.add(kind)
    KINDS.add(kind)


def _is_elsewhere(value: Any) -> bool:
    found = _internals._lookup_module_and_qualname(value, name=getattr(value, "__qualname__", None))
    return found is not None and not _internals._is_registered_pickle_by_value(found[0])


def _cache(value: Any) -> Any:
    options = value.cache_parameters()
    return (
        _make_cache,
        (options["maxsize"], options["typed"]),
        (value.__wrapped__, vars(value)),
        None,
        None,
        _fill_cache,
    )


def _make_cache(maxsize: int | None, typed: bool) -> Any:
    def missed(*args: Any, **kwargs: Any) -> Any:
        return made.__wrapped__(*args, **kwargs)

    made: Any = functools.lru_cache(maxsize=maxsize, typed=typed)(missed)
    return made


def _fill_cache(made: Any, state: tuple[Any, dict[str, Any]]) -> None:
    wrapped, attributes = state
    functools.update_wrapper(made, wrapped)
    vars(made).update({**attributes, "__wrapped__": wrapped})


def _dispatcher(value: Any) -> Any:
    attributes = _attributes(value, _MADE_WITH_IT)
    named = {name: getattr(value, name) for name in functools.WRAPPER_ASSIGNMENTS if hasattr(value, name)}
    return _make_dispatcher, (), (dict(value.registry), attributes, named), None, None, _fill_dispatcher


_MADE_WITH_IT = frozenset({"register", "dispatch", "registry", "_clear_cache"})


def _make_dispatcher() -> Any:
    return functools.singledispatch(_not_filled)


def _not_filled(*args: Any) -> Any:
    raise TypeError("this function was called before all of it had arrived.")


def _fill_dispatcher(made: Any, state: tuple[dict[type, Any], dict[str, Any], dict[str, Any]]) -> None:
    registry, attributes, named = state
    for kind, function in registry.items():
        made.register(kind, function)
    for name, held in (named | attributes).items():
        setattr(made, name, held)


def _member(value: Any) -> Any:
    return type(value), (_not_filled,), _attributes(value, {"lock", "_method_cache"}), None, None, _fill_member


def _fill_member(made: Any, state: dict[str, Any]) -> None:
    vars(made).update(state)


def _new_type(value: Any) -> Any:
    return _make_named, (typing.NewType, (value.__name__, value.__supertype__), value.__module__, value.__qualname__)


def _parameters(value: Any) -> Any:
    return _make_named, (type(value), (value.__name__,), value.__module__, None)


def _alias(value: Any) -> Any:
    return _make_alias, (value.__name__, value.__value__, value.__type_params__)


def _attributes(value: Any, without: Collection[str]) -> dict[str, Any]:
    return {name: held for name, held in cast("dict[str, Any]", vars(value)).items() if name not in without}


def _open_file(value: io.TextIOWrapper) -> Any:
    if value in (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__) or value.closed:
        return NotImplemented
    raise TypeError("an open file stays here")  # cloudpickle would read it and send a text


def _ref(value: Ref[Any]) -> Any:
    from skyward.transport.refs import reduce

    return reduce(value)


def _once(value: Once[..., Any]) -> Any:
    return arrived, identified(value)


def _make_named(kind: Callable[..., Any], args: tuple[Any, ...], module: str, qualname: str | None) -> Any:
    made = kind(*args)
    made.__module__ = module
    if qualname is not None:
        made.__qualname__ = qualname
    return made


def _make_alias(name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    return cast(Any, typing).TypeAliasType(name, value, type_params=parameters)


# Members of classes have no name of their own: they are reached through their class, when that travels by value.
_NAMELESS: set[type] = {io.TextIOWrapper, Ref, functools.cached_property, functools.singledispatchmethod}
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    FunctionType: _dispatcher,
    _Cached: _cache,
    functools.cached_property: _member,
    functools.singledispatchmethod: _member,
    typing.NewType: _new_type,
    Once: _once,
    Ref: _ref,
    io.TextIOWrapper: _open_file,
    typing.ParamSpec: _parameters,
    typing.TypeVarTuple: _parameters,
}
if sys.version_info >= (3, 12):
    _REDUCERS[typing.TypeAliasType] = _alias
KINDS = set(_REDUCERS)
