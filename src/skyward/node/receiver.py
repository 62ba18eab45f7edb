"""What a link is, and how each of its messages reaches the method that handles it.

What comes is compared with what the link declares before any method sees it: a message of another kind, with other
fields or with fields of other types is Malformed. A message `cancel` that the client has sent is handled by the method
`_from_client_cancel` of the receiver. The method has the fields of `ClientToAgent.cancel` as parameters; before them it
may have others, which `Receiver.hear` is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar, cast

from skyward.transport.frames import Malformed

__all__ = [
    "Check",
    "Direction",
    "Field",
    "Malformed",
    "Message",
    "Receiver",
    "halves",
    "is_number",
    "is_numbers",
    "is_texts",
    "is_whole",
    "split",
]


Message = list[Any]


class Direction:
    """One direction between two processes."""

    sender: ClassVar[str]
    verdicts: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def kinds(cls) -> dict[str, tuple[str, ...]]:
        """The fields of each kind of message; `buffers` is the last one if the kind has buffers."""
        found: dict[str, tuple[str, ...]] = {}
        for name, value in vars(cls).items():
            if isinstance(value, staticmethod):
                code = cast("FunctionType", value.__func__).__code__
                found[name] = code.co_varnames[: code.co_argcount]
        return found

    @classmethod
    def checks(cls, kind: str) -> tuple[Field, ...]:
        """Of a kind of message, where its fields are, and what they must be."""
        made = cast("FunctionType", getattr(cls, kind))
        names = [name for name in cls.kinds()[kind][int(kind == "verdict") :] if name != "buffers"]
        return tuple((at, *check_for(name, made.__annotations__[name])) for at, name in enumerate(names, 1))


class Receiver:
    """The methods of `owners` that handle the messages of a link: one for each kind, and none besides.

    `checks` look into the fields of some kinds, where the types of the fields do not say enough.
    """

    def __init__(self, link: type[Direction], *owners: object, checks: Mapping[str, Check] | None = None) -> None:
        self._link = link
        self._methods: dict[str, tuple[Callable[..., Any], int, bool, tuple[Field, ...], Check | None]] = {}
        prefix, kinds = f"_from_{link.sender}_", link.kinds()
        found = {name: getattr(owner, name) for owner in owners for name in dir(owner) if name.startswith(prefix)}
        if wrong := found.keys() ^ {prefix + kind for kind in kinds}:
            raise TypeError(f"{link.__name__} and its receiver differ in {', '.join(sorted(wrong))}")
        for kind, fields in kinds.items():
            method = found[prefix + kind]
            code = method.__code__
            if code.co_varnames[code.co_argcount - len(fields) : code.co_argcount] != fields:
                raise TypeError(f"{method.__qualname__} does not have the fields of {link.__name__}.{kind}: {fields}")
            entry = method, int(kind != "verdict"), fields[-1:] == ("buffers",), link.checks(kind)
            for name in link.verdicts if kind == "verdict" else (kind,):
                self._methods[name] = *entry, (checks or {}).get(name)

    def hear(self, message: Message, buffers: list[Any], *context: Any) -> Any:
        """Calls the method for a message, and returns what it returns; raises Malformed if it is none of this link."""
        entry = self._methods.get(message[0])
        if entry is None:
            raise Malformed(f"{str(message[0])[:80]!r} is not a message of {self._link.__name__}")
        method, first, has_buffers, fields, check = entry
        if len(message) != len(fields) + 2:
            raise Malformed(f"{message[0]!r} with {len(message) - 2} fields instead of {len(fields)}")
        for at, types, test in fields:
            value = message[at]
            if value.__class__ not in types or (test is not None and not test(value)):
                raise Malformed(f"field {at} of {message[0]!r} cannot be {str(value)[:80]}")
        if check is not None:
            check(message, buffers)
        if has_buffers:
            return method(*context, *message[first:-1], buffers)
        return method(*context, *message[first:-1])

    def hear_all(self, messages: list[Message], buffers: list[Any], *context: Any) -> None:
        """Calls the methods for the messages of a frame; one that raises keeps none of the others from theirs."""
        error: Exception | None = None
        for message, its_buffers in split(messages, buffers):
            try:
                self.hear(message, its_buffers, *context)
            except Exception as exc:  # raised when all have been heard
                error = error or exc
        if error is not None:
            raise error


def split(messages: Any, buffers: list[Any]) -> Iterator[tuple[Message, list[Any]]]:
    """The messages of a frame, each with its buffers; raises Malformed at the first that does not have this form."""
    if type(messages) is not list:
        raise Malformed("a frame without a list of messages")
    at = 0
    for message in cast("list[Any]", messages):
        if message.__class__ is not list or len(message) < 2:
            raise Malformed("a message that is not a list of a kind and its parts")
        count = message[-1]
        if message[0].__class__ is not str or count.__class__ is not int or not 0 <= count <= len(buffers) - at:
            raise Malformed("a message without its kind or its number of buffers")
        yield message, buffers[at : at + count]
        at += count


def halves(messages: list[Message], buffers: Sequence[Any]) -> list[tuple[list[Message], Sequence[Any]]]:
    """Messages that are too much for one frame, with their buffers, as two parts."""
    middle = len(messages) // 2
    at = sum(message[-1] for message in messages[:middle])
    return [(messages[:middle], buffers[:at]), (messages[middle:], buffers[at:])]


# What the fields of messages may be, by their names and types in `node/protocol.py`: the tests that a receiver makes.
#
# JSON has few types, so a field is a class or two and, where that does not say enough, a function.


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
        "OldMessage": (frozenset((list,)), _is_message),
        "Message": (frozenset((list,)), _is_message),
    },
)
