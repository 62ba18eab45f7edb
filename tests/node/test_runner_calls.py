"""The calls of one runner: every row of their table, and that a call is either begun or given back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from skyward.node.runner import CALLS, RunnerCalls

STATES = sorted({state for state, _ in CALLS})
EVENTS = sorted({event for _, event in CALLS})


@dataclass(eq=False)
class Item:
    id: str
    state: str = ""


def reach(state: str) -> tuple[RunnerCalls[Item], Item]:
    calls, item = RunnerCalls[Item](), Item("a")
    assert calls.add(item)
    if state in ("running", "stopping"):
        assert calls.claim(item)
    if state == "stopping":
        assert calls.cancel("a") == (item, [])
    assert item.state == state
    return calls, item


def apply(calls: RunnerCalls[Item], item: Item, event: str) -> set[str]:
    """Tells of an event; what the runner is to do, in the words of the table."""
    match event:
        case "claim":
            return {"write status", "start body"} if calls.claim(item) else set()
        case "recall":
            return {"tell recalled"} if calls.recall(item.id) else set()
        case "cancel":
            call, given = calls.cancel(item.id)
            interrupted = {"leave", "interrupt body"} if call is item and calls.leaving else set()
            return interrupted | ({"tell recalled"} if item.id in given else set())
        case "leave":  # the cancel of a body that runs beside it
            other = Item("other")
            if not calls.add(other) or not calls.claim(other):
                return set()
            call, given = calls.cancel("other")
            assert call is other
            return {"tell recalled"} if item.id in given else set()
        case "end":
            calls.end(item)
            return {"tell verdict"}  # the runner sends it whenever a body has ended
        case _:
            raise AssertionError(event)


@pytest.mark.parametrize(("state", "event"), CALLS, ids=str)
def test_a_call_in_its_runner_does_what_its_table_says(state: str, event: str) -> None:
    calls, item = reach(state)
    expected, actions = CALLS[state, event]
    assert apply(calls, item, event) == set(actions)
    assert item.state == expected
    assert (item.id in calls.calls) == (expected != "gone")
    assert calls.leaving == (event == "leave" or state == "stopping" or "leave" in actions)


@pytest.mark.parametrize(
    ("state", "event"),
    [(state, event) for state, event in itertools.product(STATES, EVENTS) if (state, event) not in CALLS],
)
def test_an_event_without_a_row_changes_nothing(state: str, event: str) -> None:
    calls, item = reach(state)
    assert apply(calls, item, event) <= {"tell verdict"}
    assert item.state == state
    assert calls.calls["a"] is item


def test_a_call_that_was_given_back_is_never_begun() -> None:
    calls, item = reach("waiting")
    assert calls.recall("a")
    assert not calls.claim(item)


def test_a_call_that_has_begun_is_never_given_back() -> None:
    calls, _ = reach("running")
    assert not calls.recall("a")


def test_a_call_is_begun_by_one_thread_only() -> None:
    calls, item = reach("waiting")
    assert calls.claim(item)
    assert not calls.claim(item)


def test_the_old_copy_of_a_call_that_was_sent_again_takes_nothing_from_the_new_one() -> None:
    calls, old = reach("waiting")
    calls.recall("a")
    new = Item("a")
    calls.add(new)
    assert not calls.claim(old)
    assert calls.claim(new)
    calls.end(old)
    assert calls.calls["a"] is new


def test_a_process_that_breaks_off_a_body_gives_back_what_waits_and_begins_nothing_more() -> None:
    calls, item = reach("running")
    waiting, neighbour = Item("b"), Item("c")
    for other in (waiting, neighbour):
        calls.add(other)
    calls.claim(neighbour)
    assert calls.cancel("a") == (item, ["b"])
    assert (waiting.state, neighbour.state) == ("gone", "running")  # neighbours go on to their end
    assert not calls.claim(waiting)
    assert not calls.add(Item("d"))
    assert calls.running() == [item, neighbour]


def test_a_late_cancel_of_a_call_that_has_ended_interrupts_nobody() -> None:
    calls, item = reach("running")
    calls.end(item)
    assert calls.cancel("a") == (None, [])
    assert not calls.leaving
