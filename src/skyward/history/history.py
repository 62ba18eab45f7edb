"""What happened in a pool, for programs: its calls, output, metrics and samples, as lists and as tables."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from skyward import events
from skyward.api.keywords import check_path
from skyward.errors import InvalidArgument
from skyward.events import Event
from skyward.history.store import Entry, Tail, find

__all__ = ["CallRecord", "History", "Metric", "read"]

Table = Literal["metrics", "calls", "output"]

_HOUR = 3600.0


@dataclass(frozen=True)
class CallRecord:
    """One call, as it went: times in seconds since 1970, `seconds` None while it runs."""

    id: str
    name: str
    arguments: str
    node: int
    rank: int | None
    began: float
    seconds: float | None = None
    outcome: str = "running"
    attempt: int = 0
    """How often it was tried before."""
    error: str = ""
    items: int = 1
    """How many items of `pool.map` it had; 1 for other calls."""
    failed_items: int = 0
    """How many of them have failed, if `return_exceptions` let the others go on."""
    group: str = ""
    """The same for all ranks of a broadcast; empty for a call to one node."""
    waited: float = 0.0
    """Seconds from when it was sent, or its earlier attempt was lost, until it began."""

    @property
    def failed(self) -> int:
        """How many calls it counts as that have failed: every item is one."""
        return self.failed_items or int(self.outcome not in ("ok", "running", "cancelled"))

    @property
    def ended(self) -> float | None:
        """When it ended."""
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
    """The events of one pool, in their order, and what follows from them."""

    def __init__(self, pool: str, found: Iterable[Event] = (), id: str = "", running: bool = False) -> None:
        self.pool, self.id, self.running = pool, id or pool, running
        self.events: list[Event] = list(found)

    @classmethod
    def load(cls, pool: str) -> History:
        """The newest history of a pool on this computer, by the pool's name or the id that `sky history` shows."""
        if not isinstance(pool, str):
            raise InvalidArgument(f"History.load({pool!r}): the name of a pool is wanted, as `sky history` lists it.")
        return read(find(pool))

    def __repr__(self) -> str:
        calls = sum(event.items for event in self.events if isinstance(event, events.CallEnded))
        return f"<History {self.id}, {'running' if self.running else self.state}, {calls} calls>"

    @property
    def state(self) -> str:
        """ "closed", "open", "opening" or "closing", as the last event that says so; "killed" if nobody closed it."""
        now = "opening"
        for event in self.events:
            match event:
                case events.PoolOpened():
                    now = "open"
                case events.PoolClosing():
                    now = "closing"
                case events.PoolClosed():
                    return "closed"
                case _:
                    pass
        return now if self.running else "killed"

    @property
    def nodes(self) -> int:
        """How many nodes were asked for."""
        return next((event.nodes for event in self.events if isinstance(event, events.PoolOpening)), 0)

    @property
    def provider(self) -> str:
        """Where they came from."""
        return next((event.provider for event in reversed(self.events) if isinstance(event, events.PoolOpening)), "")

    def calls(self) -> list[CallRecord]:
        """Every call that began, in that order, as its last attempt went; those that run have no `seconds` yet."""
        return list({call.id: call for call in self.attempts()}.values())

    def attempts(self) -> list[CallRecord]:
        """Every attempt of every call, also those that were lost with their node and tried again."""
        found: dict[tuple[str, int], CallRecord] = {}
        last: dict[str, int] = {}
        for event in self.events:
            if not isinstance(event, events.CallStarted | events.CallEnded):
                continue
            e, at = event, (event.call, event.attempt)
            told = (e.call, e.name, e.arguments, e.node, e.rank)
            if isinstance(e, events.CallStarted):
                before = found.get((e.call, last.get(e.call, e.attempt)))
                if before is not None and before.seconds is None and before.attempt != e.attempt:  # lost with its node
                    lost = replace(before, seconds=max(0.0, e.time - before.began), outcome="lost")
                    found[before.id, before.attempt] = lost
                found[at] = CallRecord(*told, e.time, attempt=e.attempt, group=e.group, waited=e.waited)
                last[e.call] = e.attempt
                continue
            running = found.get((e.call, last.get(e.call, e.attempt)))
            at = (e.call, running.attempt) if running is not None and running.seconds is None else at
            known, seconds = found.get(at), e.seconds
            if known is None:
                known = CallRecord(*told, e.time - e.seconds, attempt=e.attempt, group=e.group, waited=e.waited)
            elif not seconds:  # it is not told how long one ran that was lost or cancelled
                seconds = max(0.0, e.time - known.began)
            counts = {"items": e.items, "failed_items": e.failed_items}
            found[at] = replace(known, seconds=seconds, outcome=e.outcome, error=e.error, **counts)
            last[e.call] = e.attempt
        return list(found.values())

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
        """Whether the price of all machines was known all the time, so that `cost` is all of it."""
        return all(math.isfinite(event.hourly) for event in self.events if isinstance(event, events.PoolCost))

    def cost(self, now: float | None = None) -> float:
        """What the machines have cost in dollars until `now` (seconds since 1970), by their price where it is known."""
        spent, hourly, since = 0.0, 0.0, 0.0
        for event in self.events:
            if isinstance(event, events.PoolCost | events.PoolClosed):
                spent += hourly * max(0.0, event.time - since) / _HOUR
                told = event.hourly if isinstance(event, events.PoolCost) else 0.0
                hourly, since = (told if math.isfinite(told) else 0.0), event.time
        last = self.events[-1].time if self.events else since
        end = (time.time() if now is None else now) if self.running else last
        return spent + hourly * max(0.0, end - since) / _HOUR

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
        from skyward.history.trace import write

        target = Path(check_path("path", path, 'trace("run.json")'))
        if target.is_dir():
            raise InvalidArgument(
                f"{str(path)!r} is a folder: give the path of a file, like {str(target / 'run.json')!r}."
            )
        if not target.parent.is_dir():
            raise InvalidArgument(f"{str(path)!r}: there is no folder {str(target.parent)!r}. Make it first.")
        write(self, target)


def read(entry: Entry) -> History:
    """The history of a pool from its file."""
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
