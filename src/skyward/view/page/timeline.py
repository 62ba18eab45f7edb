"""The calls of one node over time, as blocks: those too short to be seen are one; quick however many calls there are.

Blocks are made in tiles of time, for resolutions that are powers of two, and kept until a call in them changes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from skyward.history.state import FAILED, Attempt

__all__ = ["ROWS", "Timeline"]

ROWS = 64

_TILE = 256  # ticks
_TILES = 2_000  # kept for a node
_JITTER = 0.02  # seconds by which the client may have heard late of an end

Block = list[Any]


@dataclass(slots=True)
class _Class:
    starts: list[float] = field(default_factory=list[float])
    calls: list[Attempt] = field(default_factory=list[Attempt])
    longest: float = 0.0


class Timeline:
    def __init__(self) -> None:
        self.rows: list[float] = []  # until when each is taken
        self.running: dict[int, Attempt] = {}
        self._starts: list[float] = []
        self._calls: list[Attempt] = []
        self._lengths: dict[int, _Class] = {}
        self._tiles: dict[tuple[int, int], list[Block]] = {}
        self._levels: set[int] = set()

    def begin(self, call: Attempt) -> None:
        at = call.began + _JITTER
        free = next((row for row, until in enumerate(self.rows) if until <= at), len(self.rows))
        call.row = min(free, ROWS - 1)
        if call.row == len(self.rows):
            self.rows.append(math.inf)
        else:
            self.rows[call.row] = math.inf
        where = bisect_left(self._starts, call.began)  # nearly always the end
        self._starts.insert(where, call.began)
        self._calls.insert(where, call)
        self.running[call.number] = call
        self._forget(call)

    def end(self, call: Attempt) -> None:
        until = call.ended if call.ended is not None else call.began
        self.running.pop(call.number, None)
        self.rows[call.row] = until
        length = until - call.began
        same = self._lengths.setdefault(math.frexp(max(length, 0.001))[1], _Class())
        where = bisect_left(same.starts, call.began)
        same.starts.insert(where, call.began)
        same.calls.insert(where, call)
        same.longest = max(same.longest, length)
        self._forget(call)

    def blocks(self, start: float, end: float, tick: float, now: float) -> list[Block]:
        """What is to be seen between two times, with blocks that last at least about a `tick`.

        A block is [row, start, end, how many calls, outcome, name, id of the call if it is one, how many failed].
        """
        level = math.ceil(math.log2(tick))
        span = _TILE * 2.0**level
        first = math.floor(start / span)
        found = _merged(self._across(first * span, start, end), 2.0**level, now)
        for tile in range(first, math.floor(end / span) + 1):
            found += self._tile(level, tile, span, now)
        return [block for block in found if block[2] >= start and block[1] <= end]

    def _across(self, before: float, start: float, end: float) -> list[Attempt]:
        found = [call for call in self.running.values() if call.began < before]
        for same in self._lengths.values():
            low = bisect_left(same.starts, start - same.longest)
            high = bisect_left(same.starts, before)
            found += [call for call in same.calls[low:high] if (call.ended or 0.0) >= start and call.began <= end]
        return sorted(found, key=lambda call: call.began)

    def _tile(self, level: int, tile: int, span: float, now: float) -> list[Block]:
        known = self._tiles.get((level, tile))
        if known is not None:
            return known
        low, high = bisect_left(self._starts, tile * span), bisect_left(self._starts, (tile + 1) * span)
        calls = self._calls[low:high]
        made = _merged(calls, 2.0**level, now)
        if all(call.ended is not None for call in calls):
            if len(self._tiles) >= _TILES:
                self._tiles.clear()
            self._tiles[level, tile] = made
            self._levels.add(level)
        return made

    def _forget(self, call: Attempt) -> None:
        for level in self._levels:
            self._tiles.pop((level, math.floor(call.began / (_TILE * 2.0**level))), None)


def _merged(calls: Iterable[Attempt], tick: float, now: float) -> list[Block]:
    shown: dict[int, Block] = {}
    return list(_made(calls, tick, now, shown))


def _made(calls: Iterable[Attempt], tick: float, now: float, shown: dict[int, Block]) -> Iterator[Block]:
    for call in calls:
        until = call.ended if call.ended is not None else max(now, call.began)
        block = shown.get(call.row)
        short, failed = until - call.began < tick, int(call.outcome in FAILED)
        if short and block is not None and call.began - block[2] < tick and block[2] - block[1] < 8 * tick:
            block[2], block[3], block[6] = max(block[2], until), block[3] + 1, ""
            block[4], block[7] = call.outcome if failed else block[4], block[7] + failed
            block[5] = block[5] if block[5] == call.name else "several functions"
            continue
        block = [call.row, call.began, until, 1, call.outcome, call.name, call.id, failed]
        shown[call.row] = block
        yield block
