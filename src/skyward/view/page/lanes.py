"""Calls as blocks in rows, one set of rows for each node: what the page draws of a window of time."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from skyward.view.page.curves import SAMPLES

__all__ = ["FAILED", "ROWS", "PageCall", "PageNode", "blocks"]

ROWS = 64
"""How many calls of a node at the same time are shown."""
FAILED = frozenset(("error", "crashed", "timeout", "lost"))
"""The outcomes of calls that failed."""


@dataclass(slots=True)
class PageCall:
    """One attempt of a call, in the row in which it is drawn."""

    number: int
    id: str
    name: str
    node: int
    rank: int | None
    began: float
    arguments: str
    attempt: int
    row: int = 0
    seconds: float | None = None
    outcome: str = "running"
    error: str = ""


@dataclass(slots=True)
class PageNode:
    """A node: its figures over time, its calls in the order in which they began."""

    state: str = "waiting"
    running: int = 0
    done: int = 0
    failed: int = 0
    times: deque[float] = field(default_factory=lambda: deque[float](maxlen=SAMPLES))
    cpu: deque[float] = field(default_factory=lambda: deque[float](maxlen=SAMPLES))
    memory: deque[float] = field(default_factory=lambda: deque[float](maxlen=SAMPLES))
    gpus: dict[int, tuple[str, deque[tuple[float, float, float]]]] = field(
        default_factory=dict[int, tuple[str, deque[tuple[float, float, float]]]]
    )
    rows: list[float] = field(default_factory=list[float])  # until when each row is taken
    calls: list[PageCall] = field(default_factory=list[PageCall])
    starts: list[float] = field(default_factory=list[float])
    longest: float = 0.0


def blocks(node: PageNode, start: float, end: float, tick: float, now: float) -> list[list[Any]]:
    """The calls of a node in a window of time; those that follow each other within a few `tick`s are one block."""
    first = bisect_left(node.starts, start - max(node.longest, 0.0))
    running = [call for call in node.calls[:first] if call.seconds is None][-ROWS:]
    shown: dict[int, list[Any]] = {}
    made: list[list[Any]] = []
    for call in (*running, *_from(node, first, end)):
        until = call.began + call.seconds if call.seconds is not None else now
        if until < start:
            continue
        block = shown.get(call.row)
        failed = call.outcome in FAILED
        if (
            block is not None
            and until - call.began < tick
            and call.began - block[2] < tick
            and block[2] - block[1] < 8 * tick
        ):
            block[2], block[3], block[6] = max(block[2], until), block[3] + 1, ""
            block[4] = call.outcome if failed else block[4]
            block[5] = block[5] if block[5] == call.name else "several"
            continue
        block = [call.row, call.began, until, 1, call.outcome, call.name, call.id]
        shown[call.row] = block
        made.append(block)
    return made


def _from(node: PageNode, first: int, end: float) -> Iterable[PageCall]:
    for index in range(first, len(node.calls)):
        if node.starts[index] > end:
            return
        yield node.calls[index]
