"""A history as a trace that Perfetto and Chrome show: nodes as processes, calls as slices, figures as counters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward import events

if TYPE_CHECKING:
    from skyward.history.history import CallRecord, History

__all__ = ["lanes", "write"]

_POOL = 0  # the process of what concerns the whole pool; node n is process n + 1


def write(history: History, path: Path) -> None:
    """Writes the trace as JSON; half a file is never seen under its name."""
    text = json.dumps({"traceEvents": list(_records(history)), "displayTimeUnit": "ms"})
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def lanes(calls: list[CallRecord], now: float) -> dict[str, int]:
    """A row for each call among those of its node, so that no two in a row overlap."""
    free: dict[int, list[float]] = {}
    found: dict[str, int] = {}
    for call in sorted(calls, key=lambda call: call.began):
        rows = free.setdefault(call.node, [])
        row = next((row for row, until in enumerate(rows) if until <= call.began), len(rows))
        end = call.ended if call.ended is not None else now
        rows[row : row + 1] = [end]
        found[call.id] = row
    return found


def _records(history: History) -> Iterator[dict[str, Any]]:
    if not history.events:
        return
    start, end = history.events[0].time, history.events[-1].time

    def at(when: float) -> float:
        return round((when - start) * 1e6, 1)

    calls = history.calls()
    rows = lanes(calls, end)
    yield _named("process_name", _POOL, 0, history.pool)
    for node in sorted({call.node for call in calls} | set(range(history.nodes))):
        yield _named("process_name", node + 1, 0, f"node {node}" if node >= 0 else "on no node")
        yield {"ph": "M", "name": "process_sort_index", "pid": node + 1, "tid": 0, "args": {"sort_index": node + 1}}
    for call in calls:
        until = call.ended if call.ended is not None else end
        told = {"arguments": call.arguments, "outcome": call.outcome, "attempt": call.attempt, "rank": call.rank}
        yield {
            "ph": "X",
            "name": call.name,
            "cat": call.outcome,
            "pid": call.node + 1,
            "tid": rows[call.id] + 1,
            "ts": at(call.began),
            "dur": max(0.1, round((until - call.began) * 1e6, 1)),
            "args": {**told, "error": call.error} if call.error else told,
        }
    for metric in history.metrics():
        if math.isfinite(metric.value):
            counter = metric.name if metric.rank is None else f"{metric.name} (rank {metric.rank})"
            value = {"value": metric.value}
            yield {"ph": "C", "name": counter, "pid": metric.node + 1, "tid": 0, "ts": at(metric.time), "args": value}
    for event in history.events:
        text, node = _moment(event)
        if text:
            yield {
                "ph": "i",
                "s": "g" if node < 0 else "p",
                "name": text,
                "pid": node + 1,
                "tid": 0,
                "ts": at(event.time),
            }


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _moment(event: events.Event) -> tuple[str, int]:
    """What happened at one moment, and on which node; -1 for the whole pool, no text for what is not shown so."""
    match event:
        case events.Notice(text=text):
            return text, -1
        case events.PoolOpened():
            return "open", -1
        case events.PoolClosing():
            return "closing", -1
        case events.NodeDown(node=node, reason=reason):
            return f"down: {reason}", node
        case events.NodeUp(node=node):
            return "up", node
        case events.NodeLeaving(node=node, seconds=seconds):
            return f"will be taken away in {seconds:.0f} s", node
        case events.NodePhase(node=node, phase=phase):
            return phase, -1 if node is None else node
        case _:
            return "", -1
