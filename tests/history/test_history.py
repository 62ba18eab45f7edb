"""What a program reads out of a history: calls, cost, tables, a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyward import events
from skyward.errors import InvalidArgument
from skyward.history.history import History, lanes


def _history(*found: events.Event, running: bool = False) -> History:
    return History("p", found, running=running)


def test_a_call_that_was_tried_again_is_one_call_with_its_last_attempt() -> None:
    (call,) = _history(
        events.CallStarted("p", "c", "f", 0, 0, 0, "3", time=1.0),
        events.CallStarted("p", "c", "f", 1, 1, 1, "3", time=5.0),
        events.CallEnded("p", "c", "f", 1, "ok", 2.0, 1, time=7.0),
    ).calls()
    assert (call.node, call.attempt, call.began, call.seconds, call.outcome) == (1, 1, 5.0, 2.0, "ok")


def test_a_call_that_runs_has_no_end() -> None:
    (call,) = _history(events.CallStarted("p", "c", "f", 0, 0, time=1.0)).calls()
    assert (call.outcome, call.seconds, call.ended) == ("running", None, None)


def test_the_cost_counts_hours_until_the_pool_was_closed() -> None:
    found = (
        events.PoolCost("p", 2.0, time=0.0),
        events.PoolCost("p", 4.0, time=1800.0),
        events.PoolClosed("p", 5400.0, 0, time=5400.0),
        events.NodeUp("p", 0, time=9000.0),
    )
    assert _history(*found).cost() == pytest.approx(1.0 + 4.0)
    assert _history(*found[:2], running=True).cost(now=3600.0) == pytest.approx(1.0 + 2.0)


def test_a_price_that_is_not_known_leaves_the_cost_a_number() -> None:
    found = (events.PoolCost("p", float("inf"), time=0.0), events.PoolCost("p", 4.0, time=1800.0))
    assert _history(*found, events.PoolClosed("p", 1.0, 0, time=5400.0)).cost() == pytest.approx(4.0)


def test_calls_that_overlap_stand_in_rows_of_their_own() -> None:
    found = [
        event
        for name, node, start, end in (("a", 0, 0.0, 5.0), ("b", 0, 1.0, 2.0), ("c", 0, 3.0, 4.0), ("d", 1, 0.0, 9.0))
        for event in (
            events.CallStarted("p", name, "f", node, 0, time=start),
            events.CallEnded("p", name, "f", node, "ok", end - start, time=end),
        )
    ]
    assert lanes(_history(*found).calls(), 10.0) == {("a", 0): 0, ("b", 0): 1, ("c", 0): 1, ("d", 0): 0}


def test_a_trace_has_calls_counters_and_moments(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    _history(
        events.PoolOpening("p", 2, "Local", time=10.0),
        events.CallStarted("p", "c", "train", 1, 0, 1, "3", time=11.0),
        events.Progress("p", 1, 1.0, 2.0, {"loss": 0.5, "bad": float("nan")}, "c", 1, time=11.5),
        events.CallEnded("p", "c", "train", 1, "error", 1.0, 1, "ValueError: no", time=12.0),
        events.Notice("p", "mind", "warning", time=12.5),
    ).trace(path)
    records = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))[
        "traceEvents"
    ]
    (call,) = [record for record in records if record["ph"] == "X"]
    assert (call["name"], call["pid"], call["ts"], call["dur"]) == ("train", 3, 1e6, 1e6)
    assert call["args"]["error"] == "ValueError: no"
    assert [record["name"] for record in records if record["ph"] == "C"] == ["loss (rank 1)"]
    assert "mind" in [record["name"] for record in records if record["ph"] == "i"]
    names = {record["pid"]: record["args"]["name"] for record in records if record["name"] == "process_name"}
    assert names == {1: "p", 2: "node 0", 3: "node 1"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_has_what_the_format_asks_for_and_nothing_overlaps(tmp_path: Path) -> None:
    """The trace event format: every record with its fields, names for processes and rows, slices in order."""
    found: list[events.Event] = [events.PoolOpening("p", 2, "Local", time=10.0)]
    for number in range(50):
        at = 11.0 + number * 0.0123
        ended = events.CallEnded("p", f"c{number}", "f", number % 2, "ok", 0.0123457, number % 2, time=at + 0.0123457)
        found.append(ended)
    found += [
        events.CallStarted("p", "again", "g", 0, 0, 0, "3", time=12.0),
        events.CallStarted("p", "again", "g", 1, 1, 1, "3", time=13.0),
        events.CallEnded("p", "again", "g", 1, "ok", 2.0, 1, "", 1, "3", time=15.0),
        events.CallEnded("p", "never", "h", -1, "cancelled", 0.0, None, time=15.0),
    ]
    path = tmp_path / "run.json"
    _history(*found).trace(path)
    records = json.loads(path.read_text())["traceEvents"]
    named = {(r["pid"], r["tid"]) for r in records if r["ph"] == "M" and r["name"] == "thread_name"}
    processes = {r["pid"] for r in records if r["ph"] == "M" and r["name"] == "process_name"}
    timed = [record for record in records if record["ph"] != "M"]
    assert timed == sorted(timed, key=lambda record: record["ts"])
    ends: dict[tuple[int, int], float] = {}
    for record in timed:
        assert {"name", "ph", "pid", "tid", "ts"} <= set(record)
        assert record["pid"] in processes
        assert record["ts"] >= 0
        if record["ph"] == "X":
            row = record["pid"], record["tid"]
            assert row in named
            assert record["ts"] >= ends.get(row, 0.0) - 0.05
            ends[row] = record["ts"] + record["dur"]
    assert [(r["pid"], r["cat"], r["dur"]) for r in timed if r["name"] == "g"] == [(2, "lost", 1e6), (3, "ok", 2e6)]
    assert [r["pid"] for r in timed if r["name"] == "h"] == [1]


def test_tables_have_times_and_one_row_a_figure() -> None:
    pytest.importorskip("pandas")
    history = _history(
        events.Progress("p", 1, 1.0, 2.0, {"loss": 0.5, "rate": 0.1}, "c", 1, time=11.5),
        events.NodeSample("p", 0, 50.0, 1024, 1, (events.GpuSample(0, "A100", 99.0),), time=12.0),
    )
    frame = history.to_pandas()
    assert list(frame["name"]) == ["loss", "rate", "cpu", "memory", "running", "gpu0.utilization"]
    assert list(frame["value"]) == [0.5, 0.1, 50.0, 1024.0, 1.0, 99.0]
    assert str(frame["time"].dtype).startswith("datetime64")
    assert len(history.to_pandas("calls")) == 0
    with pytest.raises(InvalidArgument, match="'metrics', 'calls' and 'output'"):
        history.to_pandas("nodes")  # type: ignore[arg-type]
