"""What an agent makes of late, crossing and unlucky messages: calls that wait, run, are stopped, given back, lost."""

from __future__ import annotations

from skyward.node.agent_slots import Kill, Send, Spawn
from skyward.node.orders import SCARCE
from skyward.node.protocol import InputItems, Returned
from tests.support.agent_calls import GRACE, Bench


def test_a_call_that_waits_behind_a_recalled_one_is_sent_when_that_comes_back() -> None:
    bench = Bench()
    first = bench.take("a")
    second = bench.take("b")
    assert second.state == "queued"
    bench.calls.recall("a", bench.now)
    bench.give_back(first)  # the runner's reader was faster than its thread
    assert ["recalled", "a"] in bench.messages()
    assert ["call", "b"] in bench.sent()


def test_a_runner_takes_calls_after_a_cancel_that_crossed_the_end_of_the_call_before() -> None:
    bench = Bench()
    bench.make_short()
    before, waiting = bench.take("x"), bench.take("a")
    bench.cancel(waiting)
    assert ["cancel", "a"] in bench.sent()
    bench.end(before)
    assert waiting.state == "withdrawn"  # that "x" has ended says nothing of "a"
    bench.give_back(waiting)
    assert ["cancelled", "a", {}] in bench.messages()
    bench.take("b")
    assert ["call", "b"] in bench.sent()


def test_a_cancel_reaches_a_body_that_runs_behind_a_recalled_call() -> None:
    bench = Bench()
    bench.make_short()
    before, recalled, behind = bench.take("x"), bench.take("a"), bench.take("b")
    bench.calls.recall("a", bench.now)
    bench.end(before)
    bench.give_back(recalled)
    bench.begin(behind)
    bench.cancel(behind)
    assert bench.sent() == [["cancel", "b"]]
    assert behind.state == "stopping"


def test_a_time_limit_holds_for_a_body_that_runs_behind_a_recalled_call() -> None:
    bench = Bench()
    bench.make_short()
    before, recalled, behind = bench.take("x"), bench.take("a"), bench.take("b", timeout=1.0)
    bench.calls.recall("a", bench.now)
    bench.end(before)
    bench.give_back(recalled)
    bench.begin(behind)
    bench.tick(0.9)
    assert bench.sent() == []
    bench.tick(0.1)
    assert bench.sent() == [["cancel", "b"]]


def test_a_call_that_only_waited_is_not_blamed_for_a_crash() -> None:
    bench = Bench(processes=2)
    bench.make_short()
    before, other, shifted = bench.take("x"), bench.take("y"), bench.take("a")
    assert before.slot is not None
    assert other.slot is not None
    idle = other.slot.name
    bench.end(other, seconds=0.0005)
    assert ["recall", "a"] in bench.sent()
    bench.give_back(shifted)  # and goes to the runner that has nothing to do
    assert shifted.slot is not None
    assert shifted.slot.name == idle
    bench.exit(idle)
    assert not [message for message in bench.messages() if message[0] == "crashed"]
    assert shifted.state in ("queued", "sent")


def test_a_body_that_had_begun_is_not_started_again_when_its_process_ends_after_a_late_cancel() -> None:
    bench = Bench()
    bench.make_short()
    first, second = bench.take("a"), bench.take("b")
    bench.begin(first)
    bench.cancel(first)
    assert first.slot is not None
    name = first.slot.name
    bench.end(first)  # it ended by itself, and the runner had begun "b" before the cancel came
    bench.calls.saw(name, [("b", bench.now, 0.0)], bench.now)
    bench.exit(name)
    assert ["crashed", "b"] in [message[:2] for message in bench.messages()]
    assert second.state == "gone"
    assert not bench.calls.queue


def test_calls_that_a_leaving_process_gives_back_are_run_by_the_next_one() -> None:
    bench = Bench()
    bench.make_short()
    running, behind = bench.take("a"), bench.take("b")
    bench.begin(running)
    bench.cancel(running)
    assert running.slot is not None
    name = running.slot.name
    bench.calls.left(name, ["b"], bench.now)
    assert behind.state == "queued"
    bench.end(running, "stopped")
    bench.exit(name, 0)
    assert behind.state == "queued"
    bench.did = bench.calls.ready(bench.names[0], bench.now)
    assert ["call", "b"] in bench.sent()


def test_neighbours_of_a_killed_body_are_told_from_the_one_that_was_killed() -> None:
    bench = Bench(threads=2)
    stubborn, neighbour = bench.take("a"), bench.take("b")
    bench.calls.saw(bench.names[0], [("a", bench.now, 0.0), ("b", bench.now, 0.0)], bench.now)
    bench.cancel(stubborn)
    bench.tick(GRACE)
    assert neighbour.state == "doomed"
    bench.exit(bench.names[0], -9)
    ends = {message[1]: message for message in bench.messages() if len(message) > 2}
    assert ends["a"][0] == "cancelled"
    assert ends["b"][0] == "lost"
    assert ends["b"][2]["reason"] == "another call in its process had to be killed"


def test_a_call_that_begins_while_its_process_is_being_killed_is_not_blamed_for_that() -> None:
    """It waited there when the pool's processes were made again: it is lost, and may be started again."""
    bench = Bench()
    bench.make_short()
    running, ahead = bench.take("a"), bench.take("b")
    bench.begin(running)
    old = bench.names[0]
    bench.setup()
    bench.end(running)
    bench.begin(ahead)
    bench.exit(old, -9)
    assert [message[:3] for message in bench.messages() if message[0] in ("lost", "crashed")] == [
        ["lost", "b", {"reason": "the pool's processes were replaced", "s": 0.0, "replaced": True}]
    ]


def test_ranks_of_broadcasts_keep_their_order_while_one_waits_for_its_buffer() -> None:
    bench = Bench(processes=2)
    first = bench.take("a", {"blob"}, gang=True)
    second = bench.take("b", gang=True)
    other = bench.take("c")
    assert (first.state, second.state, other.state) == ("queued", "queued", "sent")
    bench.did = bench.calls.arrived("blob", bench.now)
    assert bench.sent() == [["call", "a"]]


def test_a_rank_of_a_broadcast_is_never_sent_ahead() -> None:
    bench = Bench()
    bench.make_short()
    bench.take("x")
    rank = bench.take("a", gang=True)
    assert rank.state == "queued"


def test_a_rank_waits_for_an_earlier_one_that_a_process_which_ends_will_give_back() -> None:
    bench = Bench(processes=2)
    first = bench.take("a", gang=True)
    bench.calls.left(bench.names[0], [], bench.now)  # crossed by the call
    second = bench.take("b", gang=True)
    assert second.state == "queued"
    bench.give_back(first)
    assert ["call", "a"] in bench.sent()


def test_nothing_is_sent_ahead_while_another_process_is_about_to_be_there() -> None:
    bench = Bench(processes=2)
    bench.make_short()
    bench.exit(bench.names[1])
    bench.take("a")
    assert bench.take("b").state == "queued"


def test_a_machine_that_will_be_taken_away_gives_back_what_has_not_begun_and_takes_nothing_more() -> None:
    bench = Bench()
    bench.make_short()
    running, ahead, rank = bench.take("a"), bench.take("b"), bench.take("c", gang=True)
    bench.begin(running)
    bench.did = bench.calls.notice(bench.now)
    assert bench.sent() == [["recall", "b"]]
    assert (running.state, ahead.state, rank.state) == ("running", "returning", "queued")
    bench.take("d")
    assert bench.messages() == [["recalled", "d"]]


def test_a_fenced_node_ends_everything_and_tells_nobody() -> None:
    bench = Bench()
    bench.make_short()
    running, ahead = bench.take("a"), bench.take("b")
    bench.begin(running)
    bench.did = bench.calls.fence(bench.now)
    assert [type(action) for action in bench.did] == [Kill]
    assert (running.state, ahead.state, bench.calls.calls) == ("gone", "gone", {})
    bench.exit(bench.names[0], -9)
    assert bench.did == []


def test_what_a_replaced_runner_says_of_calls_that_others_have_by_now_counts_for_nothing() -> None:
    bench = Bench()
    call = bench.take("a")
    old = bench.names[0]
    bench.setup()
    bench.exit(old, -9)
    bench.calls.ready(bench.names[0], bench.now)
    assert call.slot is not None
    assert call.slot.name != old
    assert bench.calls.ended(old, Returned(id="a", seconds=0.1), bench.now) == []
    assert bench.calls.returned(old, ["a"], bench.now) == []
    assert call.state == "sent"


def test_what_a_stream_says_before_a_body_begins_follows_the_call_to_the_next_runner() -> None:
    bench = Bench()
    call = bench.take("a", streams=["0"])
    bench.did = bench.calls.stream("a", InputItems("a", "0", [1], [b"x"]))
    assert bench.sent() == [["items", "a"]]
    bench.exit(bench.names[0])
    bench.did = bench.calls.ready(bench.names[0], bench.now)
    assert call.state == "sent"
    assert bench.sent() == [["call", "a"], ["items", "a"]]


def test_an_agent_says_what_it_knows_of_calls() -> None:
    bench = Bench()
    bench.begin(bench.take("a"))
    bench.take("b")
    assert bench.calls.states(["a", "b", "c"]) == {"a": "running", "b": "queued", "c": "unknown"}


def test_the_status_page_is_read_while_a_call_may_begin() -> None:
    bench = Bench()
    call = bench.take("a", timeout=0.01)
    assert bench.calls.due() == bench.now + 0.01
    assert bench.calls.pages_due(bench.now + 0.01) == bench.names
    bench.now += 0.01
    bench.begin(call)
    assert bench.calls.due() == bench.now + 0.01  # its time limit
    assert bench.calls.pages_due(bench.now + 1) == []


def test_a_time_limit_counts_from_the_moment_at_which_the_function_is_called() -> None:
    bench = Bench()
    call = bench.take("a", timeout=3.0)
    bench.begin(call, loading=True)
    assert bench.messages() == [["started", "a", 0]]
    bench.tick(60)
    assert call.state == "running", "the modules that it imports are not its own time"
    assert bench.calls.pages_due(bench.now) == bench.names, "the page is read until the function is called"
    bench.begin(call)
    bench.tick(2.9)
    assert call.state == "running"
    bench.tick(0.1)
    assert bench.sent() == [["cancel", "a"]]
    bench.end(call, "stopped")
    assert bench.messages() == [["timeout", "a", {"s": 0.1, "limit": 3.0, "killed": False}]]


def test_a_function_that_is_never_called_is_stopped_all_the_same() -> None:
    bench = Bench(ready_within=300.0)
    call = bench.take("a", timeout=3.0)
    bench.begin(call, loading=True)
    bench.tick(299)
    assert call.state == "running"
    bench.tick(1)
    assert bench.sent() == [["cancel", "a"]]
    bench.end(call, "stopped")
    assert bench.messages() == [["timeout", "a", {"s": 0.1, "limit": 3.0, "killed": False, "loading": True}]]


def test_a_closing_node_ends_its_runners_and_makes_no_others() -> None:
    bench = Bench(processes=2)
    bench.begin(bench.take("a"))
    bench.did = bench.calls.close(bench.now)
    assert {type(action) for action in bench.did} == {Kill, Send}
    assert len(bench.did) == 2
    assert bench.messages(Send) == [["exit"]]
    for name in bench.names:
        bench.exit(name, 0)
    assert not bench.names
    assert not [action for action in bench.did if isinstance(action, Spawn)]


# the net


def test_a_net_finds_nothing_where_nothing_is_wrong() -> None:
    bench = Bench(threads=2)
    bench.begin(bench.take("a"))
    for _ in range(3):
        bench.now += 1
        assert bench.calls.audit(bench.now) == ([], [])


def test_a_fenced_node_that_waits_for_its_setup_is_not_in_need_of_repair() -> None:
    """A node of a group that comes back gets no setup while another one is away."""
    bench = Bench(hooks=True)
    bench.calls.fence(bench.now)
    bench.exit(bench.names[0], -9)
    for second in range(3):
        assert bench.calls.audit(bench.now + second) == ([], [])


def test_a_net_kills_again_what_outlives_its_stop() -> None:
    bench = Bench()
    call = bench.take("a")
    bench.begin(call)
    bench.cancel(call)
    bench.tick(GRACE)
    bench.now += 6
    assert bench.calls.audit(bench.now) == ([], [])  # seen once, it may be about to end
    found, actions = bench.calls.audit(bench.now + 1)
    assert found == ["call a kept running after its stop; its process was killed again"]
    assert [type(action) for action in actions] == [Kill]


def test_a_net_kills_again_a_process_that_leaves_and_does_not_end() -> None:
    bench = Bench()
    (name,) = bench.names
    bench.calls.left(name, [], bench.now)
    bench.calls.audit(bench.now + 6)
    found, actions = bench.calls.audit(bench.now + 7)
    assert found == [f"process {name} had nothing to do and did not end; it was killed again"]
    assert [type(action) for action in actions] == [Kill]


def test_a_net_sends_a_call_that_waits_beside_a_free_slot() -> None:
    bench = Bench()
    call = bench.take("a", {"blob"})
    call.missing.clear()  # no event does this: it stands for a mistake of ours
    assert bench.calls.audit(bench.now) == ([], [])
    found, bench.did = bench.calls.audit(bench.now + 1)
    assert found == ["a call waited beside a free slot; it was sent"]
    assert bench.sent() == [["call", "a"]]


def test_a_net_starts_a_process_that_is_missing() -> None:
    bench = Bench()
    bench.calls.slots.clear()  # no event does this: it stands for a mistake of ours
    assert bench.calls.audit(bench.now) == ([], [])
    found, actions = bench.calls.audit(bench.now + 1)
    assert found == ["a process was missing; it was started"]
    assert [type(action) for action in actions] == [Spawn]


def test_nobody_is_blamed_for_a_process_that_lives_on_while_none_can_be_killed() -> None:
    bench = Bench()
    call = bench.take("a")
    bench.begin(call)
    bench.cancel(call)
    bench.tick(GRACE)
    for seconds in range(6, 20):
        assert bench.calls.audit(bench.now + seconds, killable=False) == ([], [])
    bench.calls.audit(bench.now + 20)
    assert bench.calls.audit(bench.now + 21)[0] == ["call a kept running after its stop; its process was killed again"]


def test_a_call_that_cannot_be_sent_does_not_hold_up_the_node() -> None:
    bench = Bench()
    call = bench.take("a")
    bench.end(call)
    bench.calls.queue["a"] = call  # no event does this: it stands for a mistake of ours
    bench.take("b")
    assert bench.sent() == [["call", "b"]]
    found, _ = bench.calls.audit(bench.now)
    assert found == ["call a was gone, and waited for a process; it no longer does"]
    assert bench.calls.audit(bench.now) == ([], [])


def lose_processes(bench: Bench, seconds: float, status: int = 70) -> int:
    """Every process that is started ends at once, for so long; says how many were."""
    count, end = 0, bench.now + seconds
    while bench.now < end:
        for slot in list(bench.calls.slots.values()):
            if slot.state == "starting":
                bench.exit(slot.name, status)
                count += 1
                if any(message[0] == "failed" for message in bench.messages()):
                    return count
        bench.tick(0.1)
    return count


def test_a_lack_of_processes_that_passes_does_not_end_a_node_that_has_worked() -> None:
    bench = Bench()
    bench.exit(bench.names[0])
    assert 5 < lose_processes(bench, 29) < 20  # there are pauses between the attempts
    bench.tick(5)
    bench.calls.ready(bench.names[0], bench.now)
    call = bench.take("a")
    assert bench.sent() == [["call", "a"]]
    assert call.state == "sent"


def test_a_node_whose_processes_end_before_they_are_ready_says_so() -> None:
    bench = Bench(ready=False)  # it never had one that works: nothing speaks for waiting
    assert lose_processes(bench, 60) == 3
    assert "ended with status 70 before it was ready" in bench.messages()[0][1]["message"]
    worked = Bench()
    worked.exit(worked.names[0])
    began = worked.now
    lose_processes(worked, 60)
    assert worked.messages()[0][0] == "failed"
    assert 30 <= worked.now - began < 40


def test_a_node_without_processes_yet_waits_for_a_machine_that_has_too_many() -> None:
    bench = Bench(ready=False)
    lose_processes(bench, 29, SCARCE)
    assert not [message for message in bench.messages() if message[0] == "failed"]


def test_a_process_that_was_to_be_tried_again_later_is_tried_when_another_is_ready() -> None:
    bench = Bench(processes=2, ready=False)
    first, second = bench.names
    bench.exit(first, -9)
    bench.exit(second, 70)  # the second failure: the next attempt comes after a pause
    (waiting,) = bench.names
    bench.calls.ready(waiting, bench.now)
    assert sorted(slot.state for slot in bench.calls.slots.values()) == ["ready", "starting"]
    assert bench.calls.audit(bench.now + 60) == ([], [])


def test_bodies_that_run_are_not_lost_because_no_other_process_can_be_started() -> None:
    bench = Bench(processes=2)
    call = bench.take("a")
    bench.begin(call)
    assert call.slot is not None
    bench.exit(next(name for name in bench.names if name != call.slot.name))
    lose_processes(bench, 120)
    assert not [message for message in bench.messages() if message[0] == "failed"]
    bench.end(call)
    lose_processes(bench, 20)
    assert [message[0] for message in bench.messages()] == ["failed", "replaced"]


def test_a_process_that_is_not_ready_in_time_is_killed_and_named() -> None:
    bench = Bench(ready=False, ready_within=300.0)
    assert bench.tick(299) == []
    assert [type(action) for action in bench.tick(1)] == [Kill]
    assert bench.tick(1) == []
    bench.exit(bench.names[0], -9)
    assert "a runner was not ready within 300 s." in bench.messages()[0][1]["message"]
    assert bench.calls.due() == float("inf")
