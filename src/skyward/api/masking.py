"""Hides the values of secrets in text: which values there are in this process, and where they stand in a text.

Every `Secret` that is alive is known here, and the last 256 that were made. Nothing is done where there is none.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

__all__ = ["MASK", "Hidden", "any_hidden", "hidden", "hide", "hide_beginning", "hide_bytes", "longest"]

MASK = "***"
_SHORTEST = 4
"""Characters; a shorter text stands in too many others to be searched for."""
_SHORTEST_LINE = 8
_RECENT = 256


class Hidden:
    """The value of a secret; all secrets of the same value share it."""

    __slots__ = ("__weakref__", "forms", "value")

    def __init__(self, value: str) -> None:
        self.value = value
        self.forms = _forms(value)


_values: weakref.WeakValueDictionary[str, Hidden] = weakref.WeakValueDictionary()
# A secret may be dropped here while a body that was given it still runs, and prints it.
_recent: deque[Hidden] = deque(maxlen=_RECENT)
_forms_now: tuple[str, ...] = ()
_lock = threading.Lock()


def hidden(value: str) -> Hidden:
    """Has a value hidden from now on, at least as long as what is returned is kept."""
    global _forms_now
    with _lock:
        known = _values.get(value)
        if known is None:
            known = _values[value] = Hidden(value)
            _recent.append(known)
            alive = [found for ref in _values.valuerefs() if (found := ref()) is not None]
            # The longest first: one value may hold another.
            _forms_now = tuple(sorted({form for each in alive for form in each.forms}, key=len, reverse=True))
        return known


def any_hidden() -> bool:
    """Whether there is anything to hide."""
    return bool(_forms_now)


def hide(text: str) -> str:
    """`text` with *** in the place of every known value."""
    for form in _forms_now:
        if form in text:
            text = text.replace(form, MASK)
    return text


def hide_beginning(text: str) -> str:
    """As `hide`, for a text that goes on later: *** also stands for the beginning of a value at its end."""
    text = hide(text)
    for form in _forms_now:
        for length in range(min(len(form) - 1, len(text)), _SHORTEST - 1, -1):
            if text.endswith(form[:length]):
                return text[:-length] + MASK
    return text


def hide_bytes(data: bytes) -> bytes:
    """`data` with *** in the place of every known value, encoded as UTF-8."""
    for form in _forms_now:
        if (encoded := form.encode("utf-8", "surrogateescape")) in data:
            data = data.replace(encoded, MASK.encode())
    return data


def longest() -> int:
    """How many bytes the longest known value has; 0 if there is none."""
    return max((len(form.encode("utf-8", "surrogateescape")) for form in _forms_now), default=0)


def _forms(value: str) -> tuple[str, ...]:
    """How a value may stand in a text: as it is, each line of it, and escaped as in Python, JSON and addresses."""
    import json
    from urllib.parse import quote

    plain = {
        value,
        value.strip(),
        *(line for line in map(str.strip, value.splitlines()) if len(line) >= _SHORTEST_LINE),
    }
    forms = set(plain)
    for text in plain:
        forms |= {repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
        forms |= {quote(text, safe="", errors="replace"), quote(text, errors="replace")}
    return tuple(form for form in forms if len(form) >= _SHORTEST)


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that is not here may have held it


os.register_at_fork(after_in_child=_in_child)
