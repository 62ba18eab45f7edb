"""A listener for OpenTelemetry: spans of the pool and its calls, metrics of calls and nodes, through the program's
providers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from skyward import events
from skyward.errors import MissingPackage
from skyward.events import Event
from skyward.history.lines import summary
from skyward.history.state import FAILED, Attempt, PoolState

__all__ = ["opentelemetry"]

_NANO = 1_000_000_000


def opentelemetry() -> Callable[[Event], None]:
    """A listener for `pool.on_event`, or for a pool that is opened later: spans of calls, figures of calls and nodes.

    Uses the tracer and meter providers that the program has set; needs the extra `otel` (opentelemetry-api).
    """
    try:
        from opentelemetry import metrics, trace
    except ModuleNotFoundError:
        raise MissingPackage(
            "sky.integrations.opentelemetry() needs opentelemetry-api on this computer: pip install opentelemetry-sdk."
        ) from None
    return _Telemetry(trace, metrics.get_meter("skyward"))


class _Telemetry:
    def __init__(self, trace: Any, meter: Any) -> None:
        self._trace, self._tracer = trace, trace.get_tracer("skyward")
        self._pools: dict[str, Any] = {}
        self._states: defaultdict[str, PoolState] = defaultdict(PoolState)
        self._calls: dict[tuple[str, str], Any] = {}
        self._seconds = meter.create_histogram("skyward.call.duration", "s", "How long bodies ran.")
        self._ended = meter.create_counter(
            "skyward.calls", "{call}", "Calls that have ended, by outcome; items of a map."
        )
        self._cpu = meter.create_gauge("skyward.node.cpu", "%", "Per cent of one core that a node's processes use.")
        self._memory = meter.create_gauge("skyward.node.memory", "By", "Memory of a node's processes.")
        self._reported = meter.create_gauge("skyward.progress", "1", "What bodies report with sky.progress, by name.")

    def __call__(self, event: Event) -> None:
        for attempt in self._states[event.pool].apply(event, event.time):
            self._follow(event, attempt)
        match event:
            case events.PoolOpening():
                about = {"skyward.pool": event.pool, "skyward.provider": event.provider, "skyward.nodes": event.nodes}
                start = int(event.time * _NANO)
                self._pools[event.pool] = self._tracer.start_span("skyward.pool", start_time=start, attributes=about)
            case events.CallEnded():
                self._count(event)
            case events.NodeSample():
                where = {"skyward.pool": event.pool, "skyward.node": event.node}
                self._cpu.set(event.cpu, where)
                self._memory.set(event.memory, where)
            case events.Progress():
                where = {"skyward.pool": event.pool, "skyward.node": event.node}
                for name, value in event.metrics.items():
                    self._reported.set(value, {**where, "skyward.metric": name, "skyward.rank": event.rank or 0})
            case events.Notice() | events.NodeDown():
                span = self._pools.get(event.pool)
                if span is not None:
                    text = event.text if isinstance(event, events.Notice) else f"node {event.node}: {event.reason}"
                    span.add_event(text, timestamp=int(event.time * _NANO))
            case events.PoolClosed():
                for call in self._states.pop(event.pool).calls:
                    self._calls.pop((event.pool, call)).end(int(event.time * _NANO))
                span = self._pools.pop(event.pool, None)
                if span is not None:
                    span.end(int(event.time * _NANO))
            case _:
                pass

    def _follow(self, event: Event, attempt: Attempt) -> None:
        key, now = (event.pool, attempt.id), int(event.time * _NANO)
        if attempt.ended is None:
            span = self._pools.get(event.pool)
            parent = self._trace.set_span_in_context(span) if span is not None else None
            about = {"skyward.call": attempt.id, "skyward.node": attempt.node, "skyward.attempt": attempt.attempt}
            about |= {"skyward.rank": attempt.rank} if attempt.rank is not None else {}
            self._calls[key] = self._tracer.start_span(attempt.name, context=parent, start_time=now, attributes=about)
        elif (span := self._calls.pop(key, None)) is not None:
            if attempt.outcome in FAILED and isinstance(event, events.CallEnded):  # not one that is tried again
                why = summary(attempt.outcome, attempt.error) or attempt.outcome
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, why))
            span.end(now)

    def _count(self, event: events.CallEnded) -> None:
        about = {"skyward.pool": event.pool, "skyward.function": event.name, "skyward.outcome": event.outcome}
        for count, outcome in ((event.done, "ok"), (event.failed, event.outcome)):
            if count:
                self._ended.add(count, about | {"skyward.outcome": outcome})
        if event.outcome == "cancelled":
            self._ended.add(event.items, about)
        self._seconds.record(event.seconds, about)
