"""The ranks of a group find each other, or each of them names the one that is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from skyward.api import info
from skyward.api.info import InstanceInfo, NetworkInfo, Peer
from skyward.errors import SkywardError
from skyward.node.shared import channel, names
from skyward.node.shared.channel import Channel
from skyward.node.shared.state import Answer, SharedState
from skyward.plugins._ranks import Rendezvous
from tests.support.waiting import until

HOST, PORT = "127.0.0.1", 4711


class Head:
    """Node 0's agent, as far as meetings go; each thread is a process of its own, with a way to ask."""

    def __init__(self, ranks: int) -> None:
        self.state = SharedState("epoch", ranks)
        self._channels: dict[str, Channel] = {}
        self._lock = threading.RLock()
        self._own = threading.local()
        self._over = threading.Event()
        self._clock = threading.Thread(target=self._tick)
        self._clock.start()

    def channel(self) -> Channel:
        return self._own.channel

    def open(self, name: str, rank: int | None) -> None:
        """The current thread is a process from now on."""
        with self._lock:
            self.state.open(name, name, rank)
            pack: Any = None
            self._own.channel = self._channels[name] = Channel(lambda m, _: self._hear(name, m), pack, pack)

    def gone(self, name: str) -> None:
        self._deliver(self.state.gone(name, "killed", time.monotonic()))

    def close(self) -> None:
        self._over.set()
        self._clock.join()

    def _hear(self, name: str, message: list[Any]) -> None:
        with self._lock:
            if message[0] == "ask":
                id, epoch, kind, title, operation, arguments, timeout, _ = message[1:]
                now = time.monotonic()
                self._deliver(self.state.ask(name, id, epoch, kind, title, operation, arguments, timeout, [], now))
            else:
                self._deliver(self.state.withdraw(name, message[1]))

    def _deliver(self, answers: list[Answer]) -> None:
        for name, message, _ in answers:
            self._channels[name].receive(message, [])

    def _tick(self) -> None:
        while not self._over.wait(0.01):
            with self._lock:
                self._deliver(self.state.tick(time.monotonic()))


@contextmanager
def head(ranks: int) -> Iterator[Head]:
    made, before = Head(ranks), names._served
    names.serve_by(made.channel)
    try:
        yield made
    finally:
        names._served = before
        made.close()


def at(node: int, nodes: int, seconds: float = 60, *, port: int = PORT, group: str = "JAX's group") -> Rendezvous:
    peers = tuple(Peer(number, HOST) for number in range(nodes))
    info = InstanceInfo(
        node=node, total_nodes=nodes, head_addr=HOST, head_port=port, job_id="j", peers=peers, network=NetworkInfo("lo")
    )
    return Rendezvous(group, info, port, seconds)


def together(hall: Head, *ranks: Rendezvous) -> list[Future[Any]]:
    """All of them meet at the same time; each brings its own number."""

    def act(each: Rendezvous) -> Any:
        hall.open(f"rank {each.info.rank}", each.info.rank)
        return each.meet(each.info.rank + 70)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return [threads.submit(act, each) for each in ranks]


def test_ranks_meet_when_all_are_there_and_get_what_rank_0_brings() -> None:
    with head(3) as hall:
        assert [each.result() for each in together(hall, at(2, 3), at(1, 3), at(0, 3))] == [70] * 3
        assert hall.state._collections == {}  # nothing is kept of it


def test_ranks_can_meet_again() -> None:
    with head(2) as hall:
        for _ in range(20):
            assert [each.result() for each in together(hall, at(0, 2), at(1, 2))] == [70, 70]


def test_one_rank_meets_nobody_and_waits_for_nobody() -> None:
    assert at(0, 1).meet("alone") == "alone"


def test_every_rank_is_told_which_ones_did_not_come() -> None:
    """Rows 16 to 18 of the faults: a rank that never arrives is named, in time."""
    with head(4) as hall:
        for each in together(hall, at(0, 4, 1.5), at(2, 4, 1.5)):
            with pytest.raises(SkywardError, match=r"all 4 nodes.*nodes 1 and 3 did not arrive within 1.5 s.*@ pool"):
                each.result()
        assert hall.state._collections == {}


def test_a_rank_whose_head_does_not_come_is_told_so() -> None:
    with head(2) as hall:
        (each,) = together(hall, at(1, 2, 0.2))
    with pytest.raises(SkywardError, match=r"node 1 waits for node 0.*node 0 did not arrive"):
        each.result()


def test_a_head_that_does_not_answer_at_all_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LATE", 0.1)
    with head(2) as hall:
        monkeypatch.setattr(hall, "_hear", lambda name, message: None)
        (each,) = together(hall, at(1, 2, 0.3))
        with pytest.raises(SkywardError, match=r"node 1 waits for node 0 to form.*but node 0 did not arrive within"):
            each.result()


def test_a_limit_is_called_as_the_user_calls_it() -> None:
    with head(2) as hall:
        (each,) = together(hall, Rendezvous("the torch group", at(0, 2).info, PORT, 0.1, "timeout"))
    with pytest.raises(SkywardError, match=r"node 0 waits for node 1 to form the torch group.*within timeout=0\.1 s"):
        each.result()


def test_a_call_to_one_node_waits_no_longer_than_the_pools_stall_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """`>>` of a function with `@sky.integrations.torch`: nobody else may ever come."""
    monkeypatch.setattr(info, "_stall_timeout", 0.2)
    with head(2) as hall:
        hall.open("rank 0", 0)
        with (
            info.call_context("c", 0, threads=True),
            pytest.raises(
                SkywardError, match=r"did not arrive within stall_timeout=0\.2 s.*send it with `call\(\) @ pool`"
            ),
        ):
            at(0, 2).meet()
        with (
            info.call_context("c", 0, threads=True),
            pytest.raises(SkywardError, match=r"did not arrive within 0\.1 s"),
        ):
            at(0, 2, 0.1).meet()
        with (
            info.call_context("c", 0, threads=True, broadcast="b"),
            pytest.raises(SkywardError, match=r"did not arrive within 0\.5 s"),
        ):
            at(0, 2, 0.5).meet()


@pytest.mark.parametrize("other", [at(1, 2, 1, port=PORT + 1), at(1, 2, 1, group="the torch group")])
def test_ranks_of_another_group_or_of_an_earlier_time_do_not_count(other: Rendezvous) -> None:
    with head(2) as hall:
        for each in together(hall, at(0, 2, 1), other):
            with pytest.raises(SkywardError, match="did not arrive"):
                each.result()


def test_who_is_no_rank_is_not_let_in() -> None:
    """SEC-7: the client, or a process that says a rank of another node."""
    with head(2) as hall:
        hall.open("a stranger", None)
        with pytest.raises(SkywardError, match="a stranger is none"):
            at(1, 2).meet()


def test_a_second_process_of_a_rank_is_refused_in_words() -> None:
    with head(2) as hall, ThreadPoolExecutor(1) as threads:

        def first() -> Any:
            hall.open("rank 1", 1)
            return at(1, 2).meet()

        waiting = threads.submit(first)
        until(lambda: hall.state.waiting == 1)
        hall.open("another process", 1)
        with pytest.raises(SkywardError, match=r'rank 1 is there already.*executor="process"'):
            at(1, 2).meet()
        (zero,) = together(hall, at(0, 2))
        assert zero.result() == waiting.result() == 70


def test_a_rank_that_ends_before_all_are_there_must_come_again() -> None:
    with head(3) as hall, ThreadPoolExecutor(2) as threads:

        def come(name: str, rank: int) -> Callable[[], Any]:
            def act() -> Any:
                hall.open(name, rank)
                return at(rank, 3).meet(rank)

            return act

        first = threads.submit(come("first", 1))
        until(lambda: hall.state.waiting == 1)
        hall.gone("first")
        hall._channels["first"].fail("lost", "it has ended")
        others = [threads.submit(come("rank 0", 0))]
        time.sleep(0.05)
        assert not others[0].done()
        with ThreadPoolExecutor(2) as more:
            others += [more.submit(come("again", 1)), more.submit(come("rank 2", 2))]
        assert [each.result() for each in others] == [0, 0, 0]
        assert isinstance(first.exception(60), SkywardError)


def test_ranks_that_cannot_reach_each_other_do_not_try() -> None:
    walled = replace(at(0, 2).info, network=NetworkInfo(blocked="a wall"))
    with pytest.raises(SkywardError, match="a wall"):
        Rendezvous("the group", walled, PORT, 20).meet()
