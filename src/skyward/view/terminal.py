"""Writing for a person: a bounded feed of lines, a terminal with a view below them, tables that fit it.

The cursor stays on a free line above the view: "erase below" removes the view and leaves what others wrote.
rich's Live wraps long lines, and is too slow for 20,000 lines per second.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, TextIO, cast

__all__ = ["Cell", "Feed", "Terminal", "clean", "coloured", "is_terminal", "plain", "styled", "table"]

Line = tuple[str, str]
"""Stream ("stdout", "stderr", or "print" for the script's own), and text with its line end."""

Cell = tuple[str, str]

_LIMIT = 8 << 20  # characters that may wait: a second or so of a fast terminal
_CHUNK = 64 << 10
_PAUSE = 0.05
_STALL = 2.0
_PROMPT = 10  # prints of the script that are drawn at once between two pauses

_HIDE, _SHOW, _SAVE, _RESTORE = "\x1b[?25l", "\x1b[?25h", "\x1b7", "\x1b8"
_WRAP_OFF, _WRAP_ON, _ERASE_RIGHT = "\x1b[?7l", "\x1b[?7h", "\x1b[K"
_DOWN = "\x1bD"  # scrolls at the bottom and, unlike a line feed, keeps the column
# From the line below on: when the whole screen is erased from its top left corner, tmux keeps it in the scroll-back.
_ERASE_VIEW = f"{_ERASE_RIGHT}{_DOWN}\x1b[2K\x1b[J\x1b[A"
_CONTROL = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
    r"|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # they turn the direction of what follows around
)


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty() and stream.fileno() >= 0
    except (OSError, ValueError):  # closed, or without a descriptor
        return False


def coloured(stream: TextIO | None) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("FORCE_COLOR", "0") not in ("", "0") or is_terminal(stream)


def plain(file: TextIO | None) -> Callable[[list[Line]], None]:
    def write(batch: list[Line]) -> None:
        for kind, lines in groupby(batch, itemgetter(0)):
            # Looked up now, as print does it: scripts and notebooks replace these.
            stream = file or cast("TextIO | None", sys.stderr if kind == "stderr" else sys.stdout)
            if stream is None:
                continue
            text = "".join(map(itemgetter(1), lines))
            if is_terminal(stream):  # a file gets all that nodes have written
                text = "\n".join(map(clean, text.split("\n")))
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = stream.encoding or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()

    return write


def clean(text: str, *, colours: bool = True) -> str:
    if text.isprintable():
        return text
    if not colours or os.environ.get("NO_COLOR"):
        return _CONTROL.sub("", text).replace("\t", " ")
    kept = _CONTROL.sub(lambda found: found["colour"] or "", text)
    return f"{kept}\x1b[0m" if "\x1b" in kept else kept


def styled(text: str, style: str) -> str:
    return text if not style or os.environ.get("NO_COLOR") else f"\x1b[{style}m{text}\x1b[0m"


def table(rows: list[list[Cell]], width: int) -> list[str]:
    from rich.cells import cell_len, set_cell_size

    columns: dict[int, int] = {}
    for row in rows:
        for i, (text, _) in enumerate(row[:-1]):
            columns[i] = max(columns.get(i, 0), cell_len(text) + 2)
    lines: list[str] = []
    for row in rows:
        room, line = width, ""
        for i, (text, style) in enumerate(row):
            size = min(room, columns[i] if i < len(row) - 1 else cell_len(text))
            line += styled(set_cell_size(text, size), style)
            room -= size
        lines.append(line)
    return lines


class Feed:
    """Writes lines in batches, in its own thread."""

    def __init__(self, sink: Callable[[list[Line]], None], *, tick: float | None = None) -> None:
        self.broken = False
        self._sink, self._tick, self._sinking = sink, tick, threading.RLock()
        self._lines: deque[Line] = deque()
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._size = self._beat = self._dropped = self._prompt = 0
        self._stuck_at = -1
        self._thread = threading.Thread(target=self._run, name="skyward-console", daemon=True)
        self._thread.start()

    def put(self, kind: str, text: str) -> None:
        """Waits while it is full; counts lines as lost only if nothing moves at all."""
        with self._changed:
            while self._size > _LIMIT and not self.broken:
                beat = self._beat
                if self._stuck_at == beat:
                    self._dropped += text.count("\n")
                    return
                if not self._changed.wait_for(lambda beat=beat: self._beat != beat or self.broken, _STALL):
                    self._stuck_at = beat
            self._add(kind, text)
            self._changed.notify_all()

    def print(self, text: str, *, flush: bool = False) -> None:
        with self._changed:
            self._add("print", text)
            ends = "\n" in text or "\r" in text
            flush = flush or self._size > _LIMIT or (ends and self._prompt < _PROMPT)
            self._prompt += flush
            if ends:
                self._changed.notify_all()
        if flush:
            self.flush()

    def flush(self) -> None:
        with self._sinking:
            left = len(self._lines)
            while not self.broken:
                batch = self._take()
                try:
                    self._sink(batch)
                except (OSError, ValueError):
                    # Nobody reads any more (`| head`, a closed terminal). The calls of the pool must go on: their
                    # results don't depend on being watched. The script's own prints fail as they would without us.
                    self.broken = True
                except Exception:
                    self.broken = True
                    logging.getLogger("skyward.console").exception("the console failed and prints nothing more")
                with self._changed:
                    self._beat += 1
                    if self.broken:
                        self._lines.clear()
                    self._changed.notify_all()
                left -= len(batch)
                if left <= 0:
                    return

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        beat = -1
        while self._thread.is_alive() and beat != self._beat:
            beat = self._beat
            self._thread.join(_STALL)

    def _run(self) -> None:
        while not self._closing.wait(0 if self._size > _LIMIT // 2 else _PAUSE):
            with self._changed:
                self._prompt = 0
                if not self._lines and not self._closing.is_set():
                    self._changed.wait(self._tick)
            self.flush()
        self.flush()

    def _add(self, kind: str, text: str) -> None:
        if text and not self.broken:
            self._lines.append((kind, text))
            self._size += len(text) + 100

    def _take(self) -> list[Line]:
        batch: list[Line] = []
        with self._changed:
            if self._dropped:
                batch.append(("stderr", f"skyward: {self._dropped:,} lines were not shown: nothing could be written\n"))
                self._dropped = 0
            size = 0
            while self._lines and size < _CHUNK:
                batch.append(self._lines.popleft())
                size += len(batch[-1][1]) + 100
            self._size -= size
        return batch


class Terminal:
    """Draws `rows(width)` below all that is written."""

    def __init__(self, out: TextIO, rows: Callable[[int], list[list[Cell]]]) -> None:
        self.out = out
        self._fd, self._rows, self._open, self._drawn, self._unfinished = out.fileno(), rows, True, False, ""
        out.flush()
        self.feed = Feed(self._paint, tick=_PAUSE)
        streams = {name: cast(TextIO, getattr(sys, name)) for name in ("stdout", "stderr")}
        self._streams = {name: stream for name, stream in streams.items() if is_terminal(stream)}
        self._proxies = {name: cast(TextIO, _Printed(self, stream)) for name, stream in self._streams.items()}
        self._swap(self._streams, self._proxies)

    @property
    def is_open(self) -> bool:
        return self._open and not self.feed.broken

    def close(self) -> None:
        try:
            self._open = False
            self.feed.close()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """For a fork, which has no writing thread."""
        self._open = False
        self._swap(self._proxies, self._streams)

    def _swap(self, old: dict[str, TextIO], new: dict[str, TextIO]) -> None:
        for name, stream in old.items():
            if getattr(sys, name) is stream:  # else the script has put its own there, and that stays
                setattr(sys, name, new[name])
            for handler in _log_handlers():
                if handler.stream is stream:
                    handler.setStream(new[name])

    def _paint(self, batch: list[Line]) -> None:
        size = os.get_terminal_size(self._fd)
        width, height = size.columns or 80, size.lines or 24
        rows, room = self._rows(width - 1) if self._open else [], max(1, height - 2)
        if len(rows) > room:
            rows[room - 1 :] = [[(f"… {len(rows) - room + 1} more", "2")]]
        text = self._woven(batch, width)
        erase = _ERASE_VIEW if self._drawn and (text or not rows) else _ERASE_RIGHT
        self._drawn = bool(rows)
        frame = [_HIDE, erase, text]
        if rows:
            # First the room, then the rows: once nothing scrolls, the saved position is the right one to return to.
            frame += [_DOWN * len(rows), f"\x1b[{len(rows)}A", _SAVE, "\x1b[0m", _WRAP_OFF]
            frame += [f"\r\n{line}{_ERASE_RIGHT}" for line in table(rows, width - 1)]
            frame += ["\x1b[J", _WRAP_ON, _RESTORE]
        self._write("".join([*frame, _SHOW]))

    def _woven(self, batch: list[Line], width: int) -> str:
        from rich.cells import cell_len

        parts, aside = list[str](), False
        for kind, text in batch:
            if kind == "print":
                parts.append(self._unfinished + text if aside else text)
                aside = False
                line = (self._unfinished + text).rpartition("\n")[2]
                shown = line.rstrip("\r")
                self._unfinished = shown.rpartition("\r")[2][-10_000:] + ("\r" if line != shown else "")
                continue
            if self._unfinished and not aside:
                aside = cell_len(clean(self._unfinished, colours=False)) < width
                parts.append(f"\r{_ERASE_RIGHT}" if aside else "\n")
                self._unfinished = self._unfinished if aside else ""
            parts.append(text)
        return "".join([*parts, self._unfinished if aside else ""])

    def _write(self, text: str) -> None:
        # Past the stream's own buffer: one call a frame, and a terminal set to non-blocking takes what it can.
        rest = memoryview(text.encode(self.out.encoding or "utf-8", "replace"))
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                select.select([], [self._fd], [], 1.0)


class _Printed:
    def __init__(self, terminal: Terminal, stream: TextIO) -> None:
        self._terminal, self._stream = terminal, stream

    def write(self, text: str) -> int:
        if not self._terminal.is_open or not isinstance(cast(object, text), str):
            return self._stream.write(text)
        self._terminal.feed.print(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        if self._terminal.is_open:
            self._terminal.feed.print("", flush=True)
        else:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _log_handlers() -> Iterator[logging.StreamHandler[Any]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {handler for logger in loggers for handler in getattr(logger, "handlers", ())}:
        if isinstance(handler, logging.StreamHandler):
            yield cast("logging.StreamHandler[Any]", handler)
