"""OpenTelemetry hears of pools and calls: spans with their times, figures by outcome."""

from __future__ import annotations

from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.integrations import opentelemetry


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import metrics as metrics_api
    from opentelemetry import trace as trace_api
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = trace.TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider([reader])
    monkeypatch.setattr(trace_api, "get_tracer", tracers.get_tracer)
    monkeypatch.setattr(metrics_api, "get_meter", meters.get_meter)
    return exporter, reader


@sky.compute
def half(number: int) -> float:
    if number < 0:
        raise ValueError("negative")
    sky.progress(1, 1, value=number)
    return number / 2


def test_a_pool_and_its_calls_are_spans_and_figures(told: tuple[Any, Any]) -> None:
    exporter, reader = told
    pool = sky.ComputePool(nodes=2, console=False)
    pool.on_event(sky.integrations.opentelemetry())
    with pool:
        assert half(4) >> pool == 2
        with pytest.raises(ValueError, match="negative"):
            _ = half(-1) >> pool
    spans = {span.name + span.status.status_code.name: span for span in exporter.get_finished_spans()}
    whole, good, bad = spans["skyward.poolUNSET"], spans["halfUNSET"], spans["halfERROR"]
    assert good.parent.span_id == whole.context.span_id
    assert whole.start_time <= good.start_time <= good.end_time <= whole.end_time
    assert bad.status.description == "ValueError: negative"
    data = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    counts = next(metric for metric in data if metric.name == "skyward.calls").data.data_points
    assert {point.attributes["skyward.outcome"]: point.value for point in counts} == {"ok": 1, "error": 1}
    assert any(metric.name == "skyward.progress" for metric in data)


def test_items_of_a_map_are_counted_as_the_history_counts_them(told: tuple[Any, Any]) -> None:
    listen = opentelemetry()
    listen(events.CallEnded("p", "a", "f", 0, "ok", 1.0, items=10))
    listen(events.CallEnded("p", "b", "f", 0, "error", 1.0, items=10, failed_items=3))
    listen(events.CallEnded("p", "c", "f", 0, "crashed", 1.0, items=10))
    listen(events.CallEnded("p", "d", "f", 0, "cancelled", 1.0, items=10))
    data = told[1].get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    counts = next(metric for metric in data if metric.name == "skyward.calls").data.data_points
    found = {point.attributes["skyward.outcome"]: point.value for point in counts}
    assert found == {"ok": 17, "error": 3, "crashed": 1, "cancelled": 10}


def test_a_call_that_is_tried_again_is_two_spans(told: tuple[Any, Any]) -> None:
    exporter, _ = told
    listen = opentelemetry()
    listen(events.CallStarted("p", "c", "f", 0, 0, time=1.0))
    listen(events.CallStarted("p", "c", "f", 1, 1, time=2.0))
    listen(events.CallEnded("p", "c", "f", 1, "ok", 1.0, time=3.0))
    first, second = exporter.get_finished_spans()
    assert (first.end_time, second.start_time, second.end_time) == (2 * 10**9, 2 * 10**9, 3 * 10**9)
    assert second.attributes["skyward.attempt"] == 1


def test_the_end_of_one_pool_leaves_the_calls_of_another_open(told: tuple[Any, Any]) -> None:
    exporter, _ = told
    listener = sky.integrations.opentelemetry()
    for pool in ("a", "b"):
        listener(events.PoolOpening(pool, 1, "Local", time=1.0))
        listener(events.CallStarted(pool, pool, f"call of {pool}", 0, 0, time=2.0))
    listener(events.PoolClosed("a", 3.0, 1, time=3.0))
    assert [span.name for span in exporter.get_finished_spans()] == ["call of a", "skyward.pool"]
    listener(events.CallEnded("b", "b", "call of b", 0, "ok", 2.0, time=4.0))
    assert exporter.get_finished_spans()[-1].end_time == 4_000_000_000
