"""Keys of shared dicts and members of shared sets, as texts: the same text if and only if Python calls them equal.

They are plain values, so that the server can compare them without unpickling anything.
"""

from __future__ import annotations

import math
from operator import index
from typing import Any

from skyward.errors import InvalidArgument

__all__ = ["read_key", "written_key"]


def written_key(key: object) -> str:
    """The text of a key; raises InvalidArgument for what cannot be one."""
    if type(key) is str or type(key) is int:
        return repr(key)
    return repr(_plain(key, key))


def read_key(text: str) -> Any:
    """The key again."""
    import ast  # not needed by those who only look things up

    return ast.literal_eval(text)


def _plain(key: Any, whole: object) -> object:
    """The key in the form that all equal keys have: 1.0 and True are 1."""
    if key is None:
        return None
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bytes):
        return bytes(key)
    if isinstance(key, tuple):
        return tuple(_plain(part, whole) for part in key)  # pyright: ignore[reportUnknownVariableType] - any parts
    if isinstance(key, float):
        if not math.isfinite(key):
            raise InvalidArgument(f"{whole!r} cannot be a key of a shared collection: {key} is no number to look up.")
        return int(key) if key.is_integer() else float(key)
    try:
        return index(key)  # whole numbers of numpy, too
    except TypeError:
        raise InvalidArgument(
            f"{whole!r} cannot be a key of a shared collection: a {type(key).__name__} is no text, number, bytes, None "
            "or tuple of these. Use its name, or something else that stands for it."
        ) from None
