"""What nodes print, log and warn of, passed to the user's output, logging and warnings."""

from __future__ import annotations

import logging
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, cast

from skyward.api.secret import hide, hide_beginning, hide_bytes, longest
from skyward.events import Event, Log, Warned
from skyward.node.settings import MARK

if TYPE_CHECKING:
    from skyward.node.logs import Filter
    from skyward.node.settings import LogSettings

__all__ = [
    "Chunk",
    "Lines",
    "Transcript",
    "Watch",
    "is_repeated",
    "output_window",
    "relay_records",
    "relay_warnings",
    "shown_by_program",
    "snapshot",
]


# From chunks of bytes to whole lines, without secrets; a carriage return rewrites the line, as on a terminal.
#
# A record, a warning or a report (`node/logs.py`) may be written while a line is unfinished, a progress bar above
# all. It comes as a line of its own: text before a record or a warning stands before it, a bar is shown and continues
# afterwards, and a report interrupts nothing.


Stream = Literal["stdout", "stderr"]

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
_PROGRESS_EVERY = 0.1
_LONGEST = 1 << 20
_ALL_WINDOWS = 8 << 20
_LEAST_WINDOW = 64 << 10
_MARK = MARK.encode()


class Chunk:
    __slots__ = ("events", "taken")

    def __init__(self, events: Callable[[bool], Iterable[Event]], taken: Callable[[], None]) -> None:
        self.events = events
        self.taken = taken


def output_window(nodes: int) -> int:
    return max(_LEAST_WINDOW, _ALL_WINDOWS // nodes)


class Lines:
    def __init__(self) -> None:
        self._rest: bytes = b""
        self._bar: bytes = b""  # was there when a record came: what follows overwrites it, or leaves it as a line
        self._shown = 0.0

    def feed(self, data: bytes | memoryview) -> list[tuple[str, bool]]:
        """The complete lines; True marks one that will be overwritten (a progress bar). Marked lines keep their
        secrets: masked JSON may be none.
        """
        whole = self._rest + bytes(data)
        *lines, self._rest = whole.split(b"\n")
        marked = self._bar or _MARK in whole
        found = self._marks_apart(lines) if marked else [(_settled(line), False) for line in lines]
        if len(self._rest) > _LONGEST:
            found.append((self._cut(), False))
        elif b"\r" in self._rest:
            bar, mark, more = self._rest.partition(_MARK[:1])
            bar = bar[max(_last_state(bar) - 1, 0) :]  # with its carriage return: it is a bar
            self._rest = bar + mark + more
            if time.monotonic() - self._shown >= _PROGRESS_EVERY:
                found += self._show(bar)
        return found

    def rest(self) -> list[tuple[str, bool]]:
        rest, self._rest = self._rest, b""
        return [(hide(text), progress) for text, progress in self._marks_apart([rest, b""]) if text and not progress]

    def _marks_apart(self, lines: list[bytes]) -> list[tuple[str, bool]]:
        found: list[tuple[str, bool]] = []
        begun = b""
        for line in lines:
            line = begun + line if begun or line.startswith(_MARK) else self._after_bar(line, found, rewrites=not line)
            begun, *marked = line.split(_MARK)
            if not marked:
                found.append((_settled(begun), False))
                begun = b""
            elif begun and not all(piece.startswith(b"progress ") for piece in marked):
                if b"\r" in begun:
                    self._bar = begun[_last_state(begun) :]
                    found += self._show(begun)
                else:
                    found.append((_text(begun), False))
                begun = b""
            found += [(MARK + piece.decode("utf-8", "replace"), False) for piece in marked]
        if begun:
            self._rest = begun + self._rest
        elif self._rest and self._rest[:1] != _MARK[:1]:
            self._rest = self._after_bar(self._rest, found)
        return found

    def _after_bar(self, line: bytes, found: list[tuple[str, bool]], *, rewrites: bool = False) -> bytes:
        bar, self._bar = self._bar, b""
        if bar and not (rewrites or bar.endswith(b"\r") or line.startswith(b"\r")):
            found.append((_settled(bar), False))
            return line
        return bar + line

    def _show(self, bar: bytes) -> list[tuple[str, bool]]:
        self._shown = time.monotonic()
        text = hide_beginning(_settled(bar))
        return [(text, True)] if text else []

    def _cut(self) -> str:
        if (at := self._rest.find(_MARK)) > 0:
            cut = at
        else:
            self._rest = hide_bytes(self._rest)
            kept = max(longest(), len(_MARK))  # what may be the beginning of a secret or of a mark stays
            last = cut = max(len(self._rest) - kept, 4)
            while self._rest[cut - 1] & 0xC0 == 0x80 and cut > last - 4:
                cut -= 1  # not through the middle of a character
            cut -= 1
        text, self._rest = _text(self._rest[:cut]), self._rest[cut:]
        return text


class Transcript:
    def __init__(self) -> None:
        self._lines: dict[tuple[str, str | None], Lines] = {}

    def feed(self, stream: str, call: str | None, data: bytes | memoryview) -> list[tuple[str, bool]]:
        return self._lines.setdefault((stream, call), Lines()).feed(data)

    def end(self, call: str | None) -> list[tuple[Stream, str, bool]]:
        """What an ended call left without a line end."""
        found: list[tuple[Stream, str, bool]] = []
        for stream in _STREAMS:
            lines = self._lines.pop((stream, call), None)
            if lines is not None:
                found.extend((stream, text, progress) for text, progress in lines.rest())
        return found


def _settled(line: bytes) -> str:
    """As a terminal would leave it after carriage returns."""
    if b"\r" not in line:
        return _text(line)
    return _text(line[_last_state(line) :].strip(b"\r"))


def _last_state(line: bytes) -> int:
    return line.rstrip(b"\r").rfind(b"\r") + 1


def _text(line: bytes) -> str:
    return hide(line.decode("utf-8", "replace"))


def snapshot() -> LogSettings:
    levels = {"": _level(logging.root)}
    records = bool(logging.root.handlers)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and not name.startswith("skyward"):
            if logger.level:
                levels[name] = _level(logger)
            records = records or any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    return {"levels": levels, "records": records, "warnings": warning_filters()}


def _level(logger: logging.Logger) -> int:
    """As messages take it: True is a level, too, and any whole number."""
    return max(-1 << 30, min(int(logger.level), 1 << 30))


def warning_filters() -> list[Filter]:
    found: list[Filter] = []
    for action, message, category, module, line in cast("list[Any]", warnings.filters):
        text: str | None = rf"{re.escape(message)}\Z" if isinstance(message, str) else getattr(message, "pattern", None)
        where: str | None = module if isinstance(module, str) else getattr(module, "pattern", None)
        found.append(
            (action, text, f"{category.__module__}:{category.__qualname__}", where, not isinstance(module, str), line)
        )
    return found


class Watch:
    """Whether logging or warnings were configured since nodes were told; asked before each call."""

    def __init__(self) -> None:
        self._told = snapshot()
        self._mark()
        self._news: LogSettings | None = None

    def news(self) -> LogSettings | None:
        if (
            _levels_mark() is not self._levels
            or self._handlers != len(logging.root.handlers)
            or self._filters != warnings.filters
        ):
            self._mark()
            now = snapshot()
            if self._news is not None or now != self._told:  # once nodes were told otherwise, also of the way back
                self._news = now
        return self._news

    def _mark(self) -> None:
        self._levels = _levels_mark()
        self._handlers, self._filters = len(logging.root.handlers), list(cast("list[Any]", warnings.filters))


def _levels_mark() -> object:
    """Changes after every `setLevel`, which clears this cache of the root logger."""
    cache: dict[Any, Any] = getattr(logging.root, "_cache", {})
    return cache.get("skyward") or cache.setdefault("skyward", object())


def relay_records(event: Log) -> None:
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
    """The logger of that name, or the next above: one made here would stay for ever."""
    while name:
        found = logging.root.manager.loggerDict.get(name)
        if isinstance(found, logging.Logger):
            return found
        name = name.rpartition(".")[0]
    return logging.root


_MOST_SEEN = 10_000
_seen: set[tuple[Any, ...]] = set()


def shown_by_program() -> bool:
    if warnings.showwarning is not getattr(warnings, "_showwarning_orig", warnings.showwarning):
        return True
    return getattr(getattr(warnings, "_showwarnmsg_impl", warnings.warn), "__module__", None) not in (
        "warnings",
        "_warnings",
        "_py_warnings",
    )


def relay_warnings(event: Warned) -> None:
    """As this program shows its own, once for each place."""
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
        relay_records(record)
        return
    category = _category(event.kinds)
    message = category.__new__(category, event.text)
    message.node, message.rank = event.node, event.rank  # type: ignore[attr-defined]
    warnings.showwarning(message, category, event.path, event.line, None, event.source or None)


def is_repeated(event: Warned, seen: set[tuple[Any, ...]]) -> bool:
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
    for kind in kinds:
        module, _, name = kind.partition(":")
        try:
            found: Any = reduce(getattr, name.split("."), cast("Any", sys.modules[module]))
        except (KeyError, AttributeError):
            continue
        if isinstance(found, type) and issubclass(found, Warning):
            return found
    return Warning
