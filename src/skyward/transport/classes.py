"""Classes that travel by value: pickled once, and made once by the receiver, as long as they stay as they are.

    sender      class ──its parts are those of before?──► the same bytes    else they are made again
    receiver    bytes ──their digest is known, and the parts of its class are those of before?──► that class

The parts of a class are all that it refers to, down to objects that cannot change: any edit, on either side, gives
other parts. Classes with a part that may change unseen travel as cloudpickle has it, every time.
"""

from __future__ import annotations

import dataclasses
import operator
import pickle
import typing
import weakref
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
    UnionType,
)
from typing import Any

import cloudpickle

from skyward.transport.payload import names_in

__all__ = ["Classes", "load_class"]

_dataclasses: Any = dataclasses
_typing: Any = typing
_type: Callable[[Any], Any] = type
_FIXED: frozenset[Any] = frozenset(
    {
        *(int, float, str, bytes, bool, complex, range, type(None), EllipsisType),
        *(CodeType, ModuleType, BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType),
        *map(_type, (dataclasses.MISSING, _dataclasses._FIELD, typing.ClassVar)),
        *(_dataclasses._HAS_DEFAULT_FACTORY_CLASS, _dataclasses._DataclassParams),
    }
)
_ALIASES: frozenset[Any] = frozenset({GenericAlias, UnionType, *map(_type, (_typing.List[int], _typing.Optional[int]))})
_FOLLOWED = _FIXED | _ALIASES | {dict, list, tuple, staticmethod, classmethod, property, dataclasses.Field}
_MOST_PARTS, _MOST_CLASSES = 1000, 256

Parts = list[Any]
Reduced = tuple[Callable[..., type], tuple[str, bytes]]


class Classes:
    def __init__(self, dump: Callable[[type], bytes]) -> None:
        self._dump = dump
        self._known: weakref.WeakKeyDictionary[type, tuple[Parts, Reduced] | None] = weakref.WeakKeyDictionary()

    def reduced(self, cls: type) -> Reduced | None:
        """None if that is cloudpickle's business."""
        known = self._known.get(cls, _UNKNOWN)
        if known is None:
            return None
        if known is _UNKNOWN and _is_by_name(cls):
            self._known[cls] = None
            return None
        parts = _parts_of(cls)
        if known is not _UNKNOWN and _are_same(known[0], parts):
            return known[1]
        if len(parts) > _MOST_PARTS or not all(_is_followed(part, cls) for part in parts):
            self._known[cls] = None
            return None
        import hashlib  # most calls send none

        data = self._dump(cls)
        made = load_class, (hashlib.blake2b(data, digest_size=16).hexdigest(), data)
        self._known[cls] = parts, made
        return made


_UNKNOWN: Any = object()
_internals: Any = cloudpickle.cloudpickle
_is_by_name: Callable[[Any], bool] = _internals._should_pickle_by_reference
_made: dict[str, tuple[type, Parts]] = {}


def load_class(digest: str, data: bytes, loads: Callable[[bytes], type] = pickle.loads) -> type:
    known = _made.get(digest)
    if known is not None and _are_same(known[1], _parts_of(known[0])):
        return known[0]
    cls = loads(data)
    if len(_made) >= _MOST_CLASSES:
        _made.clear()
    _made[digest] = cls, _parts_of(cls)
    return cls


def _parts_of(cls: type) -> Parts:
    """In a fixed order; stops a little after `_MOST_PARTS`."""
    found: Parts = [cls.__qualname__, *vars(cls)]
    waiting: list[Any] = [*cls.__bases__, *vars(cls).values()]
    seen: set[int] = set()
    while waiting and len(found) <= _MOST_PARTS:
        part = waiting.pop()
        found.append(part)
        kind = _type(part)
        if kind in _FIXED or id(part) in seen:
            continue
        seen.add(id(part))
        if kind is FunctionType:
            if part.__module__ == cls.__module__:  # others have a name by which they are found
                scope = part.__globals__
                waiting += [part.__code__, part.__defaults__, part.__kwdefaults__, part.__annotations__, vars(part)]
                waiting += [scope[name] for name in names_in(part.__code__) if name in scope]
                for name, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
                    if name != "repr_running":  # of dataclasses: which objects are being shown
                        waiting.append(_content(cell))
        elif kind is tuple or kind is list:
            waiting += part
        elif kind is dict:
            waiting += [*part, *part.values()]
        elif kind is staticmethod or kind is classmethod:
            waiting.append(part.__func__)
        elif kind is property:
            waiting += [part.fget, part.fset, part.fdel, part.__doc__]
        elif kind is dataclasses.Field:
            waiting += [part.name, part.type, part.default, part.default_factory, part.kw_only, part._field_type]
            waiting += [*part.metadata, *part.metadata.values()]
        elif kind in _ALIASES:
            waiting += part.__args__
            found.append(getattr(part, "__origin__", None))
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return cell  # it is empty, and no part of which we know that it stays so


def _are_same(before: Parts, now: Parts) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


def _is_followed(part: Any, cls: type) -> bool:
    """Whether a part cannot change, or its own references count as parts, too."""
    if isinstance(part, FunctionType):
        return part.__module__ == cls.__module__ or _is_by_name(part)
    if isinstance(part, BuiltinFunctionType):
        return part.__self__ is None or isinstance(part.__self__, ModuleType)
    if isinstance(part, type | ModuleType):
        return part is cls or part is type(None) or _is_by_name(part)
    return _type(part) in _FOLLOWED
