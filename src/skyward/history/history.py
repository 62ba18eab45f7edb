"""What happened in a pool, for programs: calls, output, metrics, as lists and as tables."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from skyward import events
from skyward.api.checks import check_path
from skyward.errors import InvalidArgument
from skyward.events import Event
from skyward.history.state import Attempt, PoolState
from skyward.history.store import Entry, Tail, find

__all__ = ["History", "lanes", "read", "write"]


Table = Literal["metrics", "calls", "output"]


@dataclass(frozen=True)
class CallRecord:
    """Times in seconds since 1970; `seconds` is None while it runs."""

    id: str
    name: str
    arguments: str
    node: int
    rank: int | None
    began: float
    seconds: float | None = None
    outcome: str = "running"
    attempt: int = 0
    error: str = ""
    items: int = 1
    """Items of `pool.map`; 1 for other calls."""
    failed_items: int = 0
    """How many of them failed, if `return_exceptions` lets the others continue."""
    group: str = ""
    """The same for all ranks of a broadcast."""
    waited: float = 0.0
    """Seconds in the queue."""

    @property
    def failed(self) -> int:
        """Calls that it counts as failed: every item is one."""
        return self.failed_items or int(self.outcome not in ("ok", "running", "cancelled"))

    @property
    def ended(self) -> float | None:
        return None if self.seconds is None else self.began + self.seconds


@dataclass(frozen=True)
class Metric:
    """One figure of a body (`sky.progress`) or of a node (CPU, memory, GPUs)."""

    time: float
    node: int
    rank: int | None
    call: str | None
    name: str
    value: float
    step: float | None = None


class History:
    """The events of one pool, in order, and what follows from them."""

    def __init__(self, pool: str, found: Iterable[Event] = (), id: str = "", running: bool = False) -> None:
        self.pool, self.id, self.running = pool, id or pool, running
        self.events: list[Event] = list(found)

    @classmethod
    def load(cls, pool: str) -> History:
        """The newest history of a pool on this computer, by the pool's name or the id that `sky history` shows."""
        if not isinstance(pool, str):
            raise InvalidArgument(f"History.load({pool!r}): expected the name of a pool, as `sky history` lists it.")
        return read(find(pool))

    def __repr__(self) -> str:
        calls = sum(event.items for event in self.events if isinstance(event, events.CallEnded))
        return f"<History {self.id}, {'running' if self.running else self.state}, {calls} calls>"

    @property
    def state(self) -> str:
        """ "closed", "open", "opening" or "closing"; "killed" if nobody closed it."""
        stage = self._state.stage or "opening"
        return stage if self.running or stage == "closed" else "killed"

    @property
    def nodes(self) -> int:
        """How many nodes were requested."""
        return self._state.requested

    @property
    def provider(self) -> str:
        """Where they came from."""
        return self._state.provider

    def calls(self) -> list[CallRecord]:
        """Every call that began, by its last attempt; running ones have no `seconds` yet."""
        return list({call.id: call for call in self.attempts()}.values())

    def attempts(self) -> list[CallRecord]:
        """Every attempt of every call, also those lost with their node and repeated."""
        return [
            CallRecord(
                *(a.id, a.name, a.arguments, a.node, a.rank, a.began, a.seconds, a.outcome, a.attempt),
                *(a.error, a.items, a.failed_items, a.group, a.waited),
            )
            for a in self._folded[1]
        ]

    def output(self, node: int | None = None, call: str | None = None) -> list[events.Output]:
        """The lines that bodies wrote: all, or those of a node or of a call."""
        return [
            event
            for event in self.events
            if isinstance(event, events.Output) and node in (None, event.node) and call in (None, event.call)
        ]

    def metrics(self) -> list[Metric]:
        """What bodies reported with `sky.progress`, and how busy nodes were, in order."""
        return [metric for event in self.events for metric in _metrics(event)]

    @property
    def price_known(self) -> bool:
        """Whether the price of all machines was always known."""
        return self._state.price_known

    @property
    def priced(self) -> bool:
        """Whether its machines have a price, as clouds' have."""
        return self._state.priced

    def cost(self, now: float | None = None) -> float:
        """What the machines have cost in dollars until `now` (seconds since 1970), where prices are known."""
        last = self.events[-1].time if self.events else 0.0
        return self._state.spent((time.time() if now is None else now) if self.running else last)

    @property
    def _state(self) -> PoolState:
        return self._folded[0]

    @cached_property
    def _folded(self) -> tuple[PoolState, list[Attempt]]:
        state, attempts = PoolState(), dict[int, Attempt]()
        for event in self.events:
            attempts |= {id(attempt): attempt for attempt in state.apply(event, event.time)}
        return state, list(attempts.values())

    def to_pandas(self, table: Table = "metrics") -> Any:
        """A DataFrame of a `table`: "metrics" (time, node, rank, call, name, value, step), "calls", "output"."""
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise InvalidArgument("to_pandas() needs pandas on this computer: pip install pandas.") from None
        if table == "metrics":
            rows, columns = [asdict(metric) for metric in self.metrics()], list(Metric.__dataclass_fields__)
        elif table == "calls":
            rows, columns = [asdict(call) for call in self.calls()], list(CallRecord.__dataclass_fields__)
        elif table == "output":
            columns = ["time", "node", "rank", "call", "stream", "text"]
            rows = [{name: getattr(line, name) for name in columns} for line in self.output()]
        else:
            raise InvalidArgument(f"to_pandas({table!r}): there are 'metrics', 'calls' and 'output'.")
        frame = pd.DataFrame(rows, columns=columns)
        for name in ("time", "began"):
            if name in columns:
                frame[name] = pd.to_datetime(cast(Any, frame[name]), unit="s", utc=True)
        return frame

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace to `path` that https://ui.perfetto.dev and chrome://tracing show."""

        target = Path(check_path("path", path, 'trace("run.json")'))
        if target.is_dir():
            raise InvalidArgument(
                f"{str(path)!r} is a folder: give the path of a file, like {str(target / 'run.json')!r}."
            )
        if not target.parent.is_dir():
            raise InvalidArgument(f"{str(path)!r}: there is no folder {str(target.parent)!r}. Make it first.")
        write(self, target)


def read(entry: Entry) -> History:
    return History(entry.pool, Tail(entry.path).read(), entry.id, entry.running)


def _metrics(event: Event) -> Iterator[Metric]:
    if isinstance(event, events.Progress):
        at = (event.time, event.node, event.rank, event.call)
        for name, value in event.metrics.items():
            yield Metric(*at, name, value, event.step)
        if not event.metrics:
            yield Metric(*at, "step", event.step, event.step)
    elif isinstance(event, events.NodeSample):
        for name, value in (("cpu", event.cpu), ("memory", event.memory), ("running", event.running)):
            yield Metric(event.time, event.node, None, None, name, value)
        for gpu in event.gpus:
            for name in ("utilization", "memory_used", "temperature", "power"):
                value = getattr(gpu, name)
                if value is not None:
                    yield Metric(event.time, event.node, None, None, f"gpu{gpu.index}.{name}", value)


_POOL = 1  # the process of what concerns the whole pool; node n is process n + 2. Viewers take process 0 for the system


def write(history: History, path: Path) -> None:
    text = json.dumps({"traceEvents": list(_records(history)), "displayTimeUnit": "ms"})
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def lanes(calls: list[CallRecord], now: float) -> dict[tuple[str, int], int]:
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
