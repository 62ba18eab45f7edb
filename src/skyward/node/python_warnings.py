"""Warnings of bodies: the client's filters count here, and what they let through goes to the client as what it is.

Filters count as they do there, with one difference. One that makes errors of all warnings (`python -W error`) is meant
for the user's own code: packages may be others here, and what they warn of when they are imported would end every call.
So it holds where the warning is about the user's code, and elsewhere the warning is shown.
"""

from __future__ import annotations

import builtins
import linecache
import os
import re
import sys
import warnings
from typing import Any, TextIO, cast

from skyward.node.marked_lines import LONGEST_NAME, write

__all__ = ["Filter", "apply", "install"]

_MOST_KINDS = 20
_MOST = 1 << 16

Filter = tuple[str, str | None, str, str | None, bool, int]
"""Action, pattern of the message, category as `module:name`, module, whether that is a pattern, line."""

_ALL_ARE_ERRORS: Filter = ("error", None, "builtins:Warning", None, True, 0)
_PYTHON = os.path.dirname(os.__file__) + os.sep
_MOST_SEEN = 10_000

_seen: set[tuple[Any, ...]] = set()  # warnings of packages that would be errors
_applied: list[Any] = []
_told: list[Filter] | None = None
_shown_before = warnings.showwarning


def install() -> None:
    """Sends on warnings that no code of the body's takes."""
    warnings.showwarning = _show


def apply(filters: list[Filter]) -> None:
    """Has warnings treated as the client treats its own; filters that code here has set go first."""
    global _applied, _told
    filters = [cast("Filter", tuple(entry)) for entry in filters]  # they may have come as JSON
    if filters == _told:
        return
    replaced = warnings.filters if _told is None else _applied  # at first, what Python begins with
    known = set(map(id, replaced))
    own = [entry for entry in warnings.filters if id(entry) not in known]
    _told, _applied = filters, [_filter(entry) for entry in filters]
    cast("list[Any]", warnings.filters)[:] = [*own, *_applied]
    warnings.simplefilter("ignore", _Nobody, append=True)  # Python notices what is said through its functions only
    _applied.append(warnings.filters[-1])


class _Nobody(Warning):
    """A category that no warning has."""


class _Named(type):
    """A category known by its name: its module need not be here, or comes later."""

    wanted: str

    def __subclasscheck__(cls, subclass: type) -> bool:
        return any(_name(base) == cls.wanted for base in subclass.__mro__)


def _filter(entry: Filter) -> tuple[Any, ...]:
    action, message, category, module, pattern, line = entry
    if entry == _ALL_ARE_ERRORS:
        action = "always"  # `_show` decides
    owner, _, name = category.partition(":")
    found: Any = (
        getattr(builtins, name, None) if owner == "builtins" else _Named(name, (Warning,), {"wanted": category})
    )
    where = re.compile(module) if module is not None and pattern else module
    return action, re.compile(message, re.I) if message is not None else None, found or _Nobody, where, line


def _is_error(message: Warning | str, category: type[Warning], line: int) -> bool:
    """Whether the filter that makes errors of all warnings is the one that counts for this one."""
    for entry in cast("list[Any]", warnings.filters):
        _, text, kind, module, at = entry
        if module is not None or not issubclass(category, kind) or at not in (0, line):
            continue
        if text is None or text.match(str(message)):
            return entry in _applied and _told is not None and _told[_applied.index(entry)] == _ALL_ARE_ERRORS
    return False


def _is_own(path: str) -> bool:
    """Whether a file is neither Python's own nor of an installed package."""
    if path.startswith(("<frozen ", _PYTHON)) or f"{os.sep}skyward{os.sep}node{os.sep}" in path:
        return False
    return "site-packages" not in path and "dist-packages" not in path


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"[:LONGEST_NAME]


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if _told is not None and _ALL_ARE_ERRORS in _told and _is_error(message, category, lineno):
        if _is_own(filename):
            raise message if isinstance(message, Warning) else category(message)
        if (found := (category, str(message), filename, lineno)) in _seen or len(_seen) > _MOST_SEEN:
            return
        _seen.add(found)
    about: dict[str, Any] = {
        "kinds": [_name(kind) for kind in category.__mro__ if issubclass(kind, Warning)][:_MOST_KINDS],
        "text": str(message)[:_MOST],
        "path": filename,
        "line": lineno,
        "source": (linecache.getline(filename, lineno) if line is None else line).strip()[:_MOST],
    }
    if file is not None or sys.stderr is None or not write("warning", about):
        _shown_before(message, category, filename, lineno, file, line)
