"""The notice that a machine is taken away, as a body sees it."""

from __future__ import annotations

import pickle
import time

import pytest

from skyward.api.info import Preemption


def test_the_time_that_is_left_does_not_depend_on_how_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    notice = Preemption(time.time() + 1000)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 5000)
    assert 800 < notice.seconds_left <= 1001
    monkeypatch.setattr(time, "time", lambda: now - 5000)
    assert 800 < notice.seconds_left <= 1001


def test_a_notice_travels_by_its_deadline() -> None:
    notice = Preemption(time.time() + 1000)
    copy = pickle.loads(pickle.dumps(notice))
    assert copy == notice
    assert 800 < copy.seconds_left <= 1001
    assert Preemption(time.time() - 1).seconds_left == 0
    assert repr(Preemption(5.0)) == "Preemption(deadline=5.0)"
