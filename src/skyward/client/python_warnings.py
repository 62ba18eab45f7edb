"""Warnings of bodies, shown as this program shows its own where it has chosen how: once for each place."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from functools import reduce
from typing import Any, cast

from skyward.client.logs import relay as relay_record
from skyward.events import Log, Warned

__all__ = ["is_repeated", "relay", "shown_by_program"]

_MOST_SEEN = 10_000
_seen: set[tuple[Any, ...]] = set()


def shown_by_program() -> bool:
    """Whether this program has its own way to show warnings: `logging.captureWarnings`, a function, a recorder."""
    if warnings.showwarning is not getattr(warnings, "_showwarning_orig", warnings.showwarning):
        return True
    return getattr(getattr(warnings, "_showwarnmsg_impl", warnings.warn), "__module__", None) not in (
        "warnings",
        "_warnings",
        "_py_warnings",
    )


def relay(event: Warned) -> None:
    """Shows a warning of a node in the way that this program has chosen, if it has; as its own, once for each place."""
    if not shown_by_program() or is_repeated(event, _seen):
        return
    if getattr(logging, "_warnings_showwarning", None) is not None:  # captureWarnings
        text = f"{event.path}:{event.line}: {event.category}: {event.text}"
        text += f"\n  {event.source}" if event.source else ""
        level = logging.WARNING
        record = Log(
            event.pool, event.node, "py.warnings", level, event.time, text, event.path, event.line, "", event.call,
            event.rank,
        )  # fmt: skip
        relay_record(record)
        return
    category = _category(event.kinds)
    message = category.__new__(category, event.text)
    message.node, message.rank = event.node, event.rank  # type: ignore[attr-defined]
    warnings.showwarning(message, category, event.path, event.line, None, event.source or None)


def is_repeated(event: Warned, seen: set[tuple[Any, ...]]) -> bool:
    """Whether this warning was shown: a pool is like one process, which shows it once for each place, unless told."""
    if _action_for(event) in ("always", "all"):
        return False
    key = (event.pool, event.category, event.text, event.path, event.line)
    if key in seen:
        return True
    if len(seen) >= _MOST_SEEN:
        seen.clear()
    seen.add(key)
    return False


def _action_for(event: Warned) -> str:
    """What the filters of this program say of a warning, wherever in it that was given."""
    for action, message, category, module, line in cast("list[Any]", warnings.filters):
        fits = (
            f"{category.__module__}:{category.__qualname__}" in event.kinds
            and module is None
            and line in (0, event.line)
        )
        if fits and (message is None or (not isinstance(message, str) and message.match(event.text))):
            return action
    return "default"


def _category(kinds: Sequence[str]) -> type[Warning]:
    """The nearest of the categories that this program has."""
    for kind in kinds:
        module, _, name = kind.partition(":")
        try:
            found: Any = reduce(getattr, name.split("."), cast("Any", sys.modules[module]))
        except (KeyError, AttributeError):
            continue
        if isinstance(found, type) and issubclass(found, Warning):
            return found
    return Warning
