"""Values as short texts, for messages: on one line, and quick to make, however large the value is."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

__all__ = ["brief", "described"]

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, 60, 200, 60


def brief(value: object, limit: int = 60) -> str:
    """A value as a text of at most `limit` characters."""
    try:
        text = " ".join(_short.repr(value).split())
    except Exception:  # a broken repr of the user's must not hide the message it would be part of
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def described(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int = 160) -> str:
    """A call as a text: `train(3, rate=0.1)`."""
    from skyward.api.secret import looks_secret

    named = (f"{key}={'***' if looks_secret(key) else brief(value)}" for key, value in kwargs.items())
    given = ", ".join([*map(brief, args), *named])
    return f"{name}({given if len(given) <= limit else given[: limit - 3] + '...'})"
