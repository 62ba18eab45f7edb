"""Shared collections on real pools of this computer: seen by all ranks and the client, and released by who dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import skyward as sky
from skyward.errors import (
    BarrierBroken,
    InvalidArgument,
    LockLost,
    PoolClosed,
    SharedLost,
    SharedTimeout,
    SharedTooLarge,
)
from tests.support.waiting import until

LONG = 120.0
"""Seconds that nothing here takes, on the slowest machine."""


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=4, console=False) as opened:
        yield opened


@sky.compute
def use_everything(rounds: int) -> tuple[int, list[int], int]:
    rank = sky.instance_info().rank
    best = sky.dict("all.best", str, int)
    tokens = []
    for _ in range(rounds):
        sky.counter("all.count").add()
        best.change("sum", lambda value: value + rank, default=0)
        with sky.lock("all.lock") as token:
            tokens.append(token)
            seen = sky.dict("all.seen").get("n", 0)
            sky.dict("all.seen")["n"] = seen + 1  # two operations: only the lock makes them one
    sky.set("all.ranks", int).add(rank)
    sky.queue("all.queue").put((rank, "done"))
    place = sky.barrier("all.barrier").wait(LONG)
    return place, tokens, len(sky.set("all.ranks"))


def test_all_ranks_and_the_client_see_the_same(pool: sky.ComputePool) -> None:
    results = use_everything(20) @ pool
    assert sorted(place for place, _, _ in results) == [0, 1, 2, 3]
    assert sorted(token for _, tokens, _ in results for token in tokens) == list(range(1, 81))
    assert [members for _, _, members in results] == [4] * 4
    assert pool.counter("all.count").value == 80
    assert pool.dict("all.best", str, int)["sum"] == 20 * (0 + 1 + 2 + 3)
    assert pool.dict("all.seen")["n"] == 80
    assert pool.set("all.ranks", int).members() == {0, 1, 2, 3}
    assert sorted(pool.queue("all.queue").get(LONG) for _ in range(4)) == [(rank, "done") for rank in range(4)]
    with pytest.raises(SharedTimeout, match=r"queue 'all\.queue' was empty for 0 s"):
        pool.queue("all.queue").get(timeout=0)


def test_a_dict_does_what_a_dict_does(pool: sky.ComputePool) -> None:
    scores = pool.dict("scores", str, Any)
    scores.update({"a": 1, "b": [2]})
    assert (len(scores), "a" in scores, "c" in scores) == (2, True, False)
    assert (scores["a"], scores.get("c"), scores.get("c", 0)) == (1, None, 0)
    assert scores.setdefault("a", 5) == 1
    assert scores.setdefault("c", 5) == 5
    assert scores.compare_and_set("a", 1, 10)
    assert not scores.compare_and_set("a", 1, 11)
    assert not scores.compare_and_set("z", None, 11)
    assert scores.items() == [("a", 10), ("b", [2]), ("c", 5)]
    assert (scores.keys(), scores.values(), list(scores)) == (["a", "b", "c"], [10, [2], 5], ["a", "b", "c"])
    assert (scores.pop("b"), scores.pop("b", None)) == ([2], None)
    for missing in (lambda: scores["b"], lambda: scores.pop("b"), lambda: scores.__delitem__("b")):
        with pytest.raises(KeyError):
            missing()
    del scores["c"]
    scores.clear()
    assert len(scores) == 0
    with pytest.raises(InvalidArgument, match="cannot be a key"):
        scores[[1]] = 1  # type: ignore[index]


def test_arrays_come_back_as_copies_that_can_be_written_to(pool: sky.ComputePool) -> None:
    arrays = pool.dict("arrays")
    arrays["x"] = np.arange(10)
    copy = arrays["x"]
    copy[0] = 7
    assert arrays["x"].tolist() == list(range(10))
    with pytest.raises(sky.errors.SharedTooLarge, match="20,000,"):
        arrays["big"] = bytes(20_000_000)


def test_a_name_belongs_to_one_kind(pool: sky.ComputePool) -> None:
    pool.dict("kind")["a"] = 1
    with pytest.raises(InvalidArgument, match="'kind' is a dict in this pool, not a queue"):
        pool.queue("kind").get(0)
    with pytest.raises(InvalidArgument, match="cannot name a lock"):
        pool.lock("")
    with pytest.raises(InvalidArgument, match="timeout=-1"):
        pool.queue("q").get(-1)


@sky.compute
def add_to(counter: sky.SharedCounter, items: sky.SharedQueue[int], count: int) -> int:
    for item in range(count):
        items.put(item)
    return counter.add(count)


def test_a_handle_can_be_an_argument(pool: sky.ComputePool) -> None:
    items = pool.queue("handed", int, maxsize=3)
    filling = add_to(pool.counter("handed.count"), items, 10) > pool
    assert [items.get(LONG) for _ in range(10)] == list(range(10))
    assert filling.result(LONG) == 10
    assert pool.counter("handed.count").value == 10


@sky.compute
def hold(name: str, how: str) -> None:
    sky.lock(name).acquire()
    sky.event(f"{name}.held").set()
    if how == "exit":
        os._exit(3)
    if how == "wait":
        time.sleep(LONG)


def test_a_call_that_ends_releases_its_locks(pool: sky.ComputePool) -> None:
    hold("ended", "return") >> pool
    assert pool.lock("ended").acquire(LONG) == 2
    pool.lock("ended").release()
    with pytest.raises(LockLost, match="acquire it first"):
        pool.lock("ended").release()


def test_a_process_that_dies_releases_its_lock(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.errors.TaskCrashed):
        hold("died", "exit") >> pool
    with pool.lock("died", timeout=LONG) as token:
        assert token == 2


def test_a_call_that_is_cancelled_releases_its_lock_and_waiting_is_timed(pool: sky.ComputePool) -> None:
    call = hold("cancelled", "wait") > pool
    pool.event("cancelled.held").wait(LONG)
    assert pool.lock("cancelled").locked()
    with pytest.raises(TimeoutError, match=r"lock 'cancelled' was not free within 0\.1 s: rank \d has held it for"):
        pool.lock("cancelled").acquire(0.1)
    call.cancel()
    assert pool.lock("cancelled").acquire(LONG) == 2
    pool.lock("cancelled").release()


@sky.compute
def meet(name: str, timeout: float) -> int:
    sky.queue(f"{name}.coming").put(sky.instance_info().rank)
    return sky.barrier(name).wait(timeout)


@sky.compute
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@sky.compute
def ask_something() -> int:
    return sky.counter("asked").add(1)


def gather_at(pool: sky.ComputePool, name: str, timeout: float) -> list[Future[int]]:
    """Three calls that wait at a barrier of four ranks."""
    # the process of a call that an earlier test has cancelled may end only now, and would break the barrier
    ask_something() @ pool
    calls = [meet(name, timeout) > pool for _ in range(3)]
    for _ in calls:
        pool.queue(f"{name}.coming").get(LONG)
    until(lambda: pool.barrier(name).waiting == 3)
    return calls


def test_a_barrier_whose_rank_dies_raises_on_the_others(pool: sky.ComputePool) -> None:
    """The rank has never used a collection: the client tells the server of its end."""
    calls = gather_at(pool, "broken", LONG)
    with pytest.raises(sky.errors.TaskCrashed) as crash:
        die() >> pool  # on the node that is free
    for call in calls:
        with pytest.raises(BarrierBroken, match=rf"rank {crash.value.node} is lost") as broken:
            call.result(LONG)
        assert broken.value.rank == crash.value.node


def test_a_barrier_says_who_is_missing(pool: sky.ComputePool) -> None:
    calls = [meet("late", 1.0) > pool for _ in range(3)]
    errors = [call.exception(LONG) for call in calls]
    late = [error for error in errors if isinstance(error, SharedTimeout)]
    assert late
    assert all(isinstance(error, SharedTimeout | BarrierBroken) for error in errors)
    assert any("did not arrive" in str(error) for error in late), late


def test_a_client_thread_that_waits_gets_what_a_body_puts(pool: sky.ComputePool) -> None:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(pool.queue("one").get(LONG)))
    thread.start()
    add_to(pool.counter("one.count"), pool.queue("one"), 1) >> pool
    thread.join(LONG)
    assert got == [0]


@sky.compute
def in_a_child(used_before: bool) -> str:
    if used_before:
        sky.counter("child").add()
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            sky.counter("child").add()
            os.write(write, b"it worked")
        except sky.SkywardError as exc:
            os.write(write, str(exc).encode())
        os._exit(0)
    return os.read(read, 1000).decode()


@pytest.mark.parametrize("used_before", [False, True])
def test_a_forked_child_of_a_body_is_told_that_it_cannot(pool: sky.ComputePool, used_before: bool) -> None:
    assert "cannot be used here: this process was forked" in in_a_child(used_before) >> pool


def test_joblib_tasks_and_local_calls_use_the_collections_of_the_pool(pool: sky.ComputePool) -> None:
    joblib = pytest.importorskip("joblib")
    from skyward.integrations import joblib_backend

    with joblib_backend(pool):
        joblib.Parallel(n_jobs=4)(joblib.delayed(_count_up)() for _ in range(20))
    assert pool.counter("joblib").value == 20
    assert sky.compute(_count_up).local() == 21


def _count_up() -> int:
    return sky.counter("joblib").add()


def test_outside_a_pool_the_error_says_what_to_use() -> None:
    handle = sky.dict("x")
    import skyward.api.compute as targets

    before, targets._open[:] = list(targets._open), []
    try:
        with pytest.raises(PoolClosed, match=r"pool\.dict"):
            handle["a"] = 1
    finally:
        targets._open[:] = before


def test_a_time_out_holds_while_node_0_is_silent_and_nothing_is_lost_by_it(
    pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, lock, agent = pool.queue("silent"), pool.lock("silent.lock"), pool._engine.greetings()[0]["pid"]
    queue.put("before")
    assert queue.get(LONG) == "before"
    monkeypatch.setattr("skyward.node.shared.channel.LATE", 0.1)
    os.kill(agent, signal.SIGSTOP)
    try:
        with pytest.raises(SharedTimeout, match=r"node 0, .* has not answered within 0\.1 s"):
            queue.get(timeout=0.1)
        with pytest.raises(SharedTimeout, match=r"has not answered within 0\.1 s"):
            lock.acquire(timeout=0.1)
    finally:
        os.kill(agent, signal.SIGCONT)
    monkeypatch.undo()
    queue.put("after")
    assert queue.get(LONG) == "after"
    assert lock.acquire(LONG)
    lock.release()


@sky.compute
def count_members(name: str) -> tuple[int, int]:
    members = sky.set(name, str).members()
    return len(members), sum(map(len, members))


def test_more_keys_than_a_message_takes_are_refused_at_once_or_come_back_whole(pool: sky.ComputePool) -> None:
    keys = [f"{number:02}" + "k" * 900_000 for number in range(40)]
    with pytest.raises(SharedTooLarge, match="dict 'many' takes"):
        pool.dict("many", str, int).update(dict.fromkeys(keys, 0))
    with pytest.raises(SharedTooLarge, match=r"set 'many\.set' takes"):
        pool.set("many.set", str).update(keys)
    for at in range(0, 40, 10):
        assert pool.set("many.set", str).update(keys[at : at + 10]) == 10
        pool.dict("many", str, int).update(dict.fromkeys(keys[at : at + 10], at))
    assert pool.set("many.set", str).members() == set(keys)
    assert [value for _, value in pool.dict("many", str, int).items()] == [
        at for at in (0, 10, 20, 30) for _ in range(10)
    ]
    assert count_members("many.set") >> pool == (40, 40 * 900_002)
    pool.set("many.set").clear()
    pool.dict("many").clear()


def test_a_counter_has_64_bits_and_says_so(pool: sky.ComputePool) -> None:
    counter = pool.counter("wide")
    with pytest.raises(InvalidArgument, match="64"):
        counter.set(9 * 10**4299)
    counter.set(2**63 - 1)
    with pytest.raises(InvalidArgument, match="64 bits"):
        counter.add(1)
    assert counter.value == 2**63 - 1


def test_the_example_of_the_guide_runs() -> None:
    program = Path(__file__).parents[2] / "examples" / "guides" / "16_shared_collections.py"
    done = subprocess.run(
        [sys.executable, str(program), "--nodes", "2"], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["100 jobs, best: (1.0, 37)", "6 words"]


@sky.compute
def wait_for_an_item(name: str) -> str:
    sky.event("waits").set()
    try:
        return sky.queue(name).get()
    except PoolClosed as exc:
        return str(exc)


@sky.compute
def wait_in_thread(name: str) -> None:
    sky.counter("threads").add()
    sky.queue(name).get()


def test_what_waits_ends_with_its_call_its_node_and_its_pool() -> None:
    ended: list[BaseException] = []

    def wait(pool: sky.ComputePool) -> None:
        try:
            pool.queue("never").get()
        except BaseException as exc:
            ended.append(exc)

    with sky.ComputePool(nodes=2, worker=sky.Worker(2, executor="thread"), console=False) as pool:
        call = wait_in_thread("never") > pool
        until(lambda: pool.counter("threads").value == 1)
        began = time.monotonic()
        call.cancel()
        until(lambda: pool.counter("threads").add(0) == 1 and call.done())

        # node 0, which keeps everything, dies: state is gone, and everybody who used it is told once
        thread = threading.Thread(target=wait, args=(pool,))
        thread.start()
        pool.dict("d")["a"] = 1
        agent = next(
            child
            for child in psutil.Process(pool._fleet.by_node[0].keeper.pid).children()
            if child.pid == pool._engine.greetings()[0]["pid"]
        )
        agent.kill()
        thread.join(LONG)
        assert isinstance(ended[0], SharedLost), ended
        until(lambda: pool.current_nodes() == 2)
        assert len(pool.dict("d")) == 0

        thread = threading.Thread(target=wait, args=(pool,))
        thread.start()
        closing = wait_for_an_item("never") > pool
        pool.event("waits").wait(LONG)
        pool.close()  # leaving the block would wait for the call
    thread.join(LONG)
    assert isinstance(ended[1], PoolClosed)
    assert isinstance(closing.exception(LONG), PoolClosed)
    with pytest.raises(PoolClosed):
        pool.dict("d")["a"] = 1
    assert time.monotonic() - began < LONG
