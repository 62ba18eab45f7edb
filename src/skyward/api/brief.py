"""Values as short texts, for messages: on one line, and quick to make, however large the value is."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, cast

__all__ = ["brief", "described", "glance"]

_SIMPLE = frozenset((int, float, bool, str, bytes, complex, type(None)))
_NUMBERS = frozenset((int, float, bool, type(None)))
_LARGE = 10**18
_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, 60, 200, 60


def brief(value: object, limit: int = 60) -> str:
    """A value as a text of at most `limit` characters."""
    try:
        text = " ".join(_short.repr(value).split())
    except Exception:  # a broken repr of the user's must not hide the message it would be part of
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def glance(args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int = 160) -> str:
    """Arguments as a text, made in microseconds: of objects whose repr is code of others only type and size."""
    parts = list(map(_glanced, args))
    if kwargs:
        from skyward.api.secret import looks_secret

        parts += [f"{key}={'***' if looks_secret(key) else _glanced(value)}" for key, value in kwargs.items()]
    given = ", ".join(parts)
    return given if len(given) <= limit else given[: limit - 3] + "..."


def _glanced(value: object) -> str:
    kind = type(value)
    if kind in _NUMBERS and (kind is not int or -_LARGE < cast(int, value) < _LARGE):
        return repr(value)
    if kind in _SIMPLE:
        return brief(value)
    try:
        size = getattr(value, "shape", None) or len(cast(Any, value))
        return f"<{kind.__name__} {size}>"
    except Exception:  # code of the user's
        return f"<{kind.__name__}>"


def described(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int = 160) -> str:
    """A call as a text: `train(3, rate=0.1)`."""
    from skyward.api.secret import looks_secret

    named = (f"{key}={'***' if looks_secret(key) else brief(value)}" for key, value in kwargs.items())
    given = ", ".join([*map(brief, args), *named])
    return f"{name}({given if len(given) <= limit else given[: limit - 3] + '...'})"
