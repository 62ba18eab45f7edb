"""The client's part in logging: its levels count on nodes, and records of nodes go through its handlers."""

from __future__ import annotations

import logging
import re
import warnings
from typing import TYPE_CHECKING, Any, cast

from skyward.events import Log

if TYPE_CHECKING:
    from skyward.node.python_warnings import Filter

__all__ = ["Watch", "relay", "snapshot", "warning_filters"]


def snapshot() -> dict[str, Any]:
    """The levels that this program has set, by logger ("" is the root), whether it has handlers, and filters."""
    levels = {"": logging.root.level}
    records = bool(logging.root.handlers)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and not name.startswith("skyward"):
            if logger.level:
                levels[name] = logger.level
            records = records or any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    return {"levels": levels, "records": records, "warnings": warning_filters()}


def warning_filters() -> list[Filter]:
    """The filters of this program, as nodes are told of them."""
    found: list[Filter] = []
    for action, message, category, module, line in cast("list[Any]", warnings.filters):
        text: str | None = rf"{re.escape(message)}\Z" if isinstance(message, str) else getattr(message, "pattern", None)
        where: str | None = module if isinstance(module, str) else getattr(module, "pattern", None)
        found.append(
            (action, text, f"{category.__module__}:{category.__qualname__}", where, not isinstance(module, str), line)
        )
    return found


class Watch:
    """Whether logging or warnings were configured since nodes were told: asked before each call, so it costs little."""

    def __init__(self) -> None:
        self._told = snapshot()
        self._handlers = -1
        self._mark()
        self._news: dict[str, Any] | None = None

    def news(self) -> dict[str, Any] | None:
        """What a call takes along: nothing, as long as nodes know it all."""
        cache: dict[Any, Any] = getattr(logging.root, "_cache", {})
        if self not in cache or self._handlers != len(logging.root.handlers) or self._filters != warnings.filters:
            self._mark()
            now = snapshot()
            if self._news is not None or now != self._told:  # once nodes were told otherwise, also of the way back
                self._news = now
        return self._news

    def _mark(self) -> None:
        """Leaves a mark in a cache of the root logger, which every `setLevel` clears."""
        self._handlers, self._filters = len(logging.root.handlers), list(cast("list[Any]", warnings.filters))
        cache: dict[Any, Any] | None = getattr(logging.root, "_cache", None)
        if cache is not None:
            cache[self] = True


def relay(event: Log) -> None:
    """Hands a record of a node to the handlers of this program, as if it had been logged here."""
    rank = "" if event.rank in (None, event.node) else f" rank-{event.rank}"
    record = logging.makeLogRecord(
        {
            "name": event.logger,
            "levelno": event.level,
            "levelname": logging.getLevelName(event.level),
            "msg": event.text,
            "created": event.created,
            "msecs": (event.created - int(event.created)) * 1000,
            "pathname": event.path,
            "filename": event.path.rpartition("/")[2],
            "module": event.path.rpartition("/")[2].removesuffix(".py"),
            "lineno": event.line,
            "funcName": event.function,
            "processName": f"node-{event.node}{rank}",
            "node": event.node,
            "rank": event.rank,
        }
    )
    logger = _nearest(event.logger)
    if logger.name == event.logger:
        logger.handle(record)
    else:
        logger.callHandlers(record)


def _nearest(name: str) -> logging.Logger:
    """The logger of that name, or the one above it that this program has: one made here would stay for ever."""
    while name:
        found = logging.root.manager.loggerDict.get(name)
        if isinstance(found, logging.Logger):
            return found
        name = name.rpartition(".")[0]
    return logging.root
