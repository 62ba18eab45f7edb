"""Values as short one-line texts for messages, quick however large the value is."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import reprlib
from collections import UserString
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from types import FunctionType, SimpleNamespace
from typing import Any, cast

from skyward.api.secret import any_hidden, hide, hide_bytes

__all__ = ["brief", "described", "glance"]

_SIMPLE = frozenset((int, float, bool, str, bytes, complex, type(None)))
_NUMBERS = frozenset((int, float, bool, type(None)))
_LARGE = 10**18
_BYTES = 40
_EDGE = 16 << 10
"""How much of each end of a long text is searched for secrets."""
_BITS = 10_000  # a longer number takes long to write, and Python refuses some


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, 60, 200, 60

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(_masked(x), level)

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() <= _BITS else f"<int of {x.bit_length()} bits>"

    def repr_bytes(self, x: bytes | bytearray, level: int) -> str:
        if any_hidden() and (masked := hide_bytes(bytes(x[:_EDGE]))) != x[:_EDGE]:
            x = masked
        return repr(x) if len(x) <= _BYTES else f"{x[:_BYTES]!r}..."

    repr_bytearray = repr_bytes

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        return f"{{{self._pairs(x.items(), len(x), level, self.repr1, ': ')}}}"

    def repr_set(self, x: Collection[Any], level: int) -> str:
        return f"{{{self._items(x, level)}}}" if x else "set()"

    def repr_frozenset(self, x: Collection[Any], level: int) -> str:
        return f"frozenset({{{self._items(x, level)}}})" if x else "frozenset()"

    def repr_instance(self, x: Any, level: int) -> str:
        kind = cast(Any, type(x))
        own = kind.__repr__
        if isinstance(own, FunctionType) and own.__code__.co_filename not in _USUAL:
            return super().repr_instance(x, level)
        match x:
            case str() | UserString():
                return self.repr_str(str(x[: _EDGE if any_hidden() else self.maxstring + 1]), level)
            case bytes() | bytearray():
                return self.repr_bytes(x, level)
            case tuple() if hasattr(kind, "_fields"):
                held = self._pairs(
                    zip(kind._fields, cast("tuple[Any, ...]", x), strict=False), len(kind._fields), level, _plain, "="
                )
            case _ if hasattr(kind, "__dataclass_fields__"):
                shown = [(f.name, getattr(x, f.name)) for f in dataclasses.fields(x) if f.repr]
                held = self._pairs(shown, len(shown), level, _plain, "=")
            case BaseException():
                held = self._items(x.args, level)
            case functools.partial():
                held = f"{self.repr1(x.func, level - 1)}, ..."
            case SimpleNamespace():
                held = self._pairs(vars(x).items(), len(vars(x)), level, _plain, "=")
            case range() | memoryview():
                return super().repr_instance(cast(object, x), level)
            case Mapping() | Sequence() | Set() if _reads_as_it_likes(kind):
                return object.__repr__(cast(object, x))
            case Mapping():
                held = self.repr_dict(cast("Mapping[Any, Any]", x), level)
            case Sequence() | Set():
                held = f"[{self._items(cast('Collection[Any]', x), level)}]"
            case _:
                return super().repr_instance(x, level)
        return f"{kind.__name__}({held})"

    def _items(self, x: Collection[Any], level: int) -> str:
        shown = [self.repr1(item, level - 1) for item in itertools.islice(x, self.maxlist)] if level > 0 else []
        return ", ".join(shown if len(x) == len(shown) else [*shown, "..."])

    def _pairs(self, pairs: Iterable[Any], count: int, level: int, name: Callable[[Any, int], str], sign: str) -> str:
        found = itertools.islice(pairs, self.maxlist if level > 0 else 0)
        shown = [f"{name(key, level - 1)}{sign}{self.repr1(value, level - 1)}" for key, value in found]
        return ", ".join(shown if count == len(shown) else [*shown, "..."])


def _plain(name: str, level: int) -> str:
    return name


def _reads_as_it_likes(kind: type) -> bool:
    """Whether reading items runs user code, which may use a disk or a network."""
    methods = [getattr(kind, name, None) for name in ("__len__", "__iter__", "__getitem__", "items")]
    return any(isinstance(each, FunctionType) and each.__code__.co_filename not in _OF_PYTHON for each in methods)


_OF_PYTHON = frozenset((collections.__file__, Sequence.__iter__.__code__.co_filename))
_USUAL = frozenset((collections.__file__, dataclasses.__file__, reprlib.__file__))
_short = _Short()


def brief(value: object, limit: int = 60) -> str:
    try:
        text = " ".join(_short.repr(value).split())
    except Exception:  # a broken repr of the user's must not hide the message it would be part of
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def glance(args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int = 160) -> str:
    """In microseconds: types with foreign `__repr__` show only type and size."""
    parts = list(map(_glanced, args))
    if kwargs:
        from skyward.api.secret import looks_secret

        parts += [f"{key}={'***' if looks_secret(key) else _glanced(value)}" for key, value in kwargs.items()]
    given = ", ".join(parts)
    return given if len(given) <= limit else given[: limit - 3] + "..."


def _masked(text: str) -> str:
    """Before shortening: half a secret would not be recognised."""
    if not any_hidden():
        return text
    return hide(text if len(text) <= 2 * _EDGE else text[:_EDGE] + text[-_EDGE:])


def _glanced(value: object) -> str:
    kind = type(value)
    if kind in _NUMBERS and (not isinstance(value, int) or -_LARGE < value < _LARGE):
        return repr(value)
    if kind in _SIMPLE:
        return brief(value)
    try:
        size = getattr(value, "shape", None) or len(cast(Any, value))
        return f"<{kind.__name__} {size}>"
    except Exception:  # code of the user's
        return f"<{kind.__name__}>"


def described(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int = 160) -> str:
    from skyward.api.secret import looks_secret

    named = (f"{key}={'***' if looks_secret(key) else brief(value)}" for key, value in kwargs.items())
    given = ", ".join([*map(brief, args), *named])
    return f"{name}({given if len(given) <= limit else given[: limit - 3] + '...'})"
