"""When nodes are asked, when the user is told, and when a broadcast is stopped: in virtual time."""

from __future__ import annotations

from typing import Any

from skyward import events
from skyward.api.compute import PendingCompute
from skyward.client.actions import Emit, Post, Stall
from skyward.client.call import Call
from skyward.client.stalls import StallWatch, Surveys
from skyward.errors import Stalled
from skyward.node.protocol import ClientToAgent

TORCH = [["/home/me/train.py", 31, "train"], ["/env/site-packages/torch/distributed/distributed_c10d.py", 9, "barrier"]]
SLEEP = [["/home/me/train.py", 12, "train"]]


class Pool:
    """Two ranks, of which a test says what they do; a second passes at a time."""

    def __init__(self, timeout: float | None = 300.0, ranks: int = 2, groups: bool = False) -> None:
        self.surveys = Surveys()
        self.watch = StallWatch("p", timeout, self.surveys, lambda node: False)
        self.now, self.groups = 1000.0, groups
        self.calls: list[Call] = []
        for node in range(ranks):
            pending = PendingCompute[Any](abs, label="train")
            call = Call(pending, {"gang": "g"}, [], {}, {}, 0)
            call.node, call.rank, call.state, call.announced = node, node, "sent", True
            self.calls.append(call)
        for call in self.calls:
            call.gang = self.calls if ranks > 1 else ()
        self.still = {call.id: call for call in self.calls}
        self.frames: dict[int, Any] = dict.fromkeys(range(ranks), TORCH)
        self.cpu = dict.fromkeys(range(ranks), 0.0)  # seconds a second
        self.used = dict.fromkeys(range(ranks), 0.0)
        self.gpu = 0.0
        self.asked = 0
        self.told: list[str] = []
        self.stopped: list[tuple[float, Stalled]] = []
        if ranks > 1:
            self.watch.watch(self.calls, self.now)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for node, share in self.cpu.items():
                self.used[node] += share
                self.watch.sampled(node, 100 * share, self.gpu, self.now)
            self._turn()

    def _turn(self) -> None:
        for action in self.watch.turn(self.still, self.groups, lambda node: True, self.now):
            match action:
                case Post(node, [ClientToAgent.Where(request, ids)]):
                    self.asked += 1
                    self.surveys.answered(node, request, self._bodies(node, ids))
                case Emit(events.BroadcastStalled(text=text)):
                    self.told.append(text)
                case Stall(call, error):
                    self.stopped.append((self.now, error))
                    del self.still[call.id]
                case _:
                    raise AssertionError(action)

    def _bodies(self, node: int, ids: list[str]) -> list[dict[str, Any]]:
        body: dict[str, Any] = {"runner": "0", "place": 0, "cpu": self.used[node], "state": "idle"}
        call = self.calls[node]
        if call.id in ids:
            body |= {"state": "running", "call": call.id, "name": "train", "seconds": 1.0, "frames": self.frames[node]}
        return [body]

    def returns(self, node: int) -> None:
        del self.still[self.calls[node].id]


def test_a_rank_that_waits_for_one_that_has_returned_is_told_in_seconds_and_stopped_later() -> None:
    pool = Pool()
    pool.run(3)
    pool.returns(1)
    pool.run(14)
    assert len(pool.told) == 1
    assert "rank 1 has returned, rank 0 stands in torch.distributed.barrier" in pool.told[0]
    assert "stopped after 300 s" in pool.told[0]
    pool.run(270)
    assert not pool.stopped
    pool.run(40)
    assert [error.seconds for _, error in pool.stopped] == [300.0]
    assert len(pool.told) == 1
    assert pool.asked < 60


def test_nobody_is_asked_while_ranks_compute() -> None:
    pool = Pool()
    pool.cpu[0] = pool.cpu[1] = 0.9
    pool.run(3600)
    assert (pool.asked, pool.told, pool.stopped) == (0, [], [])


def test_ranks_whose_gpus_are_busy_are_not_stopped() -> None:
    pool = Pool()
    pool.gpu = 98.0
    pool.run(3600)
    assert not pool.stopped


def test_one_rank_that_computes_keeps_the_others_from_being_stopped() -> None:
    pool = Pool()
    pool.cpu[0] = 0.9
    pool.run(3600)
    assert (pool.told, pool.stopped) == ([], [])


def test_a_rank_that_prints_now_and_then_is_not_stopped() -> None:
    pool = Pool()
    pool.returns(1)
    for _ in range(20):
        pool.run(8)
        pool.calls[0].spoke = pool.now
    assert (pool.told, pool.stopped) == ([], [])


def test_a_rank_that_goes_on_after_a_while_is_not_stopped() -> None:
    pool = Pool()
    for _ in range(5):
        pool.run(250)
        pool.cpu[0] = 0.8
        pool.run(5)
        pool.cpu[0] = 0.0
    assert not pool.stopped


def test_a_download_of_one_rank_after_the_other_has_returned_is_told_once_and_never_stopped() -> None:
    pool = Pool()
    pool.frames[0] = SLEEP
    pool.returns(1)
    pool.run(50)
    assert not pool.told
    pool.run(3000)
    assert len(pool.told) == 1
    assert "stopped" not in pool.told[0]
    assert not pool.stopped


def test_ranks_that_all_wait_in_collectives_are_stopped_although_none_has_returned() -> None:
    pool = Pool()
    pool.run(400)
    assert len(pool.stopped) == 2


def test_without_a_time_limit_it_is_only_told() -> None:
    pool = Pool(timeout=None)
    pool.returns(0)
    pool.run(3600)
    assert len(pool.told) == 1
    assert not pool.stopped


def test_a_short_time_limit_holds() -> None:
    pool = Pool(timeout=2.0)
    pool.returns(0)
    pool.run(8)
    assert len(pool.stopped) == 1


def test_a_call_to_one_node_of_a_group_is_watched_too_and_others_are_not() -> None:
    pool = Pool(ranks=1, groups=True)
    pool.run(400)
    assert "Send it to all" in pool.told[0]
    assert len(pool.stopped) == 1
    plain = Pool(ranks=1)
    plain.run(400)
    assert plain.asked == 0


def test_a_node_that_does_not_answer_stops_nothing() -> None:
    pool = Pool()
    pool.surveys.answered = lambda *_: None  # type: ignore[method-assign]
    pool.run(1000)
    assert not pool.stopped


def test_what_has_ended_is_forgotten() -> None:
    pool = Pool()
    pool.run(30)
    pool.still.clear()
    pool.run(1)
    assert not pool.watch._watches
    assert not pool.watch._watched
    assert not pool.surveys._open
