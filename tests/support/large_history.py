"""A history of many nodes and calls, written as a pool would write it: for tests and measurements of the page."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from skyward import events
from skyward.events import Event
from skyward.history.recorder import Recorder

__all__ = ["large", "more", "recorded"]

_NAMES = ("train", "evaluate", "score", "load_batch")


def large(nodes: int, calls: int, began: float, gpus: int = 1, pool: str = "large") -> Iterator[Event]:
    """The events of a pool that has run for an hour: calls one after the other, samples, output, metrics."""
    chance = random.Random(17)
    span = 3600.0
    yield events.PoolOpening(pool, nodes, "AWS", time=began)
    yield events.PoolCost(pool, 320.0, time=began)
    yield events.PoolOpened(pool, nodes, nodes, 40.0, time=began + 1)
    each = span / max(1, calls // nodes)
    for round_ in range(calls // nodes):
        for node in range(nodes):
            start = began + 2 + round_ * each
            number = round_ * nodes + node
            yield from _call(pool, number, node, start, each * (0.6 + 0.3 * chance.random()), chance)
        if round_ % 10 == 0:
            for node in range(nodes):
                yield _sample(pool, node, began + 2 + round_ * each, gpus, chance)


def more(number: int, nodes: int, now: float, pool: str = "large") -> Iterator[Event]:
    """What one more second brings: a call on every node, a sample of each, lines of output."""
    chance = random.Random(number)
    for node in range(nodes):
        yield from _call(pool, 10_000_000 + number * nodes + node, node, now - 0.9, 0.8, chance)
        yield _sample(pool, node, now, 1, chance)


def recorded(root: Path, found: Iterator[Event], pool: str = "large") -> Recorder:
    """A history on disk that has these events, still open: more can be recorded."""
    recorder = Recorder(pool, root, 1 << 30)
    for number, event in enumerate(found):
        recorder.record(event)
        if number % 1000 == 0:
            recorder.flush()
    recorder.flush()
    return recorder


def _call(pool: str, number: int, node: int, start: float, seconds: float, chance: random.Random) -> Iterator[Event]:
    id, name = f"ab12{number:08x}", _NAMES[number % len(_NAMES)]
    failed = number % 997 == 7
    error = f"Traceback (most recent call last):\nValueError: batch {number} has no rows" if failed else ""
    if number % 3 == 0:
        yield events.Output(pool, node, "stdout", f"batch {number}: loss {chance.random():.4f}", id, time=start)
    if number % 500 == 0:
        for step in range(20):
            metrics = {"loss": 1 / (step + 1), "accuracy": chance.random()}
            yield events.Progress(pool, node, step, 20, metrics, id, node, time=start + step * seconds / 20)
    outcome = "error" if failed else "ok"
    end = start + seconds
    yield events.CallEnded(pool, id, name, node, outcome, seconds, node, error, 0, f"{number}, rate=0.01", time=end)


def _sample(pool: str, node: int, at: float, gpus: int, chance: random.Random) -> Event:
    cards = tuple(
        events.GpuSample(index, "A100", 100 * chance.random(), int(4e10 * chance.random()), 8 * 10**10, 60, 300)
        for index in range(gpus)
    )
    return events.NodeSample(pool, node, 800 * chance.random(), int(3e9 + 1e9 * chance.random()), 1, cards, time=at)
