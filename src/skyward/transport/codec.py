"""Messages as records: how they are encoded, checked, and dispatched to handlers.

    class Cancel(Message):                       ["cancel", id, grace, number of buffers]
        id: str
        grace: Annotated[float, Within(0, 60)]

    class Ended(Message, kw_only=True):          ["ended", id, {"s": seconds}, number of buffers]
        id: str
        seconds: Annotated[float | None, Wire("s")] = None

Encoder and decoder are generated from the annotations when first needed. Unknown names are ignored; what does not fit
is Malformed. A method `validate` checks what concerns several fields.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FunctionType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    NotRequired,
    ParamSpec,
    TypedDict,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from skyward.transport.frames import Malformed
from skyward.transport.records import Record, fields_of

__all__ = [
    "MOST",
    "Buffers",
    "Described",
    "Direction",
    "Length",
    "Message",
    "Raw",
    "Receiver",
    "Wire",
    "Within",
    "check",
    "decoder",
    "fits",
    "halves",
    "handles",
    "split",
]

Raw = list[Any]
Buffers = Sequence[Any]


class Described(TypedDict):
    """An exception as text."""

    type: str
    message: str
    traceback: str
    notes: NotRequired[list[str]]


_COUNT = (1 << 63) - 1
MOST = sys.float_info.max


class Within(Record):
    """Without it, an int is a count from zero, and a float is finite."""

    least: float
    most: float


class Length(Record):
    """Of a text, a list, an object, or the buffers."""

    least: int
    most: int


class Wire(Record):
    name: str


class Message(Record):
    """A subclass is one kind of message; it has buffers if it has a field `buffers`."""

    def encoded(self) -> tuple[Raw, Buffers]:
        cls, known = type(self), dict[str, Any]()
        hints, (fields, named) = _hints(cls), _fields(cls)
        lines = _written(cls, named, hints, known) if named else []
        parts = [repr(kind_of(cls)), *(f"self.{field}" for field in fields), *["made"] * bool(named)]
        count, buffers = ("len(self.buffers)", "self.buffers") if "buffers" in fields_of(cls) else ("0", "()")
        lines.append(f"return [{', '.join(parts)}, {count}], {buffers}")
        exec("def encoded(self):\n " + "\n ".join(lines), known)  # names of fields only
        cls.encoded = known["encoded"]
        return self.encoded()


class Direction:
    """Of a link: the classes in it are its messages."""

    @classmethod
    def messages(cls) -> dict[str, type[Message]]:
        found = [part for part in vars(cls).values() if isinstance(part, type) and issubclass(part, Message)]
        return {kind_of(part): part for part in found}


M = TypeVar("M", bound=Message)
S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")
Handler = Callable[Concatenate[S, M, P], R]

_HANDLED: dict[Any, type[Message]] = {}


def handles(message: type[M]) -> Callable[[Handler[S, M, P, R]], Handler[S, M, P, R]]:
    """Registers a method for these messages and their subclasses."""

    def register(method: Handler[S, M, P, R]) -> Handler[S, M, P, R]:
        _HANDLED[method] = message
        return method

    return register


class Receiver:
    """Dispatches the messages of a link to the handlers of `owners`."""

    def __init__(self, link: type[Direction], *owners: object) -> None:
        self._link = link
        methods: dict[type, Callable[..., Any]] = {
            _HANDLED[part]: part.__get__(owner)
            for owner in owners
            for cls in type(owner).__mro__
            for part in vars(cls).values()
            if isinstance(part, FunctionType) and part in _HANDLED
        }
        kinds = link.messages()
        found = {
            kind: (decoder(message), methods[cls])
            for kind, message in kinds.items()
            for cls in reversed(message.__mro__)
            if cls in methods
        }
        if missing := [kind for kind in kinds if kind not in found]:
            raise TypeError(f"nothing handles the messages {', '.join(missing)} of {link.__name__}")
        self._kinds = found

    def receive(self, message: Raw, buffers: Buffers, *context: Any) -> Any:
        """Raises Malformed if the message is none of this link."""
        entry = self._kinds.get(message[0])
        if entry is None:
            raise Malformed(f"{str(message[0])[:80]!r} is not a message of {self._link.__name__}")
        decode, method = entry
        return method(decode(message, buffers), *context)

    def receive_all(self, messages: list[Raw], buffers: list[Any], *context: Any) -> None:
        """Handles the messages of a frame; one that raises does not stop the others."""
        error: Exception | None = None
        for message, its_buffers in split(messages, buffers):
            try:
                self.receive(message, its_buffers, *context)
            except Exception as exc:  # raised when all have been heard
                error = error or exc
        if error is not None:
            raise error


def split(messages: Any, buffers: list[Any]) -> Iterator[tuple[Raw, list[Any]]]:
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


def halves(messages: list[Raw], buffers: Buffers) -> list[tuple[list[Raw], Buffers]]:
    middle = len(messages) // 2
    at = sum(message[-1] for message in messages[:middle])
    return [(messages[:middle], buffers[:at]), (messages[middle:], buffers[at:])]


def check(message: Message) -> None:
    """Raises Malformed, as the receiver would."""
    import json

    raw, buffers = message.encoded()
    decoder(type(message))(json.loads(json.dumps(raw)), buffers)


def kind_of(message: type[Message]) -> str:
    return vars(message)["__kind"] or re.sub(r"(?<=.)(?=[A-Z])", "_", message.__name__).lower()


@cache
def decoder(message: type[M]) -> Callable[[Raw, Buffers], M]:
    known: dict[str, Any] = {"cls": message, "new": object.__new__, "inf": math.inf}
    known |= {"wrong_length": _wrong_length, "wrong_field": _wrong_field, "missing": _missing}
    kind, hints, (fields, named) = kind_of(message), _hints(message), _fields(message)
    count = len(fields) + bool(named)
    lines = [f"if len(wire) != {count + 2}:", f" raise wrong_length({kind!r}, wire, {count})"]
    for at, field in enumerate(fields, 1):
        lines += _read(hints[field], field, f"wire[{at}]", kind, known)
    if named:
        lines += [f"given = wire[{count}]", "if given.__class__ is not dict:"]
        lines += [f" raise wrong_field({kind!r}, 'metadata', given)"]
    for field in named:
        lines += _read_named(message, hints[field], field, kind, known)
    if "buffers" in fields_of(message) and (length := _extra(hints["buffers"], Length)) is not None:
        lines += [f"if not {length.least} <= len(buffers) <= {length.most}:"]
        lines += [f" raise wrong_field({kind!r}, 'buffers', len(buffers))"]
    lines += ["made = new(cls)", *(f"made.{field} = {field}" for field in fields_of(message))]
    lines += ["made.validate()"] * hasattr(message, "validate") + ["return made"]
    exec("def decode(wire, buffers):\n " + "\n ".join(lines), known)  # names and types of fields only
    return known["decode"]


def _hints(part: Any) -> dict[str, Any]:
    return get_type_hints(part, include_extras=True)


def _fields(message: type[Message]) -> tuple[list[str], list[str]]:
    """Those in its list, and those in its object."""
    names = [name for name in fields_of(message) if name != "buffers"]
    first = 1 if vars(message)["__kw_only"] else len(names)
    return names[:first], names[first:]


E = TypeVar("E", bound=Record)


def _extra(hint: Any, kind: type[E]) -> E | None:
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, kind)), None)


def _name(hint: Any, field: str) -> str:
    wire = _extra(hint, Wire)
    return field if wire is None else wire.name


def _written(message: type[Message], named: list[str], hints: dict[str, Any], known: dict[str, Any]) -> list[str]:
    defaults = vars(message)["__defaults"]
    required = [f"{_name(hints[field], field)!r}: self.{field}" for field in named if field not in defaults]
    lines = [f"made = {{{', '.join(required)}}}"]
    for field in named:
        if field in defaults:
            known[f"default_{field}"] = defaults[field]
            lines.append(f"if self.{field} is not default_{field}:")
            lines.append(f" made[{_name(hints[field], field)!r}] = self.{field}")
    return lines


def _read_named(message: type[Message], hint: Any, field: str, kind: str, known: dict[str, Any]) -> list[str]:
    name, defaults = _name(hint, field), vars(message)["__defaults"]
    read = _read(hint, field, f"given[{name!r}]", kind, known)
    if field not in defaults:
        return [f"if {name!r} not in given:", f" raise missing({kind!r}, {name!r})", *read]
    known[f"default_{field}"] = defaults[field]
    return [f"{field} = default_{field}", f"if {name!r} in given:", *(f" {line}" for line in read)]


def _read(hint: Any, field: str, source: str, kind: str, known: dict[str, Any]) -> list[str]:
    lines = [f"{field} = {source}"]
    if test := _test(hint, field, known):
        lines += [f"if not ({test}):", f" raise wrong_field({kind!r}, {field!r}, {field})"]
    return lines


def _test(hint: Any, value: str, known: dict[str, Any], extras: tuple[Any, ...] = ()) -> str:
    """An expression that is true if a JSON value fits a type; empty if any does."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _test(parts[0], value, known, parts[1:])
    if origin is NotRequired:
        return _test(parts[0], value, known)
    if hint is Any:
        return ""
    if hint is NoneType:
        return f"{value} is None"
    if is_typeddict(hint):
        known[f"fits_{hint.__name__}"] = _fitting(hint)
        return f"fits_{hint.__name__}({value})"
    if origin in (UnionType, Union):
        tests = [_test(part, value, known, extras) for part in parts]
        tests = [f"{_told_apart(part, value)}{test}" for part, test in zip(parts, tests, strict=True)]
        return " or ".join(f"({test})" for test in tests) if all(tests) else ""
    if origin is Literal:
        return f"{value}.__class__ is str and {value} in {parts!r}"
    if hint is int or hint is float:
        within = next((extra for extra in extras if isinstance(extra, Within)), None)
        if within is None:
            within = Within(0, _COUNT) if hint is int else Within(-MOST, MOST)
        return _number(hint, value, within.least, within.most)
    if origin is tuple:
        tests = [f"{value}.__class__ is list", f"len({value}) == {len(parts)}"]
        inner = [_test(part, f"{value}[{at}]", known) for at, part in enumerate(parts)]
        return " and ".join([*tests, *(f"({test})" for test in inner if test)])
    tests = [f"{value}.__class__ is {(origin or hint).__name__}"]
    if (length := next((extra for extra in extras if isinstance(extra, Length)), None)) is not None:
        tests.append(f"{length.least} <= len({value}) <= {length.most}")
    if parts and (inside := _test(parts[-1], f"{value}_", known)):
        among = value if origin is list else f"{value}.values()"
        tests.append(f"all(({inside}) for {value}_ in {among})")
    return " and ".join(tests)


def fits(part: Any, given: Any) -> bool:
    return _fitting(part)(given)


@cache
def _told_apart(part: Any, value: str) -> str:
    """What comes before the test of one of several TypedDicts: their literals, since the test itself raises."""
    literals = [(field, get_args(hint)) for field, hint in _hints(part).items()] if is_typeddict(part) else []
    tests = [f"{value}.get({field!r}) in {words!r}" for field, words in literals if words and type(words[0]) is str]
    return " and ".join([f"{value}.__class__ is dict", *tests, ""]) if tests else ""


def _fitting(part: Any) -> Callable[[Any], bool]:
    known: dict[str, Any] = {"wrong_field": _wrong_field, "missing": _missing, "inf": math.inf}
    kind, lines = part.__name__.lower(), ["if given.__class__ is not dict:", " return False"]
    for field, hint in _hints(part).items():
        if part.__total__ and get_origin(hint) is not NotRequired:
            lines += [f"if {field!r} not in given:", f" raise missing({kind!r}, {field!r})"]
        lines.append(f"if {field!r} in given:")
        lines += [f" {line}" for line in _read(hint, field, f"given[{field!r}]", kind, known)]
    exec("def fits(given):\n " + "\n ".join([*lines, "return True"]), known)  # names and types of fields only
    return known["fits"]


def _number(kind: type, value: str, least: float, most: float) -> str:
    whole = f"{value}.__class__ is int"
    classes = whole if kind is int else f"({value}.__class__ is float or {whole})"
    return f"{classes} and {least!r} <= {value} <= {most!r}"


def _wrong_length(kind: str, wire: Raw, fields: int) -> Malformed:
    return Malformed(f"{kind!r} with {len(wire) - 2} fields instead of {fields}")


def _wrong_field(kind: str, field: str, value: Any) -> Malformed:
    return Malformed(f"the field {field} of {kind!r} cannot be {str(value)[:80]}")


def _missing(kind: str, field: str) -> Malformed:
    return Malformed(f"{kind!r} without {field}")
