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
from skyward.client.progress import GroupCounter
from skyward.events import GroupProgress, Progress, QueueLength
from skyward.node.marked_lines import MARK, parsed
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


def test_a_body_says_how_far_it_is(pool: sky.ComputePool) -> None:
    heard = Heard(pool, Progress)
    train(1000) @ pool
    until(lambda: sum(event.step == 1000 for event in heard.events) == 2)
    heard.stop()
    last = [event for event in heard.events if event.step == 1000]
    assert {event.node for event in last} == {0, 1}
    assert last[0].total == 1000
    assert last[0].metrics == {"loss": pytest.approx(0.001)}
    assert last[0].call is not None
    assert len(heard.events) < 400  # few of the two thousand: ten a second


def test_what_is_no_number_is_refused(pool: sky.ComputePool) -> None:
    @sky.compute
    def wrong() -> None:
        sky.progress(1, loss="low")  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"sky\.progress\(loss='low'\): a number is wanted"):
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
