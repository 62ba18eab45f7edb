"""What the fields of messages may be, by their names and types in `node/protocol.py`: the tests that a receiver makes.

JSON has few types, so a field is a class or two and, where that does not say enough, a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

__all__ = ["Check", "Field", "check_for", "is_number", "is_numbers", "is_texts", "is_whole"]

Test = Callable[[Any], bool]
Field = tuple[int, frozenset[type], Test | None]
"""Where a field is in its message, which classes it may have, and what else must hold."""
Check = Callable[[list[Any], list[Any]], None]
"""Looks into a message and its buffers; raises Malformed."""

_MOST = 1 << 63
_SIGNED = ("code", "signal", "status")
_ENDLESS = ("grace", "timeout")


def is_whole(value: Any) -> bool:
    """Whether it is a number of things: whole, not negative, and not beyond any counter."""
    return value.__class__ is int and 0 <= value < _MOST


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return (value.__class__ is float and math.isfinite(value)) or _is_signed(value)


def is_texts(value: Any) -> bool:
    """Whether it is a list of texts."""
    return value.__class__ is list and all(each.__class__ is str for each in value)


def is_numbers(value: Any) -> bool:
    """Whether it is a list of whole numbers."""
    return value.__class__ is list and all(map(is_whole, value))


def check_for(name: str, annotation: str) -> tuple[frozenset[type], Test | None]:
    """The classes that a field may have, and what else must hold for it."""
    types, none = annotation.removesuffix(" | None"), annotation.endswith(" | None")
    classes, test = _ANY if types == "Any" else _KINDS[types]
    if types == "int" and name in _SIGNED:
        test = _is_signed
    if types == "float" and name in _ENDLESS:
        test = _is_not_nan
    if not none:
        return classes, test
    given = test
    return classes | {type(None)}, None if given is None else lambda value: value is None or given(value)


def _is_signed(value: Any) -> bool:
    return value.__class__ is int and -_MOST <= value < _MOST


def _is_not_nan(value: Any) -> bool:
    return value == value


def _is_message(value: Any) -> bool:
    return len(value) > 1 and value[0].__class__ is str and is_whole(value[-1])


def _has_texts(value: dict[str, Any]) -> bool:
    return all(each.__class__ is str for each in value.values())


def _has_objects(value: list[Any]) -> bool:
    return all(each.__class__ is dict for each in value)


def _has_places(value: dict[str, Any]) -> bool:
    return all(
        each.__class__ is list and len(each) == 2 and each[0].__class__ is str and is_whole(each[1])
        for each in value.values()
    )


_ANY = frozenset[type]((str, int, float, bool, list, dict, type(None))), None
_KINDS = cast(
    "dict[str, tuple[frozenset[type], Test | None]]",
    {
        "str": (frozenset((str,)), None),
        "bool": (frozenset((bool,)), None),
        "int": (frozenset((int,)), is_whole),
        "float": (frozenset((float, int)), is_number),
        "dict[str, Any]": (frozenset((dict,)), None),
        "Mapping[str, Any]": (frozenset((dict,)), None),
        "dict[str, str]": (frozenset((dict,)), _has_texts),
        "dict[str, tuple[str, int]]": (frozenset((dict,)), _has_places),
        "list[Any]": (frozenset((list,)), None),
        "list[int]": (frozenset((list,)), is_numbers),
        "list[str]": (frozenset((list,)), is_texts),
        "list[dict[str, Any]]": (frozenset((list,)), _has_objects),
        "Sequence[Mapping[str, Any]]": (frozenset((list,)), _has_objects),
        "Message": (frozenset((list,)), _is_message),
    },
)
