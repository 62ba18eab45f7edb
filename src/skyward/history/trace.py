"""A history as a trace that Perfetto and Chrome show: nodes as processes, calls as slices, figures as counters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward import events

if TYPE_CHECKING:
    from skyward.history.history import CallRecord, History

__all__ = ["lanes", "write"]

_POOL = 1  # the process of what concerns the whole pool; node n is process n + 2. Viewers take process 0 for the system


def write(history: History, path: Path) -> None:
    """Writes the trace as JSON; half a file is never seen under its name."""
    text = json.dumps({"traceEvents": list(_records(history)), "displayTimeUnit": "ms"})
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def lanes(calls: list[CallRecord], now: float) -> dict[tuple[str, int], int]:
    """A row for each attempt of a call among those of its node, so that no two in a row overlap."""
    free: dict[int, list[float]] = {}
    found: dict[tuple[str, int], int] = {}
    for call in sorted(calls, key=lambda call: call.began):
        rows = free.setdefault(call.node, [])
        row = next((row for row, until in enumerate(rows) if until <= call.began), len(rows))
        end = call.ended if call.ended is not None else now
        rows[row : row + 1] = [end]
        found[call.id, call.attempt] = row
    return found


def _records(history: History) -> Iterator[dict[str, Any]]:
    if not history.events:
        return
    start, end = min(event.time for event in history.events), max(event.time for event in history.events)

    def at(when: float) -> float:
        return round((when - start) * 1e6, 1)

    calls = history.attempts()
    rows = lanes(calls, end)
    yield _named("process_name", _POOL, 0, history.pool)
    for node in sorted({call.node for call in calls if call.node >= 0} | set(range(history.nodes))):
        yield _named("process_name", _process(node), 0, f"node {node}")
        index = {"sort_index": _process(node)}
        yield {"ph": "M", "name": "process_sort_index", "pid": _process(node), "tid": 0, "args": index}
    for node, row in sorted({(call.node, rows[call.id, call.attempt]) for call in calls}):
        name = f"calls {row + 1}" if node >= 0 else f"calls that never began {row + 1}"
        yield _named("thread_name", _process(node), row + 1, name)
    records = [_slice(call, rows[call.id, call.attempt] + 1, at, end) for call in calls]
    for metric in history.metrics():
        if math.isfinite(metric.value):
            counter = metric.name if metric.rank is None else f"{metric.name} (rank {metric.rank})"
            about = {"name": counter, "pid": _process(metric.node), "tid": 0, "ts": at(metric.time)}
            records.append({"ph": "C", **about, "args": {"value": metric.value}})
    for event in history.events:
        text, node = _moment(event)
        if text:
            about = {"name": text, "pid": _process(node), "tid": 0, "ts": at(event.time)}
            records.append({"ph": "i", "s": "g" if node < 0 else "p", **about})
    yield from sorted(records, key=lambda record: record["ts"])


def _slice(call: CallRecord, row: int, at: Callable[[float], float], end: float) -> dict[str, Any]:
    """A call as a slice; nothing in a row overlaps, also after times were rounded."""
    until = call.ended if call.ended is not None else max(end, call.began)
    told: dict[str, Any] = {
        "arguments": call.arguments,
        "outcome": call.outcome,
        "attempt": call.attempt + 1,
        "rank": call.rank,
        "waited": call.waited,
    }
    told |= {"error": call.error} if call.error else {}
    told |= {"broadcast": call.group} if call.group else {}
    start = at(call.began)
    return {
        "ph": "X",
        "name": call.name,
        "cat": call.outcome,
        "pid": _process(call.node),
        "tid": row,
        "ts": start,
        "dur": max(0.0, round(at(until) - start, 1)),
        "args": told,
    }


def _process(node: int) -> int:
    return node + 2 if node >= 0 else _POOL


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
