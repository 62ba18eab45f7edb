"""Frameworks on a function: decorators that take effect on the node, below `@sky.compute`; pools for one framework.

Also a listener that tells OpenTelemetry of a pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyward import events
from skyward.accelerators import Accelerator
from skyward.api.image import Image
from skyward.api.plugin import Plugin
from skyward.api.provider import Provider
from skyward.api.spec import Allocation, Worker
from skyward.errors import MissingPackage
from skyward.events import Event
from skyward.history.lines import summary
from skyward.history.state import FAILED, Attempt, PoolState
from skyward.plugins._huggingface import transformers
from skyward.plugins._jax import decorated as jax
from skyward.plugins._joblib import joblib, joblib_backend, sklearn
from skyward.plugins._keras import decorated as keras
from skyward.plugins._optuna import optuna
from skyward.plugins._torch import decorated as torch
from skyward.pool.pool import ComputePool

__all__ = [
    "JoblibPool",
    "ScikitLearnPool",
    "jax",
    "joblib_backend",
    "keras",
    "opentelemetry",
    "optuna",
    "sklearn_backend",
    "torch",
    "transformers",
]

sklearn_backend = joblib_backend

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise AttributeError(f"module 'skyward.integrations' has no {name!r}; there are {', '.join(__all__)}")


def JoblibPool(
    provider: Provider | None = None,
    *,
    nodes: int | None = None,
    concurrency: int | None = None,
    max_inflight: int | None = None,
    progress: bool = True,
    image: Image | None = None,
    accelerator: str | Accelerator | None = None,
    vcpus: float | None = None,
    memory_gb: float | None = None,
    allocation: Allocation = "spot-if-available",
    provision_timeout: float = 3600,
    joblib_version: str | None = None,
    **options: Any,
) -> ComputePool:
    """A pool that joblib's `Parallel` uses while it is open.

    `provider`, `nodes`, `image`, `accelerator`, `vcpus`, `memory_gb`, `allocation` and other `options` are those of
    `sky.ComputePool`.

    Args:
        concurrency: how many processes each node runs tasks in. Default: 1.
        max_inflight: the most batches that are on the nodes at once. Default: as many as keep them busy.
        progress: whether to show tasks done, tasks per second and the time left. Default: yes.
        provision_timeout: seconds until machines have to run. Default: 3600.
        joblib_version: a number or a constraint such as ">=1.4". Default: this computer's version.
    """
    return _pool(
        joblib(joblib_version, max_inflight=max_inflight, progress=progress),
        concurrency,
        options,
        provider=provider,
        nodes=nodes,
        image=image,
        accelerator=accelerator,
        vcpus=vcpus,
        memory_gb=memory_gb,
        allocation=allocation,
        provision_timeout=provision_timeout,
    )


def ScikitLearnPool(
    provider: Provider | None = None,
    *,
    nodes: int | None = None,
    concurrency: int | None = None,
    max_inflight: int | None = None,
    progress: bool = True,
    image: Image | None = None,
    accelerator: str | Accelerator | None = None,
    vcpus: float | None = None,
    memory_gb: float | None = None,
    allocation: Allocation = "spot-if-available",
    provision_timeout: float = 3600,
    sklearn_version: str | None = None,
    **options: Any,
) -> ComputePool:
    """The same as JoblibPool, with scikit-learn on the nodes.

    `provider`, `nodes`, `concurrency`, `max_inflight`, `progress`, `image`, `accelerator`, `vcpus`, `memory_gb`,
    `allocation`, `provision_timeout` and all other `options` are explained there. `sklearn_version` is a number or a
    constraint such as ">=1.5"; by default this computer's version.
    """
    return _pool(
        sklearn(sklearn_version, max_inflight=max_inflight, progress=progress),
        concurrency,
        options,
        provider=provider,
        nodes=nodes,
        image=image,
        accelerator=accelerator,
        vcpus=vcpus,
        memory_gb=memory_gb,
        allocation=allocation,
        provision_timeout=provision_timeout,
    )


def _pool(plugin: Plugin, concurrency: int | None, options: dict[str, Any], **named: Any) -> ComputePool:
    """Calls of joblib are Python code that would wait for one interpreter's lock: every slot is a process."""
    if options.get("worker") is None:
        options["worker"] = Worker(concurrency=1 if concurrency is None else concurrency, executor="process")
        concurrency = None
    added = [*options.pop("plugins", ()), plugin]
    return ComputePool(plugins=added, concurrency=concurrency, **named, **options)


# A listener for OpenTelemetry: spans of the pool and its calls, metrics of calls and nodes, through the program's
# providers.


_NANO = 1_000_000_000


def opentelemetry() -> Callable[[Event], None]:
    """A listener for `pool.on_event`: spans of calls, figures of calls and nodes.

    Uses the program's tracer and meter providers; needs the extra `otel` (opentelemetry-api).
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
