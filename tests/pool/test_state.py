"""The life of a pool: what is allowed in which state, and who closes it."""

from __future__ import annotations

import threading

import pytest

from skyward.errors import ForkedPoolError, NestedPoolError, PoolClosed
from skyward.pool.lifetime import PoolState
from tests.support.waiting import until

# pyright: reportPrivateUsage=false


def opened() -> PoolState:
    state = PoolState()
    state.begin_opening(allow_nested=True)
    with state.opened():
        pass
    return state


def test_a_pool_that_is_open_takes_calls_and_is_not_opened_again() -> None:
    state = opened()
    state.check_open()
    with pytest.raises(PoolClosed, match="open already"):
        state.begin_opening(allow_nested=True)


def test_a_closed_pool_takes_no_calls_and_may_be_opened_again() -> None:
    state = opened()
    assert state.begin_closing(waits=True)
    with pytest.raises(PoolClosed, match="closing"):
        state.check_open()
    state.end_closing()
    with pytest.raises(PoolClosed, match="closed"):
        state.check_open()
    state.begin_opening(allow_nested=True)
    with pytest.raises(PoolClosed, match="not open yet"):
        state.check_open()


def test_one_thread_closes_and_the_others_wait_for_it() -> None:
    state, seen = opened(), list[tuple[bool, str]]()
    assert state.begin_closing(waits=True)
    other = threading.Thread(target=lambda: seen.append((state.begin_closing(waits=True), state.now)))
    other.start()
    assert not state.begin_closing(waits=True)  # the closing thread itself must not wait
    state.end_closing()
    other.join(60)
    assert seen == [(False, "closed")]


def test_a_callback_does_not_wait_for_the_closing_that_waits_for_it() -> None:
    state, seen = opened(), list[tuple[bool, str]]()
    assert state.begin_closing(waits=True)
    callback = threading.Thread(target=lambda: seen.append((state.begin_closing(waits=False), state.now)))
    callback.start()
    callback.join(60)
    assert seen == [(False, "closing")]


def test_a_fork_neither_uses_nor_closes_the_pool() -> None:
    state = opened()
    state.pid += 1
    assert not state.begin_closing(waits=True)
    with pytest.raises(ForkedPoolError):
        state.check_open()
    assert state.now == "open"


def test_a_pool_inside_a_body_is_opened_only_if_it_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPUTE_POOL", "{}")
    with pytest.raises(NestedPoolError):
        PoolState().begin_opening(allow_nested=False)
    PoolState().begin_opening(allow_nested=True)


def test_a_pool_that_is_closed_while_it_opens_does_not_open_and_whoever_closes_it_waits_for_that() -> None:
    state, seen = PoolState(), list[tuple[bool, str]]()
    state.begin_opening(allow_nested=True)
    state.check_wanted()
    other = threading.Thread(target=lambda: seen.append((state.begin_closing(waits=True), state.now)))
    other.start()
    until(lambda: state._unwanted)
    with pytest.raises(PoolClosed, match="closed while it was opening"):
        state.check_wanted()
    with pytest.raises(PoolClosed, match="closed while it was opening"), state.opened():
        raise AssertionError
    assert not seen
    state.end_closing()
    other.join(60)
    assert seen == [(False, "closed")]


def test_a_thread_that_closes_the_pool_that_it_opens_does_not_wait_for_itself() -> None:
    state = PoolState()
    state.begin_opening(allow_nested=True)
    assert not state.begin_closing(waits=True)
    with pytest.raises(PoolClosed):
        state.check_wanted()
    state.end_closing()
    state.begin_opening(allow_nested=True)
    state.check_wanted()  # it is another opening
