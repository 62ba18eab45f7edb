"""From chunks of bytes to whole lines, without secrets; a carriage return rewrites the line, as on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

from skyward.api.masking import hide, hide_beginning, hide_bytes, longest
from skyward.events import Event

__all__ = ["Chunk", "Lines", "Transcript", "output_window"]

Stream = Literal["stdout", "stderr"]

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
_PROGRESS_EVERY = 0.1
_LONGEST = 1 << 20
_ALL_WINDOWS = 8 << 20
_LEAST_WINDOW = 64 << 10


class Chunk:
    """Some output of a node on its way to listeners: as bytes until their thread takes it apart."""

    __slots__ = ("events", "taken")

    def __init__(self, events: Callable[[bool], Iterable[Event]], taken: Callable[[], None]) -> None:
        self.events = events
        """What has happened, in order; without output if that is not wanted."""
        self.taken = taken
        """Called when listeners have heard all of it."""


def output_window(nodes: int) -> int:
    """How much output of each node may be under way to listeners."""
    return max(_LEAST_WINDOW, _ALL_WINDOWS // nodes)


class Lines:
    """The lines of one stream."""

    def __init__(self) -> None:
        self._rest: bytes = b""
        self._shown = 0.0

    def feed(self, data: bytes | memoryview) -> list[tuple[str, bool]]:
        """The lines that are complete now; True marks one that will be overwritten (a progress bar)."""
        whole = self._rest + bytes(data)
        *lines, self._rest = whole.split(b"\n")
        found = [(_settled(line), False) for line in lines]
        if len(self._rest) > _LONGEST:
            self._rest = hide_bytes(self._rest)
            last = cut = max(len(self._rest) - longest(), 4)  # what may be the beginning of a secret stays
            while self._rest[cut - 1] & 0xC0 == 0x80 and cut > last - 4:
                cut -= 1  # not through the middle of a character
            cut -= 1
            found.append((_text(self._rest[:cut]), False))
            self._rest = self._rest[cut:]
        elif b"\r" in self._rest:
            self._rest = self._rest[_last_state(self._rest) :]
            now = time.monotonic()
            if now - self._shown >= _PROGRESS_EVERY:
                self._shown = now
                text = hide_beginning(_settled(self._rest))
                if text:
                    found.append((text, True))
        return found

    def rest(self) -> list[tuple[str, bool]]:
        """What is left without a line end; nothing afterwards."""
        rest, self._rest = self._rest, b""
        text = _settled(rest)
        return [(text, False)] if text else []


class Transcript:
    """All that one node writes, taken apart by stream and call."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str | None], Lines] = {}

    def feed(self, stream: str, call: str | None, data: bytes | memoryview) -> list[tuple[str, bool]]:
        """The lines that are complete now."""
        return self._lines.setdefault((stream, call), Lines()).feed(data)

    def end(self, call: str | None) -> list[tuple[Stream, str, bool]]:
        """What a call that has ended (or, with None, what no call is known for) left without a line end."""
        found: list[tuple[Stream, str, bool]] = []
        for stream in _STREAMS:
            lines = self._lines.pop((stream, call), None)
            if lines is not None:
                found.extend((stream, text, progress) for text, progress in lines.rest())
        return found


def _settled(line: bytes) -> str:
    """A line as a terminal would leave it: what follows the last carriage return, unless nothing does."""
    if b"\r" not in line:
        return _text(line)
    return _text(line[_last_state(line) :].strip(b"\r"))


def _last_state(line: bytes) -> int:
    """Where the last state that has any text begins."""
    return line.rstrip(b"\r").rfind(b"\r") + 1


def _text(line: bytes) -> str:
    return hide(line.decode("utf-8", "replace"))
