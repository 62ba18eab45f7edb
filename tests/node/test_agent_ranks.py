"""A node with several ranks: each rank of a broadcast goes to its own process, other calls go to any."""

from __future__ import annotations

from tests.support.agent_calls import Bench


def places(bench: Bench) -> list[int]:
    return sorted(slot.place for slot in bench.calls.slots.values())


def test_every_process_has_a_place_of_its_own() -> None:
    assert places(Bench(processes=3, places=3)) == [0, 1, 2]
    assert places(Bench(processes=4, places=2)) == [0, 0, 1, 1]
    assert places(Bench(processes=2, places=1)) == [0, 0]


def test_the_next_process_takes_the_place_of_the_one_that_is_gone() -> None:
    bench = Bench(processes=3, places=3)
    middle = next(name for name, slot in bench.calls.slots.items() if slot.place == 1)
    bench.exit(middle)
    assert ["replaced", 1, 1] in bench.messages()
    assert places(bench) == [0, 1, 2]


def test_a_rank_of_a_broadcast_goes_to_its_own_process() -> None:
    bench = Bench(processes=3, places=3)
    calls = [bench.take(f"c{place}", gang="g", place=place) for place in (2, 0, 1)]
    assert [call.slot.place for call in calls if call.slot] == [2, 0, 1]


def test_a_rank_waits_for_its_own_process_while_others_are_idle() -> None:
    bench = Bench(processes=2, places=2)
    busy = bench.take("busy", gang="g", place=1)
    bench.begin(busy)
    rank = bench.take("rank", gang="h", place=1)
    assert rank.slot is None
    bench.end(busy)
    assert rank.slot is not None
    assert rank.slot.place == 1


def test_other_calls_go_to_any_process() -> None:
    bench = Bench(processes=2, places=2)
    calls = [bench.take(f"c{i}") for i in range(3)]
    assert {call.slot.place for call in calls if call.slot} == {0, 1}
    assert calls[2].slot is None


def test_a_call_passes_a_rank_that_waits_for_another_process_but_does_not_take_its_place() -> None:
    bench = Bench(processes=2, places=2)
    first = bench.take("first", gang="g", place=0)
    rank = bench.take("rank", gang="h", place=0)
    passing, waiting = bench.take("passing"), bench.take("waiting")
    assert passing.slot is not None
    assert passing.slot.place == 1
    bench.end(first, seconds=1.0)
    assert rank.slot is not None
    assert waiting.slot is None
    bench.end(rank)
    assert waiting.slot is not None


def test_ranks_of_broadcasts_keep_their_order_in_each_process() -> None:
    bench = Bench(processes=2, places=2)
    earlier = bench.take("earlier", {"blob"}, gang="g", place=0)
    later = bench.take("later", gang="h", place=0)
    beside = bench.take("beside", gang="h", place=1)
    assert (earlier.slot, later.slot) == (None, None)
    assert beside.slot is not None
    bench.did = bench.calls.arrived("blob", bench.now)
    assert earlier.slot is not None
    assert later.slot is None


def test_a_rank_waits_for_the_process_that_takes_the_place_of_a_dead_one() -> None:
    bench = Bench(processes=2, places=2)
    bench.exit(next(name for name, slot in bench.calls.slots.items() if slot.place == 1))
    rank = bench.take("rank", gang="g", place=1)
    assert rank.slot is None
    fresh = next(name for name, slot in bench.calls.slots.items() if slot.state == "starting")
    bench.did = bench.calls.ready(fresh, bench.now)
    assert rank.slot is not None
    assert rank.slot.name == fresh


def test_the_client_is_told_which_local_rank_ran_a_call() -> None:
    bench = Bench(processes=2, places=2)
    calls = [bench.take(f"c{place}", gang="g", place=place) for place in (0, 1)]
    for call in calls:
        bench.begin(call)
        assert bench.messages() == [["started", call.id, call.header["place"]]]
    bench.end(calls[0])
    assert bench.messages() == [["done", "c0", {"s": 0.1}]]
    bench.end(calls[1])
    assert bench.messages() == [["done", "c1", {"s": 0.1, "place": 1}]]


def test_a_call_that_waits_behind_another_goes_to_an_idle_process_although_a_rank_waits() -> None:
    """Beside a rank that waits for one process, another one must not stay idle."""
    bench = Bench(processes=2, places=2)
    bench.make_short()
    long = [bench.take("a"), bench.take("b")]
    behind = bench.take("behind")
    for call in long:
        bench.begin(call)
    assert behind.slot is not None  # sent ahead
    other = next(call for call in long if call.slot is not behind.slot)
    assert other.slot is not None
    place = behind.slot.place
    rank = bench.take("rank", gang="g", place=place)
    bench.end(other)
    assert ["recall", "behind"] in bench.sent()
    bench.give_back(behind)
    assert behind.slot is not None
    assert behind.slot.place != place
    assert rank.slot is None


def test_processes_that_cannot_start_name_their_local_rank() -> None:
    bench = Bench(processes=2, places=2, ready=False)
    for _ in range(3):
        bench.tick(1.0)
        name = next(name for name, slot in bench.calls.slots.items() if slot.place == 1)
        bench.exit(name, 70)
    told = [message for message in bench.messages() if message[0] == "failed"]
    assert "local rank 1" in told[0][1]["message"]
