"""The calls of a pool on the client: every row of their table, and what becomes of calls that nodes lose or forget."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from skyward import events
from skyward.api.compute import PendingCompute
from skyward.client.actions import Action, Discard, Emit, Fail, Post, Settle
from skyward.client.call import Call
from skyward.client.calls import CALLS, ClientCalls
from skyward.client.kept import KeptResult
from skyward.errors import NodeLost, PoolClosed, SkywardError
from skyward.node.protocol import ClientToAgent, Close, Returned

STATES = sorted({state for state, _ in CALLS})
EVENTS = sorted({event for _, event in CALLS})


def made(retries: int = 0, name: str = "f", **about: Any) -> Call:
    pending = PendingCompute[Any](abs, label=name)
    call = Call(pending, {"name": name, "attempt": 0, **about}, [b"piece"], {}, {}, retries)
    call.made = 0.0
    return call


class Bench:
    """The calls of a pool with two nodes of one slot each, at a time of its own."""

    def __init__(self) -> None:
        self.calls = ClientCalls("pool", 2, 1)
        self.now = 100.0

    def up(self, *numbers: int) -> list[Action]:
        return self.calls.take_calls(numbers, self.now)

    def submit(self, *calls: Call) -> list[Action]:
        return self.calls.submit(calls, self.now)

    def turn(self, seconds: float, in_doubt: Callable[[int], bool] = lambda number: False) -> list[Action]:
        self.now += seconds
        return self.calls.turn(in_doubt, lambda number: True, self.now)

    def make_short(self) -> None:
        """A call ends that was so short that others are sent ahead from now on."""
        self.up(0)
        call = made()
        self.submit(call)
        self.calls.result(0, Returned(id=call.id, seconds=0.001, buffers=[b""]), self.now)

    def broadcast(self, *calls: Call) -> list[Action]:
        self.up(0, 1)
        return self.calls.submit_to(list(enumerate(calls)), self.now)


Scene = tuple[Bench, Call]


# how a call gets into each of its states


def waiting(retries: int) -> Scene:
    bench, call = Bench(), made(retries)
    bench.submit(call)
    return bench, call


def sent(retries: int) -> Scene:
    bench, call = Bench(), made(retries)
    bench.up(0)
    bench.submit(call)
    return bench, call


def sent_as_a_rank(retries: int) -> Scene:
    bench, call = Bench(), made()
    bench.broadcast(call, made())
    return bench, call


def sent_ahead(retries: int) -> Scene:
    """Behind another call on node 0, while node 1 has nothing to do."""
    bench, call = Bench(), made(retries)
    bench.make_short()
    bench.submit(made(), call)
    bench.up(0, 1)
    assert call.node == 0
    return bench, call


def recalling(retries: int) -> Scene:
    bench, call = sent_ahead(retries)
    bench.turn(0.1)
    return bench, call


def recalling_as_a_rank(retries: int) -> Scene:
    """No events lead here: ranks of a broadcast are never recalled. The row keeps the table whole."""
    bench, call = recalling(retries)
    call.gang = [call, *(other for other in bench.calls.calls.values() if other is not call)]
    return bench, call


def stopping(retries: int) -> Scene:
    bench, call = sent(retries)
    bench.calls.cancel(call, "cancelled", bench.now)
    return bench, call


def stopping_as_a_rank(retries: int) -> Scene:
    bench, call = sent_as_a_rank(retries)
    bench.calls.cancel(call, "cancelled", bench.now)
    return bench, call


def held(retries: int) -> Scene:
    bench, call = sent_as_a_rank(retries)
    bench.calls.failure(0, call.id, (ValueError("first"), "error", 0.1), True, bench.now)
    return bench, call


REACH: dict[str, Callable[[int], Scene]] = {
    "waiting": waiting,
    "sent": sent,
    "recalling": recalling,
    "stopping": stopping,
    "held": held,
}
SPECIAL = {
    ("sent", "recall"): sent_ahead,
    ("sent", "doubtful failure"): sent_as_a_rank,
    ("recalling", "doubtful failure"): recalling_as_a_rank,
    ("stopping", "doubtful failure"): stopping_as_a_rank,
}


# how each event comes about


def apply(bench: Bench, call: Call, event: str) -> list[Action]:
    calls, number, now = bench.calls, -1 if call.node is None else call.node, bench.now
    match event:
        case "send":
            return bench.up(0)
        case "recall":
            return bench.turn(0.1)
        case "recalled":
            return calls.recalled(number, call.id, now)
        case "result":
            return calls.result(number, Returned(id=call.id, seconds=0.1, buffers=[b"result"]), now)
        case "failure" | "doubtful failure":
            failure = (ValueError("no"), "error", 0.1)
            return calls.failure(number, call.id, failure, event.startswith("doubtful"), now)  # type: ignore[arg-type]
        case "argument lost":
            call.needs = [KeptResult("0" * 20, "g", state="failed", error=ValueError("no"))]
            calls.dispatch.remove(call)
            calls._enqueue(call)
            return calls._taken()
        case "lost" | "lost for good":
            return calls.lost(number, call.id, "gone", now)
        case "cancel":
            return calls.cancel(call, "cancelled", now)
        case "abandon":
            return calls.abandon(lambda call: PoolClosed("closed"), now)
        case "release":
            return bench.turn(0.6)
        case _:
            raise AssertionError(event)


def effects_on(call: Call, actions: list[Action]) -> set[str]:
    """What the engine is to do about a call, in the words of the table."""
    found: set[str] = set()
    for action in actions:
        match action:
            case Post(_, messages):
                raw = [message.encoded()[0] for message in messages]
                found |= {f"post {message[0]}" for message in raw if message[1] == call.id}
            case Settle(of, _) if of is call:
                found.add("settle")
            case Fail(of, error) if of is call:
                found.add("fail cancelled" if isinstance(error, CancelledError) else "fail")
            case _:
                pass
    return found


@pytest.mark.parametrize(("state", "event"), CALLS, ids=str)
def test_a_call_on_the_client_does_what_its_table_says(state: str, event: str) -> None:
    bench, call = SPECIAL.get((state, event), REACH[state])(1 if event == "lost" else 0)
    assert call.state == state
    if event not in ("send", "recall"):
        bench.up()  # no node has room: what is queued again stays queued
    expected, actions = CALLS[state, event]
    attempt, ended = call.attempt, bench.calls.settled

    did = apply(bench, call, event)

    assert call.state == expected
    assert effects_on(call, did) == set(actions) - {"queue again", "count attempt", "hold"}
    assert (call.id in bench.calls.calls) == (expected != "done")
    ends = [action.call for action in did if isinstance(action, Settle | Fail)]
    assert ends.count(call) == (expected == "done")
    assert (bench.calls.settled > ended) == (expected == "done")
    assert call.attempt - attempt == ("count attempt" in actions)
    assert (call in bench.calls.dispatch.waiting()) == ("queue again" in actions)
    if "hold" in actions:
        assert "fail" in effects_on(call, bench.turn(0.6))


def test_a_call_that_is_done_is_settled_or_fails_and_never_both() -> None:
    """The engine lets go of what a call held when it does one of the two."""
    ends = {"settle", "fail", "fail cancelled"}
    for row, (state, actions) in CALLS.items():
        assert len(ends.intersection(actions)) == (state == "done"), row


@pytest.mark.parametrize("state", STATES)
def test_an_event_without_a_row_changes_nothing(state: str) -> None:
    bench, call = REACH[state](0)
    for event in EVENTS:
        if (state, event) not in CALLS:
            assert not bench.calls._step(call, event), event  # the one place that all events go through
            assert call.state == state
            assert bench.calls._taken() == []


# behaviour


def notices(actions: list[Action]) -> list[str]:
    emitted = [action.event for action in actions if isinstance(action, Emit)]
    return [event.text for event in emitted if isinstance(event, events.Notice)]


def failures(actions: list[Action]) -> dict[str, BaseException]:
    return {action.call.id: action.error for action in actions if isinstance(action, Fail)}


def test_calls_for_one_node_share_a_frame() -> None:
    bench = Bench()
    bench.make_short()
    calls = [made() for _ in range(3)]
    posts = [action for action in bench.submit(*calls) if isinstance(action, Post)]
    assert [(post.node, [message.encoded()[0][:2] for message in post.messages]) for post in posts] == [
        (0, [["call", call.id] for call in calls])
    ]


def test_a_lost_call_is_sent_again_with_the_next_attempt_and_fails_after_the_last() -> None:
    bench, call = sent(retries=1)
    did = bench.calls.lose_node(0, "it fell silent", bench.now)
    assert notices(did) == ["f was lost with node 0 (it fell silent); retry 1 of 1 follows."]
    assert (call.state, call.header["attempt"]) == ("sent", 1)
    did = bench.calls.lose_node(0, "it fell silent", bench.now)
    error = failures(did)[call.id]
    assert isinstance(error, NodeLost)
    assert error.attempts == 2


def test_a_call_whose_results_stream_is_not_started_again() -> None:
    bench, call = sent(retries=3)
    call.stream = SimpleNamespace()  # type: ignore[assignment]
    assert isinstance(failures(bench.calls.lose_node(0, "gone", bench.now))[call.id], NodeLost)


def test_what_a_node_says_of_a_call_that_another_has_by_now_counts_for_nothing() -> None:
    bench, call = sent(retries=1)
    bench.up(1)
    bench.calls.lose_node(0, "gone", bench.now)
    assert call.node == 1
    result = Returned(id=call.id, seconds=1.0, buffers=[b""])
    assert bench.calls.result(0, result, bench.now) == [Discard({})]
    assert bench.calls.recalled(0, call.id, bench.now) == []
    assert bench.calls.lost(0, call.id, "gone", bench.now) == []
    assert call.state == "sent"


def test_a_call_without_any_node_left_fails_while_it_waits() -> None:
    bench, call = waiting(0)
    assert isinstance(failures(bench.calls.fail_waiting(0, "gone", bench.now))[call.id], NodeLost)


def test_the_first_rank_that_fails_stops_the_others_which_count_as_stopped_because_of_it() -> None:
    bench, first, other = Bench(), made(), made()
    bench.broadcast(first, other)
    did = bench.calls.failure(0, first.id, (ValueError("no"), "error", 0.1), False, bench.now)
    assert effects_on(other, did) == {"post cancel"}
    assert (other.state, other.stopping) == ("stopping", "gang")
    assert "rank 0 of 2" in failures(did)[first.id].__notes__[0]


def test_a_doubtful_failure_waits_for_a_peer_that_may_be_lost_and_gives_way_to_its_loss() -> None:
    bench, first, other = Bench(), made(), made()
    bench.broadcast(first, other)
    bench.calls.failure(0, first.id, (ConnectionError("peer"), "error", 0.1), True, bench.now)
    assert bench.turn(0.6, lambda number: number == 1) == []
    assert first.state == "held"
    did = bench.calls.lose_node(1, "gone", bench.now)
    assert list(failures(did)) == [first.id, other.id]
    assert isinstance(failures(did)[other.id], NodeLost)
    assert (first.stopping, other.stopping) == ("gang", None)  # so the loss is what the user sees


def test_closing_a_stream_stops_a_body_that_does_not_end_by_itself() -> None:
    bench, call = sent(0)
    did = bench.calls.stream_closed(call, bench.now)
    assert did == [Post(0, [Close(call.id)])]
    assert bench.turn(2.9) == []
    assert "post cancel" in effects_on(call, bench.turn(0.2))


# the net


def asked(actions: list[Action]) -> list[Any]:
    messages = [message for action in actions if isinstance(action, Post) for message in action.messages]
    return [message.encoded()[0] for message in messages if isinstance(message, ClientToAgent.Ask)]


def test_a_node_is_asked_about_a_call_of_which_nothing_was_heard_for_long() -> None:
    bench, call = sent(1)
    assert asked(bench.turn(29)) == []
    assert asked(bench.turn(2)) == [["ask", [call.id], 0]]
    assert asked(bench.turn(2)) == []
    assert bench.calls.states(0, {call.id: "running"}, bench.now) == []
    assert asked(bench.turn(31)) == [["ask", [call.id], 0]]


def test_many_calls_are_asked_about_in_several_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.client.calls._ASKED", 1)
    bench, call = sent_ahead(1)
    ids = [each.id for each in bench.calls.calls.values() if each.node == 0]
    assert len(ids) == 2
    assert call.id in ids
    bench.calls.dispatch.recallable = lambda *_: []  # type: ignore[method-assign]
    assert asked(bench.turn(31)) == [["ask", [id], 0] for id in ids]


def test_a_node_without_a_connection_is_not_asked() -> None:
    bench, _ = sent(1)
    bench.now += 31
    assert bench.calls.turn(lambda number: False, lambda number: False, bench.now) == []


def test_a_call_that_its_node_knows_nothing_of_is_started_again_and_a_warning_says_so() -> None:
    bench, call = sent(1)
    bench.turn(31)
    did = bench.calls.states(0, {call.id: "unknown"}, bench.now)
    assert "This is a bug" in notices(did)[0]
    bench.turn(0)
    assert (call.state, call.attempt) == ("sent", 1)


def test_an_answer_from_before_a_call_was_sent_again_counts_for_nothing() -> None:
    bench, call = sent(1)
    bench.turn(31)
    bench.calls.recalled(0, call.id, bench.now)
    bench.turn(0)
    assert (call.state, call.node) == ("sent", 0)
    assert bench.calls.states(0, {call.id: "unknown"}, bench.now) == []


def test_an_answer_from_before_a_call_was_to_end_counts_for_nothing() -> None:
    bench, call = sent(1)
    assert asked(bench.turn(31)) == [["ask", [call.id], 0]]
    bench.calls.cancel(call, "cancelled", bench.now)
    assert call.state == "stopping"
    assert bench.calls.states(0, {call.id: "running"}, bench.now) == []


def test_a_node_that_did_not_hear_of_a_cancel_is_told_again() -> None:
    bench, call = stopping(0)
    bench.turn(31)
    did = bench.calls.states(0, {call.id: "running"}, bench.now)
    assert effects_on(call, did) == {"post cancel"}
    assert "This is a bug" in notices(did)[0]


def test_a_call_whose_argument_cannot_be_sent_ends_with_an_error() -> None:
    bench, call = sent(1)
    call.uploads["blob"] = ("/nowhere", 10)
    did = bench.calls.unsendable(0, "blob", OSError("gone"), bench.now)
    assert isinstance(failures(did)[call.id], SkywardError)
