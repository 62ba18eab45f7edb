"""How far things are: groups of calls, and bodies that say so themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.api.reporting import Report, Thinned
from skyward.client.gather import GroupCounter
from skyward.events import GroupProgress, Progress, QueueLength
from skyward.node.logs import parsed
from skyward.node.settings import MARK
from tests.support.waiting import until


@sky.compute
def train(steps: int) -> None:
    import numpy as np

    for step in range(1, steps + 1):
        sky.progress(step, steps, loss=np.float32(1 / step))


@sky.compute
def double(n: int) -> int:
    time.sleep(0.02)
    return 2 * n


class Heard:
    def __init__(self, pool: sky.ComputePool, kind: type[Any]) -> None:
        self.events: list[Any] = []
        self._kind = kind
        self.stop = pool.on_event(self._hear)

    def _hear(self, event: sky.events.Event) -> None:
        if isinstance(event, self._kind):
            self.events.append(event)


@sky.compute
def report_and(end: str, steps: int) -> None:
    for step in range(1, steps + 1):
        sky.progress(step, loss=1.0)
        sky.progress(step, val_acc=step / steps)
    sky.progress(steps + 1, final_acc=0.99)
    if end == "raise":
        raise ValueError(end)
    if end == "hang":
        time.sleep(600)


def test_a_body_says_how_far_it_is(pool: sky.ComputePool) -> None:
    heard = Heard(pool, Progress)
    train(900) @ pool
    until(lambda: sum(event.step == 900 for event in heard.events) == 2)
    heard.stop()
    last = [event for event in heard.events if event.step == 900]
    assert {event.node for event in last} == {0, 1}
    assert last[0].total == 900
    assert last[0].metrics == {"loss": pytest.approx(1 / 900)}
    assert last[0].call is not None
    for node in (0, 1):
        assert [event.step for event in heard.events if event.node == node] == list(range(1, 901)), "every report"


@pytest.mark.parametrize(
    ("end", "steps"), [("return", 10), ("raise", 10), ("return", 3000), ("raise", 3000), ("hang", 3000)]
)
def test_no_metric_and_no_last_report_is_lost_however_a_body_ends(pool: sky.ComputePool, end: str, steps: int) -> None:
    heard = Heard(pool, Progress)
    future = report_and(end, steps).with_timeout(6) > pool if end == "hang" else report_and(end, steps) > pool
    error = future.exception(120)
    assert type(error).__name__ == {"return": "NoneType", "raise": "ValueError", "hang": "TaskTimeout"}[end]
    until(lambda: any("final_acc" in event.metrics for event in heard.events))
    heard.stop()
    last = heard.events[-1]
    assert (last.step, last.metrics["final_acc"]) == (steps + 1, 0.99)
    values = [event.metrics["val_acc"] for event in heard.events if "val_acc" in event.metrics]
    assert values[-1] == 1.0, "the newest of each name comes, also where reports are put together"
    if steps == 10:
        assert values == [step / 10 for step in range(1, 11)]
        assert sum("loss" in event.metrics for event in heard.events) == 10


def test_calls_that_share_a_process_each_have_their_reports() -> None:
    with sky.ComputePool(worker=sky.Worker(2, executor="thread"), console=False) as threads:
        heard = Heard(threads, Progress)
        sky.gather(report_and("return", 1500), report_and("return", 1500)) >> threads
        until(lambda: sum("final_acc" in event.metrics for event in heard.events) == 2)
    by_call = {event.call: event.metrics for event in heard.events if "final_acc" in event.metrics}
    assert len(by_call) == 2
    for call in by_call:
        values = [
            event.metrics["val_acc"] for event in heard.events if event.call == call and "val_acc" in event.metrics
        ]
        assert values[-1] == 1.0
        assert values == sorted(values)


def test_the_history_has_every_report(pool: sky.ComputePool) -> None:
    history = pool.history()
    before = sum(metric.name == "loss" for metric in history.metrics())
    train(200) >> pool
    until(lambda: sum(metric.name == "loss" for metric in pool.history().metrics()) == before + 200)


def _offer(limit: Thinned, step: float, total: float | None, now: float, **metrics: float) -> list[Report]:
    due = limit.offer({"step": step, "total": total, "metrics": metrics}, now)
    if due is None:
        return []
    limit.sent()
    return [due]


def test_more_than_a_thousand_reports_a_second_are_put_together_by_name() -> None:
    limit, sent = Thinned(rate=1000.0, now=0.0), list[Report]()
    for step in range(1, 10_001):
        rare = {"rare": float(step)} if step % 1000 == 0 else {}
        sent += _offer(limit, step, None, step / 10_000, loss=step, **rare)
    assert 1900 < len(sent) <= 2001, "a thousand at once, and a thousand a second"
    sent += [limit.held] if limit.held else []
    assert sent[-1]["metrics"]["loss"] == 10_000
    rare_values = [one["metrics"]["rare"] for one in sent if "rare" in one["metrics"]]
    assert rare_values == [1000.0 * i for i in range(1, 11)], "held back, and sent with the next"


def test_the_end_is_sent_at_once_and_once() -> None:
    limit, sent = Thinned(rate=1.0, now=0.0), list[Report]()
    for step in range(2000):
        sent += _offer(limit, step, 2000, 0.0)
    assert sent[-1]["step"] == 1999
    assert len(sent) == 1001
    for _ in range(100):
        sent += _offer(limit, 1999, 2000, 0.0, loss=1.0)
    assert len(sent) == 1001, "a last epoch of very many reports"


def test_a_report_is_held_until_it_has_been_sent() -> None:
    """A body can be stopped while it reports: what was put together is sent when it has ended."""
    limit = Thinned(rate=1.0, now=0.0)
    due = limit.offer({"step": 1.0, "total": None, "metrics": {"loss": 1.0}}, 0.0)
    assert due is not None
    assert limit.held == due
    limit.sent()
    assert limit.held is None


def test_what_is_no_number_is_refused(pool: sky.ComputePool) -> None:
    @sky.compute
    def wrong() -> None:
        sky.progress(1, loss="low")  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"sky\.progress\(loss='low'\): expected a number"):
        wrong() >> pool


def test_outside_a_pool_nothing_happens() -> None:
    sky.progress(1, 2, loss=0.5)
    train.local(3)


@pytest.mark.parametrize("how", ["gather", "future", "stream", "map"])
def test_groups_say_how_far_they_are(pool: sky.ComputePool, how: str) -> None:
    heard = Heard(pool, GroupProgress)
    calls = [double(n) for n in range(40)]
    if how == "gather":
        sky.gather(*calls) >> pool
    elif how == "future":
        (sky.gather(*calls) > pool).result(60)
    elif how == "stream":
        list(sky.gather(*calls, stream=True) >> pool)
    else:
        pool.map(double, range(40))
    until(lambda: bool(heard.events) and heard.events[-1].done == 40)
    heard.stop()
    assert heard.events[-1].total == 40
    assert heard.events[-1].name == "double"
    assert heard.events[-1].left == 0


def test_progress_can_be_silenced(pool: sky.ComputePool) -> None:
    heard = Heard(pool, GroupProgress)
    sky.gather(*(double(n) for n in range(4)), progress=False) >> pool
    pool.map(double, range(4), progress=False)
    double(1) >> pool
    heard.stop()
    assert heard.events == []


def test_groups_are_told_of_a_few_times_a_second() -> None:
    now, told = [0.0], list[Any]()
    counter = GroupCounter("pool", "f", 1000, told.append, lambda: now[0])
    for _ in range(999):
        now[0] += 0.01
        counter.add(1)
    assert 35 <= len(told) <= 40
    assert told[-1].rate == pytest.approx(100)
    assert told[-1].left == pytest.approx((1000 - told[-1].done) / 100)
    counter.add(1)
    assert told[-1].done == 1000


def test_what_ended_together_is_told_together() -> None:
    """Of calls that take an hour each, several end at once: then nothing more is counted for an hour."""
    now, told, due = [0.0], list[Any](), list[tuple[float, Any]]()
    counter = GroupCounter("pool", "f", 8, told.append, lambda: now[0], lambda wait, act: due.append((wait, act)))
    now[0] = 3600.0
    for _ in range(4):
        counter.add(1)
    assert [event.done for event in told] == [1]
    assert len(due) == 1
    wait, act = due.pop()
    now[0] += wait
    act()
    assert [event.done for event in told] == [1, 4]
    assert due == []
    counter.end()
    counter.add(1)
    assert (told[-1].done, told[-1].over) == (4, True), "nothing is told after the end"


def test_a_total_may_be_known_late() -> None:
    now, told = [0.0], list[Any]()
    counter = GroupCounter("pool", "f", None, told.append, lambda: now[0], lambda wait, act: None)
    now[0] = 1.0
    counter.add(3)
    assert (told[-1].total, told[-1].left, told[-1].over) == (None, None, False)
    now[0] = 2.0
    counter.expect(6)
    assert (told[-1].total, told[-1].left) == (6, 2.0)
    now[0] = 3.0
    counter.add(3)
    assert (told[-1].done, told[-1].over) == (6, False), "there may be more"
    counter.end()
    assert told[-1].over


def test_groups_that_fail_say_that_they_are_over(pool: sky.ComputePool) -> None:
    @sky.compute
    def fail(n: int) -> int:
        time.sleep(0.02)
        if n == 3:
            raise ValueError(n)
        return n

    heard = Heard(pool, GroupProgress)
    with pytest.raises(ValueError):
        sky.gather(*(fail(n) for n in range(40))) >> pool
    assert heard.events[-1].over, "before the error is raised"
    with pytest.raises(ValueError):
        pool.map(fail, range(40))
    assert heard.events[-1].over
    sky.gather(*(fail(n) for n in range(6)), return_exceptions=True) >> pool
    assert (heard.events[-1].done, heard.events[-1].failed, heard.events[-1].over) == (5, 1, True)
    pool.map(fail, range(6), return_exceptions=True)
    heard.stop()
    assert (heard.events[-1].done, heard.events[-1].failed, heard.events[-1].over) == (5, 1, True)


def test_listeners_hear_how_many_calls_wait(pool: sky.ComputePool) -> None:
    heard = Heard(pool, QueueLength)
    futures = [double(n) > pool for n in range(200)]
    until(lambda: any(event.calls > 20 for event in heard.events))
    for future in futures:
        future.result(60)
    until(lambda: heard.events[-1].calls == 0)
    heard.stop()


def test_reports_are_lines_for_whoever_reads_plain_output(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import skyward as sky\n@sky.compute\ndef f():\n    sky.progress(3, 10, loss=0.25)\n"
        "with sky.ComputePool() as pool:\n    f() >> pool\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    assert "[node-0] 3/10 (30%) loss 0.25" in done.stdout
    assert MARK not in done.stdout + done.stderr


def test_reports_with_other_things_than_numbers_stay_lines() -> None:
    assert parsed(MARK + 'progress {"step": 1, "total": null, "metrics": {"a": 1}}') is not None
    assert parsed(MARK + 'progress {"step": 1, "total": null, "metrics": {"a": "<b>"}}') is None
    assert parsed(MARK + 'progress {"step": "1", "total": null, "metrics": {}}') is None
