"""What an agent makes of late, crossing and unlucky messages: calls that wait, run, are stopped, given back, lost."""

from __future__ import annotations

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
    bench.calls.saw(name, [("b", bench.now)], bench.now)
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
    bench.calls.saw(bench.names[0], [("a", bench.now), ("b", bench.now)], bench.now)
    bench.cancel(stubborn)
    bench.tick(GRACE)
    assert neighbour.state == "doomed"
    bench.exit(bench.names[0], -9)
    ends = {message[1]: message for message in bench.messages() if len(message) > 2}
    assert ends["a"][0] == "cancelled"
    assert ends["b"][0] == "lost"
    assert ends["b"][2]["reason"] == "another call in its process had to be killed"


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
    assert [action[0] for action in bench.did] == ["kill"]
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
    assert bench.calls.ended(old, "a", "done", {}, [], bench.now) == []
    assert bench.calls.returned(old, ["a"], bench.now) == []
    assert call.state == "sent"


def test_what_a_stream_says_before_a_body_begins_follows_the_call_to_the_next_runner() -> None:
    bench = Bench()
    call = bench.take("a", streams=["0"])
    bench.did = bench.calls.stream("a", ["items", "a", "0", [1]], [b"x"])
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
    assert bench.calls.looks(bench.now + 0.01) == bench.names
    bench.now += 0.01
    bench.begin(call)
    assert bench.calls.due() == bench.now + 0.01  # its time limit
    assert bench.calls.looks(bench.now + 1) == []


def test_a_closing_node_ends_its_runners_and_makes_no_others() -> None:
    bench = Bench(processes=2)
    bench.begin(bench.take("a"))
    bench.did = bench.calls.close(bench.now)
    assert sorted(action[0] for action in bench.did) == ["kill", "send"]
    assert bench.messages("send") == [["exit"]]
    for name in bench.names:
        bench.exit(name, 0)
    assert not bench.names
    assert not [action for action in bench.did if action[0] == "spawn"]


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
    assert found == ["call a outlived its stop; its process was killed again"]
    assert [action[0] for action in actions] == ["kill"]


def test_a_net_kills_again_a_process_that_leaves_and_does_not_end() -> None:
    bench = Bench()
    (name,) = bench.names
    bench.calls.left(name, [], bench.now)
    bench.calls.audit(bench.now + 6)
    found, actions = bench.calls.audit(bench.now + 7)
    assert found == [f"process {name} had nothing to do and did not end; it was killed again"]
    assert [action[0] for action in actions] == ["kill"]


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
    assert [action[0] for action in actions] == ["spawn"]
