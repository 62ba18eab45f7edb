"""The same work for several things at once: in order, bounded, and ended before an error leaves."""

from __future__ import annotations

import threading

import pytest

from skyward.machines.parallel import each, spread


def test_results_come_in_the_order_of_the_items() -> None:
    first = threading.Event()

    def act(item: int) -> int:
        if item == 0:
            assert first.wait(60)
        else:
            first.set()
        return item * item

    assert each(act, range(5)) == [0, 1, 4, 9, 16]
    assert each(act, []) == []


def test_no_more_than_so_many_run_at_a_time() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def act(item: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    each(act, range(12), most=3)
    assert most <= 3


def test_an_error_leaves_only_when_nothing_runs_any_more() -> None:
    begun, ended = threading.Event(), threading.Event()

    def act(item: int) -> None:
        if item == 0:
            assert begun.wait(60)
            raise ValueError("on purpose")
        begun.set()
        threading.Event().wait(0.1)
        ended.set()

    with pytest.raises(ValueError, match="on purpose"):
        each(act, [0, 1], most=2)
    assert ended.is_set()


def test_where_no_thread_can_be_started_this_one_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 refuses threads while the interpreter ends."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert [future.result(0) for future in spread(lambda item: -item, range(3))] == [0, -1, -2]
