"""Every row of the agent's two tables, reached by events as they come from client, runners and clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from skyward.node.agent_slots import CALLS, SLOTS, Action, Kill, NodeCall, Spawn, Tell
from tests.support.agent_calls import GRACE, LIMIT, Bench, effects_on

CALL_STATES = sorted({state for state, _ in CALLS})
CALL_EVENTS = sorted({event for _, event in CALLS})
SLOT_STATES = sorted({state for state, _ in SLOTS})
SLOT_EVENTS = sorted({event for _, event in SLOTS})

Scene = tuple[Bench, NodeCall]


# how a call gets into each of its states


def queued() -> Scene:
    bench = Bench(ready=False)
    return bench, bench.take("a", timeout=LIMIT)


def queued_without_its_buffer() -> Scene:
    bench = Bench()
    return bench, bench.take("a", {"blob"}, timeout=LIMIT)


def sent() -> Scene:
    bench = Bench()
    return bench, bench.take("a", timeout=LIMIT)


def sent_behind_another() -> Scene:
    """Of two runners one has "x" and, ahead, "a"; the other has "y"."""
    bench = Bench(processes=2)
    bench.make_short()
    bench.take("x")
    bench.take("y")
    call = bench.take("a", timeout=LIMIT)
    assert call.slot is bench.calls.calls["x"].slot is not bench.calls.calls["y"].slot
    return bench, call


def returning() -> Scene:
    bench, call = sent()
    bench.did = bench.calls.recall(call.id, bench.now)
    return bench, call


def shifting() -> Scene:
    """The runner that was to get the call has ended meanwhile, so that the call waits when it is given back."""
    bench, call = sent_behind_another()
    other = bench.calls.calls["y"]
    name = other.slot.name if other.slot is not None else ""
    bench.end(other, seconds=0.0005)
    bench.exit(name)
    return bench, call


def withdrawn() -> Scene:
    bench, call = sent()
    bench.cancel(call)
    return bench, call


def running() -> Scene:
    bench, call = sent()
    bench.begin(call)
    return bench, call


def loading() -> Scene:
    bench, call = sent()
    bench.begin(call, loading=True)
    return bench, call


def stopping() -> Scene:
    bench, call = running()
    bench.cancel(call)
    return bench, call


def doomed() -> Scene:
    bench, call = running()
    bench.setup()
    return bench, call


REACH: dict[str, Callable[[], Scene]] = {
    "queued": queued,
    "sent": sent,
    "returning": returning,
    "shifting": shifting,
    "withdrawn": withdrawn,
    "running": running,
    "stopping": stopping,
    "doomed": doomed,
}
SPECIAL = {
    ("queued", "no room"): queued_without_its_buffer,
    ("sent", "shift"): sent_behind_another,
    ("running", "entered"): loading,
}


# how each event comes about


def apply(bench: Bench, call: NodeCall, event: str) -> list[Action]:
    calls, name = bench.calls, call.slot.name if call.slot is not None else bench.names[0]
    match event:
        case "assign":
            return calls.ready(name, bench.now)
        case "recall":
            return calls.recall(call.id, bench.now)
        case "cancel":
            return bench.cancel(call)
        case "no room":
            return calls.no_room("blob", 10, "No space left on device", bench.now)
        case "began" | "entered":
            return bench.begin(call)
        case "shift":
            return bench.end(calls.calls["y"], seconds=0.0005)  # the other runner has nothing to do
        case "returned" if call.state == "sent":
            return calls.left(name, [call.id], bench.now)  # nobody asked: the process begins no body any more
        case "returned":
            return bench.give_back(call)
        case "ended":
            return bench.end(call, "stopped" if call.state in ("withdrawn", "stopping") else "done")
        case "exited":
            return bench.exit(name)
        case "limit":
            return bench.tick(LIMIT)
        case "grace":
            return bench.tick(GRACE)
        case "process killed":
            return bench.setup()
        case _:
            raise AssertionError(event)


@pytest.mark.parametrize(("state", "event"), CALLS, ids=str)
def test_a_call_on_its_node_does_what_its_table_says(state: str, event: str) -> None:
    bench, call = SPECIAL.get((state, event), REACH[state])()
    assert call.state == state
    expected, actions = CALLS[state, event]

    did = apply(bench, call, event)

    assert call.state == expected
    assert (call.id in bench.calls.calls) == (expected != "gone")
    untold = {"queue", "start limit", "start grace"}
    killed = {"kill process"} if event == "process killed" else set()  # by whoever kills it, for a reason of its own
    assert effects_on(call, did) - killed == set(actions) - untold
    assert (call.id in bench.calls.queue) == (expected == "queued") == ("queue" in actions)
    if "start limit" in actions:
        assert "send cancel" in effects_on(call, bench.tick(LIMIT))
    if "start grace" in actions:
        assert "kill process" not in effects_on(call, bench.tick(GRACE - 0.1))
        assert "kill process" in effects_on(call, bench.tick(0.1))


@pytest.mark.parametrize("state", CALL_STATES)
def test_an_event_without_a_row_changes_nothing_in_a_call(state: str) -> None:
    bench, call = REACH[state]()
    before = (call.slot, call.began, call.why, list(bench.calls.queue), bench.calls.due())
    for event in CALL_EVENTS:
        if (state, event) not in CALLS:
            assert not bench.calls._step(call, event), event  # the one place that all events go through
            assert call.state == state
            assert bench.calls._taken() == []
    assert (call.slot, call.began, call.why, list(bench.calls.queue), bench.calls.due()) == before


def test_the_last_word_on_a_call_says_why_it_ended() -> None:
    for scene, event, message in (
        (queued, "cancel", ["cancelled", "a", {}]),
        (sent, "ended", ["done", "a", {"s": 0.1}]),
        (stopping, "ended", ["cancelled", "a", {"s": 0.1}]),
        (doomed, "exited", ["lost", "a", {"s": 0.0, "reason": "the pool's processes were replaced", "replaced": True}]),
    ):
        bench, call = scene()
        bench.did = apply(bench, call, event)
        assert message in bench.messages()
    bench, call = running()
    bench.tick(LIMIT)
    bench.end(call, "stopped", 5.1)
    assert bench.messages() == [["timeout", "a", {"s": 5.1, "limit": LIMIT, "killed": False}]]
    bench, call = running()
    bench.exit("1-0")
    crash = {"code": -11, "stderr": "last words", "oom": False, "shared": 0, "s": 0.0, "replaced": True}
    assert bench.messages()[0] == ["crashed", "a", crash]


# runner processes


def slot_in(state: str, threads: int = 1) -> tuple[Bench, str]:
    bench = Bench(threads=threads, ready=state not in ("starting", "failed"))
    (name,) = bench.names
    if state == "failed":
        assert bench.calls.failed(name, bench.now)
    elif state == "leaving":
        bench.calls.left(name, [], bench.now)
    elif state == "retired":
        bench.calls.fence(bench.now)
    assert bench.calls.slots[name].state == state
    return bench, name


def apply_to_slot(bench: Bench, name: str, event: str) -> list[Action]:
    match event:
        case "ready":
            return bench.calls.ready(name, bench.now)
        case "failed":
            assert bench.calls.failed(name, bench.now)
            return []
        case "leaving":
            return bench.calls.left(name, [], bench.now)
        case "exited":
            return bench.exit(name, 1)
        case "retire":
            return bench.calls.fence(bench.now)
        case _:
            raise AssertionError(event)


def slot_effects(name: str, actions: list[Action]) -> set[str]:
    found: set[str] = set()
    for action in actions:
        match action:
            case Tell(message):
                found.add(f"tell {message.encoded()[0][0]}")
            case Spawn():
                found.add("spawn")
            case Kill(slot) if slot.name == name:
                found.add("kill")
            case _:
                raise AssertionError(action)
    return found


@pytest.mark.parametrize(("state", "event"), SLOTS, ids=str)
def test_a_runner_process_does_what_its_table_says(state: str, event: str) -> None:
    expected, actions = SLOTS[state, event]
    bench, name = slot_in(state, threads=2 if "spawn beside" in actions else 1)

    did = apply_to_slot(bench, name, event)

    slot = bench.calls.slots.get(name)
    assert ("gone" if slot is None else slot.state) == expected
    told = {"spawn" if action == "spawn beside" else action for action in actions} - {"count failure"}
    assert slot_effects(name, did) == told
    if "count failure" in actions:  # the third in a row is told to the client, and no other is made
        for _ in range(2):
            bench.tick(1.0)
            did = apply_to_slot(bench, bench.names[0], event)
        assert slot_effects("", did) == {"tell failed", "tell replaced"}
        assert not bench.names


@pytest.mark.parametrize("state", SLOT_STATES)
def test_an_event_without_a_row_changes_nothing_in_a_runner_process(state: str) -> None:
    bench, name = slot_in(state)
    slot = bench.calls.slots[name]
    for event in SLOT_EVENTS:
        if (state, event) not in SLOTS:
            assert not bench.calls._move(slot, event), event
            assert slot.state == state
            assert bench.calls._taken() == []


def test_a_process_that_leaves_is_replaced_at_once_only_if_others_may_run_beside_it() -> None:
    for threads, hooks, beside in ((2, False, True), (2, True, False), (1, False, False)):
        bench = Bench(threads=threads, hooks=hooks)
        (name,) = bench.names
        did = bench.calls.left(name, [], bench.now)
        assert slot_effects(name, did) == ({"spawn"} if beside else set())
        did = bench.exit(name, 0)
        assert slot_effects(name, did) == ({"tell replaced"} if beside else {"tell replaced", "spawn"})
