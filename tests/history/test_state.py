"""The one fold from events to the state of a pool."""

from __future__ import annotations

import math

import pytest

from skyward import events as on
from skyward.history.state import PoolState

_OPENING = on.PoolOpening("p", 2, "AWS", time=0.0)
_OPENED = on.PoolOpened("p", 2, 4, 5.0, time=5.0)


def folded(*found: on.Event) -> PoolState:
    state = PoolState()
    for event in found:
        state.apply(event, event.time)
    return state


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (on.NodePhase("p", 0, "installing", time=6.0), "up"),
        (on.NodePhase("p", 0, "ready", time=6.0), "up"),
        (on.NodeLeaving("p", 0, 120.0, time=6.0), "leaving"),
        (on.NodeDown("p", 0, "lost", time=6.0), "down"),
        (on.NodeUp("p", 0, time=6.0), "up"),
        (on.PoolClosed("p", 6.0, 0, time=6.0), "gone"),
    ],
)
def test_a_node_has_the_status_of_the_last_event_that_concerns_it(event: on.Event, status: str) -> None:
    assert folded(_OPENING, _OPENED, event).nodes[0].status == status


@pytest.mark.parametrize(
    ("event", "stage"),
    [
        (_OPENING, "opening"),
        (_OPENED, "open"),
        (on.PoolClosing("p"), "closing"),
        (on.PoolClosed("p", 1.0, 0), "closed"),
    ],
)
def test_a_pool_is_in_the_stage_that_was_told_last(event: on.Event, stage: str) -> None:
    assert folded(event).stage == stage


def test_an_attempt_that_is_tried_again_was_lost_when_its_node_was_last_heard() -> None:
    state = folded(_OPENING, on.CallStarted("p", "c", "f", 0, 0, time=1.0), on.NodeSample("p", 0, 1.0, 1, 1, time=3.0))
    lost, again = state.apply(on.CallStarted("p", "c", "f", 1, 1, time=9.0), 9.0)
    assert (lost.outcome, lost.seconds, again.outcome) == ("lost", 3.0, "running")
    assert list(state.calls.values()) == [again]
    assert (len(state.nodes[0].running), len(state.nodes[1].running)) == (0, 1)
    (ended,) = state.apply(on.CallEnded("p", "c", "f", 1, "ok", 2.0, time=11.0), 11.0)
    assert ended is again
    assert (state.done, state.failed, state.nodes[0].failed, state.nodes[1].done) == (1, 0, 1, 1)
    assert not state.calls


def test_a_call_whose_beginning_was_not_told_began_as_long_before_its_end_as_it_took() -> None:
    state = folded(_OPENING)
    (call,) = state.apply(on.CallEnded("p", "c", "f", 0, "ok", 2.0, time=11.0), 11.0)
    assert (call.began, call.ended) == (9.0, 11.0)


def test_the_state_keeps_nothing_of_calls_that_are_over() -> None:
    state = folded(_OPENING, *(on.CallEnded("p", f"c{i}", "f", 0, "ok", 0.1, time=1.0) for i in range(100)))
    assert (state.done, len(state.calls), len(state.nodes[0].running)) == (100, 0, 0)


def test_every_price_counts_for_as_long_as_it_held() -> None:
    state = folded(on.PoolCost("p", 3.6, time=0.0), on.PoolCost("p", math.inf, time=1000.0))
    assert list(state.prices(1500.0)) == [(0.0, 1000.0, 3.6), (1000.0, 1500.0, math.inf)]
    assert (state.spent(1500.0), state.price_known, state.hourly) == (pytest.approx(1.0), False, math.inf)
    state.apply(on.PoolClosed("p", 1.0, 0, time=2000.0), 2000.0)
    assert (state.spent(9000.0), state.hourly, state.priced) == (pytest.approx(1.0), None, True)
