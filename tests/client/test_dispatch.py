"""Which node gets which call: the bookkeeping alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.client.dispatch import Dispatch

_numbers = itertools.count()


@dataclass(eq=False)
class Item:
    id: str = field(default_factory=lambda: str(next(_numbers)))
    node: int | None = None
    pinned: bool = False
    sent: float = 0.0
    prefers: int | None = None
    until: float = 0.0

    @property
    def movable(self) -> bool:
        return not self.pinned


def opened(nodes: int, slots: int, waiting: int = 0) -> tuple[Dispatch[Item], list[Item]]:
    dispatch: Dispatch[Item] = Dispatch(nodes, slots)
    for node in range(nodes):
        dispatch.up(node, True)
    items = [Item() for _ in range(waiting)]
    for item in items:
        dispatch.add(item)
    return dispatch, items


def nodes_of(chosen: list[tuple[int, Item]]) -> list[int]:
    return [node for node, _ in chosen]


def test_calls_go_round_the_nodes_in_turn() -> None:
    dispatch, items = opened(4, 1, 4)
    chosen = dispatch.next(1.0)
    assert nodes_of(chosen) == [0, 1, 2, 3]
    assert [item for _, item in chosen] == items
    assert [(item.node, item.sent) for item in items] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)]


def test_of_idle_nodes_the_one_that_ended_a_call_last_is_next() -> None:
    """Its caches are warm, and its processes have not been paged out."""
    dispatch, items = opened(3, 1, 3)
    dispatch.next(0.0)
    for item in (items[0], items[2], items[1]):
        dispatch.remove(item, 10.0)
    for _ in range(3):
        item = Item()
        dispatch.add(item)
        assert nodes_of(dispatch.next(0.0)) == [1]
        dispatch.remove(item, 10.0)


def test_a_node_whose_call_gave_no_result_is_not_preferred() -> None:
    """Its process may have to be started again."""
    dispatch, items = opened(3, 1, 3)
    dispatch.next(0.0)
    dispatch.remove(items[1], 10.0)
    dispatch.remove(items[2])
    dispatch.remove(items[0])
    dispatch.add(Item())
    assert nodes_of(dispatch.next(0.0)) == [1]


def test_a_node_gets_as_many_as_it_has_slots_while_nothing_is_known() -> None:
    dispatch, items = opened(2, 3, 10)
    assert sorted(nodes_of(dispatch.next(0.0))) == [0, 0, 0, 1, 1, 1]
    assert dispatch.next(0.0) == []
    assert dispatch.load() == (4, 6)
    dispatch.remove(items[0], 10.0)
    assert nodes_of(dispatch.next(0.0)) == [items[0].node]


def test_short_calls_are_sent_ahead_and_long_ones_are_not() -> None:
    dispatch, items = opened(2, 1, 400)
    dispatch.next(0.0)
    for item in items[:2]:
        dispatch.remove(item, 0.0001)
    ahead = len(dispatch.next(0.0))
    assert 50 < ahead <= 2 * 129
    for item in items[2:60]:
        dispatch.remove(item, 5.0)
    assert dispatch.next(0.0) == []


def test_a_node_that_is_down_gets_nothing() -> None:
    dispatch, items = opened(2, 2, 3)
    dispatch.up(0, False)
    assert nodes_of(dispatch.next(0.0)) == [1, 1]
    dispatch.up(1, False)
    assert not dispatch.is_up(1)
    dispatch.remove(items[0])
    assert dispatch.next(0.0) == []
    dispatch.up(0, True)
    assert nodes_of(dispatch.next(0.0)) == [0]


def test_a_call_that_comes_back_goes_first() -> None:
    dispatch, _ = opened(1, 1, 2)
    back = Item()
    dispatch.add(back, first=True)
    assert [item for _, item in dispatch.next(0.0)] == [back]


def test_a_pinned_call_goes_to_its_node_however_busy() -> None:
    dispatch, _ = opened(2, 1, 2)
    dispatch.next(0.0)
    pinned = Item()
    dispatch.pin(pinned, 1)
    assert (pinned.node, pinned.pinned) == (1, True)
    assert dispatch.load() == (0, 3)
    dispatch.remove(pinned, 1.0)
    assert dispatch.load() == (0, 2)


def test_a_call_that_ends_while_it_waits_here_is_sent_to_nobody() -> None:
    dispatch, items = opened(1, 1, 2)
    dispatch.next(0.0)
    dispatch.remove(items[1])
    assert dispatch.load() == (0, 1)
    dispatch.remove(items[0])
    assert dispatch.next(1.0) == []


def test_it_is_known_which_calls_a_node_has_and_which_wait() -> None:
    dispatch, items = opened(2, 2, 5)
    dispatch.next(0.0)
    assert {item.node for item in dispatch.at(0)} == {0}
    assert len(dispatch.at(0)) == 2
    assert dispatch.waiting() == items[4:]


def test_a_call_that_is_to_end_makes_room_for_another() -> None:
    """Its node begins the next one in a fresh process."""
    dispatch, items = opened(1, 1, 2)
    dispatch.next(0.0)
    assert dispatch.next(0.0) == []
    dispatch.stop(items[0])
    assert dispatch.next(0.0) == [(0, items[1])]
    dispatch.remove(items[0])
    dispatch.add(Item())
    assert dispatch.next(0.0) == []


def test_a_node_without_a_call_that_is_to_end_is_preferred() -> None:
    dispatch, items = opened(2, 1, 1)
    dispatch.next(0.0)
    dispatch.stop(items[0])
    dispatch.add(Item())
    assert nodes_of(dispatch.next(0.0)) == [1]


def crowd(seconds: float = 0.0001, calls: int = 20) -> tuple[Dispatch[Item], list[Item]]:
    """Two nodes of one slot; node 0 has many calls ahead, node 1 has done its part."""
    dispatch, items = opened(2, 1, calls)
    dispatch.up(1, False)
    dispatch.next(0.0)
    dispatch.remove(items[0], seconds)
    dispatch.next(1.0)
    dispatch.up(1, True)
    return dispatch, items


def test_a_call_that_waits_behind_others_is_taken_back_for_an_idle_node() -> None:
    dispatch, items = crowd()
    assert dispatch.has_backlog()
    taken = dispatch.recallable(10.0)
    assert [(item.node, item) for item in taken] == [(0, items[2])]
    assert dispatch.recallable(10.0) != taken
    for item in taken:
        dispatch.remove(item)
        item.node = None
        dispatch.add(item, first=True)
    assert nodes_of(dispatch.next(10.0)) == [1]


def test_what_was_sent_just_now_or_is_pinned_is_left_where_it_is() -> None:
    dispatch, _ = crowd()
    assert dispatch.recallable(1.01) == []
    pinned, _ = opened(2, 1)
    for _ in range(3):
        pinned.pin(Item(), 0)
    assert pinned.has_backlog()
    assert pinned.recallable(10.0) == []


def test_a_running_call_is_never_taken_back() -> None:
    dispatch, items = crowd(calls=4)
    running = items[1]
    taken = [item for now in (10.0, 11.0, 12.0, 13.0) for item in dispatch.recallable(now)]
    assert running not in taken
    assert len(taken) == len({item.id for item in taken})


def test_nothing_is_taken_back_while_calls_wait_here_or_nobody_is_idle() -> None:
    dispatch, _ = crowd()
    dispatch.add(Item())
    assert dispatch.recallable(10.0) == []
    busy, _ = opened(2, 1, 2)
    busy.next(0.0)
    assert not busy.has_backlog()
    assert busy.recallable(10.0) == []


@settings(max_examples=60)
@given(
    nodes=st.integers(1, 4),
    slots=st.integers(1, 3),
    seconds=st.lists(st.floats(0.00001, 1.0), min_size=1, max_size=60),
)
def test_every_call_runs_once_and_no_slot_idles_while_calls_wait(nodes: int, slots: int, seconds: list[float]) -> None:
    """A play of the whole: calls are sent, run in turn on their node, and settled."""
    dispatch, items = opened(nodes, slots, len(seconds))
    length = dict(zip((item.id for item in items), seconds, strict=True))
    queues: list[list[Item]] = [[] for _ in range(nodes)]
    done: list[Item] = []
    now = 0.0
    while len(done) < len(items):
        for node, item in dispatch.next(now):
            queues[node].append(item)
        waiting, _ = dispatch.load()
        assert not waiting or all(len(queue) >= slots for queue in queues)
        node = max(range(nodes), key=lambda n: len(queues[n]))
        item = queues[node].pop(0)
        now += length[item.id]
        dispatch.remove(item, length[item.id])
        done.append(item)
    assert sorted(item.id for item in done) == sorted(item.id for item in items)
    assert dispatch.load() == (0, 0)
    assert not dispatch.has_backlog()


def test_a_pool_without_nodes_up_keeps_its_calls() -> None:
    dispatch: Dispatch[Item] = Dispatch(2, 1)
    dispatch.add(Item())
    assert dispatch.next(0.0) == []
    assert dispatch.load() == (1, 0)
    with pytest.raises(IndexError):
        dispatch.up(2, True)


def test_nodes_get_calls_by_how_many_slots_they_have() -> None:
    dispatch, _ = opened(2, 1, 8)
    dispatch.set_slots([4, 2])
    chosen = nodes_of(dispatch.next(0.0))
    assert (chosen.count(0), chosen.count(1)) == (4, 2)
    assert chosen[:2] == [0, 1]


def test_a_call_that_waits_on_a_small_node_is_taken_back_for_a_slot_of_a_larger_one() -> None:
    dispatch, _ = opened(2, 1)
    dispatch.set_slots([1, 3])
    items = [Item() for _ in range(2)]
    for item in items:
        dispatch.pin(item, 0)
        item.pinned = False
    assert dispatch.has_backlog()
    assert dispatch.recallable(1.0) == [items[1]]


def test_a_call_goes_to_the_node_that_it_prefers_if_that_has_room() -> None:
    dispatch, _ = opened(3, 1)
    item = Item(prefers=2, until=5.0)
    dispatch.add(item)
    assert dispatch.next(1.0) == [(2, item)]
    assert not dispatch.has_pinned_waiters()


def test_a_call_waits_for_the_node_that_it_prefers_and_then_goes_to_another() -> None:
    dispatch, _ = opened(2, 1)
    dispatch.pin(Item(), 1)
    choosy, other = Item(prefers=1, until=5.0), Item()
    dispatch.add(choosy)
    dispatch.add(other)
    assert dispatch.next(1.0) == [(0, other)]  # nobody waits behind it
    dispatch.remove(other, 1.0)
    assert dispatch.next(4.9) == []
    assert dispatch.has_pinned_waiters()
    assert dispatch.next(5.0) == [(0, choosy)]


def test_a_call_does_not_wait_for_a_node_that_is_gone() -> None:
    dispatch, _ = opened(2, 1)
    dispatch.up(1, False)
    item = Item(prefers=1, until=5.0)
    dispatch.add(item)
    assert dispatch.next(1.0) == [(0, item)]


def test_a_call_that_waits_on_the_node_that_it_prefers_is_left_there_for_a_while() -> None:
    dispatch, _ = opened(2, 1, 1)
    dispatch.remove(dispatch.next(0.0)[0][1], 0.0001)  # calls are short: some are sent ahead
    dispatch.pin(Item(), 0)
    item = Item(prefers=0, until=2.0)
    dispatch.add(item)
    assert dispatch.next(1.0) == [(0, item)]
    assert dispatch.recallable(1.5) == []
    assert dispatch.recallable(2.0) == [item]
