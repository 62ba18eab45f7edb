"""A pool's history, as its user reads it: while it is open, after it was closed, and when it was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import InvalidArgument
from skyward.view.page.model import PageModel
from tests.support.waiting import until


@sky.compute
def train(steps: int) -> int:
    for step in range(steps):
        print("step", step)
        sky.progress(step, steps, loss=1 / (step + 1))
    return steps


@sky.compute
def fail(reason: str) -> None:
    raise ValueError(reason)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_history_has_calls_output_metrics_and_failures(tmp_path: Path) -> None:
    with sky.ComputePool(nodes=2, console=False, name="run-1") as pool:
        _ = train(3) @ pool
        with pytest.raises(ValueError, match="no luck"):
            _ = fail("no luck") >> pool
        now = pool.history()
        assert now.running
        assert now.state == "open"
        assert len(now.calls()) == 3
    history = pool.history()
    assert history.state == "closed"
    assert (history.nodes, history.provider) == (2, "Local")
    first, second, third = history.calls()
    assert {first.node, second.node} == {0, 1}
    assert (first.name, first.arguments, first.outcome) == ("train", "3", "ok")
    assert (third.outcome, third.arguments) == ("error", "'no luck'")
    assert "ValueError: no luck" in third.error
    assert "raise ValueError(reason)" in third.error
    assert [line.text for line in history.output(node=first.node)] == ["step 0", "step 1", "step 2"]
    losses = [metric.value for metric in history.metrics() if metric.name == "loss" and metric.node == first.node]
    assert losses[-1] == pytest.approx(1 / 3)
    pool.trace(tmp_path / "run.json")
    records = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert sum(record["ph"] == "X" for record in records) == 3
    assert sky.History.load("run-1").calls() == history.calls()


def test_no_history_is_kept_where_it_is_not_wanted(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sky.ComputePool(console=False, history=False) as pool, pytest.raises(InvalidArgument, match="history=False"):
        pool.history()
    monkeypatch.setenv("SKYWARD_HISTORY", "off")
    with sky.ComputePool(console=False):
        pass
    assert not (state / "history").exists()


def test_a_home_that_cannot_be_written_costs_the_history_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SKYWARD_STATE", str(blocked / "state"))
    with sky.ComputePool(console=False) as pool:
        assert train(1) >> pool == 1
    assert "no history of this pool is kept" in caplog.text


_KILLED = """
import skyward as sky

@sky.compute
def sleep():
    import time
    print("asleep", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    with sky.ComputePool(console="plain", name="victim") as pool:
        sleep() >> pool
"""


def test_the_history_of_a_program_that_was_killed_says_so_and_what_ran(tmp_path: Path, state: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_KILLED)
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        until(lambda: any(h.output() for h in _known("victim")), what="the body's output in the history")
        (history,) = _known("victim")
        assert history.running
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    (history,) = _known("victim")
    assert history.state == "killed"
    (call,) = history.calls()
    assert (call.name, call.outcome) == ("sleep", "running")


def _known(pool: str) -> list[sky.History]:
    try:
        return [sky.History.load(pool)]
    except InvalidArgument:
        return []


def odd_only(number: int) -> int:
    if number % 2 == 0:
        raise ValueError(f"{number} is even")
    return number


def test_every_item_of_a_map_counts_as_a_call_that_is_done_or_has_failed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with sky.ComputePool(nodes=2, name="map-1", console="plain") as pool:
        found = pool.map(odd_only, range(1000), return_exceptions=True)
        assert sum(isinstance(result, ValueError) for result in found) == 500
    assert "1,000 calls, 500 failed" in capfd.readouterr().err
    history = pool.history()
    assert sum(call.items for call in history.calls()) == 1000
    assert sum(call.failed for call in history.calls()) == 500
    assert "1000 calls" in repr(history)
    several = next(call for call in history.calls() if call.items > 2)
    assert several.outcome == "error"
    assert f"{several.failed} of {several.items} items have failed, the first of them item" in several.error
    assert "is even" in several.error
    assert "raise ValueError" in several.error
    assert several.arguments.startswith("items ")
    listed = subprocess.run(
        [sys.executable, "-m", "skyward", "history", "--json"], capture_output=True, text=True, check=True
    )
    row = json.loads(listed.stdout)
    assert (row["calls"], row["failed"]) == (1000, 500)
    page = PageModel("map-1")
    page.apply(history.events)
    assert (page.summary(0.0)["done"], page.summary(0.0)["failed"]) == (500, 500)


def test_a_map_that_stops_at_a_failure_says_that_one_item_has_failed(capfd: pytest.CaptureFixture[str]) -> None:
    with sky.ComputePool(nodes=1, name="map-2", console="plain") as pool:
        with pytest.raises(ZeroDivisionError):
            pool.map(lambda x: 1 // x, [1] * 50 + [0] + [1] * 500)
    told = capfd.readouterr().err
    assert ", 1 failed" in told
    assert sum(call.failed for call in pool.history().calls()) == 1
