"""The output of a pool as the page has it: the newest lines, searched by text, node and call."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, NamedTuple

from skyward.view.terminal import clean

__all__ = ["OutputLines"]

_LINES = 200_000
_LONGEST = 4_000
_OF_A_CALL = 500
_CHARACTERS = 200_000  # in one answer


class _Line(NamedTuple):
    number: int
    time: float
    node: int
    stream: str
    text: str
    call: str | None


class OutputLines:
    """Lines in their order; the oldest go when there are too many."""

    def __init__(self) -> None:
        self._lines: deque[_Line] = deque(maxlen=_LINES)
        self._written = 0

    def add(self, time: float, node: int, stream: str, text: str, call: str | None) -> None:
        """One more line."""
        self._lines.append(_Line(self._written, time, node, stream, text, call))
        self._written += 1

    def of_call(self, call: str) -> list[dict[str, Any]]:
        """The last lines of a call, in their order."""
        return self.search(call=call, limit=_OF_A_CALL)[::-1]

    def search(
        self, text: str = "", node: int | None = None, call: str = "", before: int | None = None, limit: int = 200
    ) -> list[dict[str, Any]]:
        """Lines that have `text`, the newest first; from number `before` down."""
        wanted, found, room = text.lower(), list[dict[str, Any]](), _CHARACTERS
        newer = 0 if before is None else max(0, self._written - before)
        for line in islice(reversed(self._lines), newer, None):
            if (node is not None and line.node != node) or (call and line.call != call):
                continue
            if wanted and wanted not in line.text.lower():
                continue
            found.append(_shown(line))
            room -= len(line.text)
            if len(found) >= limit or room <= 0:
                break
        return found


def _shown(line: _Line) -> dict[str, Any]:
    text = line.text if len(line.text) <= _LONGEST else f"{line.text[:_LONGEST]} ... ({len(line.text):,} characters)"
    shown = {"number": line.number, "time": line.time, "node": line.node, "stream": line.stream}
    return {**shown, "text": clean(text, colours=False), "call": line.call}
