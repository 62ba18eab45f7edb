"""Messages as records: how they are written, how they are read and checked, and who handles them.

    class Cancel(Message):                   ["cancel", id, grace, number of buffers]
        id: str
        grace: Annotated[float, Within(0, 60)]

The kind is the name of the class. The encoder and the decoder of a class are generated from its annotations when they
are first needed. What does not fit them is Malformed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from skyward.transport.frames import Malformed
from skyward.transport.records import Record

__all__ = ["Direction", "Message", "Receiver", "Within", "decoder", "handles"]

_COUNT = (1 << 63) - 1


class Within(Record):
    """The limits of a number. Without them, an int is a count from zero, and a float is finite."""

    least: float
    most: float


class Message(Record):
    """A subclass is one kind of message; it has buffers if it has a field `buffers`."""

    def encoded(self) -> tuple[list[Any], Sequence[Any]]:
        """The message as it is sent, and its buffers."""
        cls, made = type(self), dict[str, Any]()
        fields, has_buffers = _fields(cls)
        parts = [repr(_kind(cls)), *(f"self.{field}" for field in fields)]
        count, buffers = ("len(self.buffers)", "self.buffers") if has_buffers else ("0", "()")
        exec(f"def encoded(self):\n return [{', '.join(parts)}, {count}], {buffers}", made)  # names of fields only
        cls.encoded = made["encoded"]
        return self.encoded()


class Direction:
    """One direction between two processes: the classes in it are its messages."""

    @classmethod
    def messages(cls) -> dict[str, type[Message]]:
        """The class of each kind."""
        found = [part for part in vars(cls).values() if isinstance(part, type) and issubclass(part, Message)]
        return {_kind(part): part for part in found}


M = TypeVar("M", bound=Message)
S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")
Handler = Callable[Concatenate[S, M, P], R]

_HANDLED: dict[Any, type[Message]] = {}


def handles(message: type[M]) -> Callable[[Handler[S, M, P, R]], Handler[S, M, P, R]]:
    """Registers a method as the one that handles these messages, for every `Receiver` of its object."""

    def register(method: Handler[S, M, P, R]) -> Handler[S, M, P, R]:
        _HANDLED[method] = message
        return method

    return register


class Receiver:
    """The methods of `owners` that handle the messages of a link; there is one for each."""

    def __init__(self, link: type[Direction], *owners: object) -> None:
        self._link = link
        methods = {
            _HANDLED[part]: part.__get__(owner)
            for owner in owners
            for cls in type(owner).__mro__
            for part in vars(cls).values()
            if isinstance(part, FunctionType) and part in _HANDLED
        }
        kinds = link.messages()
        if missing := [kind for kind, message in kinds.items() if message not in methods]:
            raise TypeError(f"nothing handles the messages {', '.join(missing)} of {link.__name__}")
        self._kinds = {kind: (decoder(message), methods[message]) for kind, message in kinds.items()}

    def hear(self, message: list[Any], buffers: list[Any], *context: Any) -> Any:
        """Has a message handled, and returns what that returns; raises Malformed if it is none of this link."""
        entry = self._kinds.get(message[0])
        if entry is None:
            raise Malformed(f"{str(message[0])[:80]!r} is not a message of {self._link.__name__}")
        decode, method = entry
        return method(decode(message, buffers), *context)


def decoder(message: type[M]) -> Callable[[list[Any], list[Any]], M]:
    """The function that makes a message of what came; it raises Malformed."""
    kind, hints = _kind(message), get_type_hints(message, include_extras=True)
    fields, has_buffers = _fields(message)
    lines = [f"if len(wire) != {len(fields) + 2}:", f" raise wrong_length({kind!r}, wire, {len(fields)})"]
    for at, field in enumerate(fields, 1):
        if test := _test(hints[field], field):
            lines += [f"{field} = wire[{at}]", f"if not ({test}):", f" raise wrong_field({kind!r}, {field!r}, {field})"]
    lines += ["made = new(cls)", *(f"made.{field} = wire[{at}]" for at, field in enumerate(fields, 1))]
    lines += ["made.buffers = buffers"] * has_buffers + ["return made"]
    made: dict[str, Any] = {"cls": message, "new": object.__new__}
    made |= {"wrong_length": _wrong_length, "wrong_field": _wrong_field}
    exec("def decode(wire, buffers):\n " + "\n ".join(lines), made)  # names and types of fields only
    return made["decode"]


def _kind(message: type[Message]) -> str:
    return re.sub(r"(?<=.)(?=[A-Z])", "_", message.__name__).lower()


def _fields(message: type[Message]) -> tuple[list[str], bool]:
    names: tuple[str, ...] = vars(message)["__match_args__"]
    return [name for name in names if name != "buffers"], "buffers" in names


def _test(hint: Any, value: str) -> str:
    """An expression that is true if a value from JSON fits a type; empty if any value does."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return ""
    if hint is NoneType:
        return f"{value} is None"
    if origin is Annotated:
        limits: Within = parts[1]
        return _number(parts[0], value, limits.least, limits.most)
    if origin in (UnionType, Union):
        return " or ".join(f"({_test(part, value)})" for part in parts)
    if origin is Literal:
        return f"{value}.__class__ is str and {value} in {parts!r}"
    if origin is tuple:
        tests = [f"{value}.__class__ is list", f"len({value}) == {len(parts)}"]
        return " and ".join([*tests, *(f"({_test(part, f'{value}[{at}]')})" for at, part in enumerate(parts))])
    if origin in (list, dict):
        each, inside = f"{value}_", _test(parts[-1], f"{value}_")
        among = value if origin is list else f"{value}.values()"
        every = f" and all({inside} for {each} in {among})" if inside else ""
        return f"{value}.__class__ is {origin.__name__}{every}"
    if hint is int:
        return _number(int, value, 0, _COUNT)
    if hint is float:
        return _number(float, value, -sys.float_info.max, sys.float_info.max)
    return f"{value}.__class__ is {hint.__name__}"


def _number(kind: type, value: str, least: float, most: float) -> str:
    whole = f"{value}.__class__ is int"
    classes = whole if kind is int else f"({value}.__class__ is float or {whole})"
    return f"{classes} and {least!r} <= {value} <= {most!r}"


def _wrong_length(kind: str, wire: list[Any], fields: int) -> Malformed:
    return Malformed(f"{kind!r} with {len(wire) - 2} fields instead of {fields}")


def _wrong_field(kind: str, field: str, value: Any) -> Malformed:
    return Malformed(f"the field {field} of {kind!r} cannot be {str(value)[:80]}")
