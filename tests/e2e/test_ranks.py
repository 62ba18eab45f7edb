"""Several processes a node: each is a rank of its own for `@` and shard, and a slot like any other for `>>` and map."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward import events
from skyward.api.info import InstanceInfo
from skyward.api.spec import Ranks
from skyward.node.gpus import count_accelerators
from skyward.setup import fleet
from tests.support.listener import Listener
from tests.support.waiting import until


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, processes_per_node=2, console=False) as opened:
        yield opened


@sky.compute
def call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def here() -> InstanceInfo:
    info = sky.instance_info()
    assert info is not None
    return info


def place() -> tuple[int, int, int, int, int, int, bool]:
    info = here()
    ranks = info.rank, info.world_size, info.local_rank, info.local_world_size
    return *ranks, info.node, info.total_nodes, info.is_head


def meet(path: Path, count: int, number: int) -> tuple[int, int]:
    """Comes back when so many calls run at the same time; which rank and process this is."""
    (path / str(number)).touch()
    deadline = time.monotonic() + 60
    while len(list(path.iterdir())) < count:
        assert time.monotonic() < deadline, "the others did not come"
        time.sleep(0.01)
    return here().rank, os.getpid()


def test_a_broadcast_gives_one_result_for_each_rank_in_rank_order(pool: sky.ComputePool) -> None:
    found = call(place) @ pool
    assert found == [
        (0, 4, 0, 2, 0, 2, True),
        (1, 4, 1, 2, 0, 2, False),
        (2, 4, 0, 2, 1, 2, False),
        (3, 4, 1, 2, 1, 2, False),
    ]
    assert len(set(call(os.getpid) @ pool)) == 4
    assert call(os.getpid) @ pool == call(os.getpid) @ pool
    assert (pool.world_size, pool.slots, pool.nodes, pool.concurrency) == (4, 4, 2, 1)


def test_nodes_and_peers_go_on_meaning_machines(pool: sky.ComputePool) -> None:
    info = (call(here) @ pool)[3]
    assert [peer.node for peer in info.peers] == [0, 1]
    assert [info.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert pool.current_nodes() == 2


def test_shard_splits_by_rank(pool: sky.ComputePool) -> None:
    parts = call(lambda: sky.shard(list(range(10)))) @ pool
    assert parts == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]


def test_only_the_head_means_rank_0(pool: sky.ComputePool, heard: Listener) -> None:
    @sky.compute
    @sky.stdout(only="head")
    def speak() -> bool:
        print("spoken by", here().rank)
        return sky.is_head()

    assert speak() @ pool == [True, False, False, False]
    lines = until(lambda: [e.text for e in heard.of(events.Output)])
    assert lines == ["spoken by 0"]


def test_every_process_is_a_slot(pool: sky.ComputePool, tmp_path: Path) -> None:
    for name, send in {
        "gather": lambda path: sky.gather(*(call(meet, path, 4, i) for i in range(4))) >> pool,
        "map": lambda path: pool.map(lambda i: meet(path, 4, i), range(4)),
        "executor": lambda path: list(pool.executor.map(meet, [path] * 4, [4] * 4, range(4))),
    }.items():
        (tmp_path / name).mkdir()
        met = send(tmp_path / name)
        assert sorted(rank for rank, _ in met) == [0, 1, 2, 3], name
        assert len({pid for _, pid in met}) == 4, name


def test_joblib_uses_every_process(pool: sky.ComputePool, tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib")
    with sky.integrations.joblib_backend(pool):
        assert joblib.effective_n_jobs(-1) == 4
        met = joblib.Parallel(n_jobs=-1, batch_size=1)(joblib.delayed(meet)(tmp_path, 4, i) for i in range(4))
    assert len({pid for _, pid in met}) == 4


def test_a_rank_that_dies_is_named_and_replaced(pool: sky.ComputePool) -> None:
    def die() -> None:
        if here().rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    before = call(os.getpid) @ pool
    with pytest.raises(sky.errors.TaskCrashed, match=r"on rank 3 \(node 1\) was killed by SIGKILL") as raised:
        call(die) @ pool
    assert (raised.value.rank, raised.value.node) == (3, 1)
    assert "rank 3 of 4 (node 1) failed first" in raised.value.__notes__[0]
    assert "ranks 0, 1, 2 had not finished" in raised.value.__notes__[0]
    assert [info.rank for info in call(here) @ pool] == [0, 1, 2, 3]
    assert (call(os.getpid) @ pool)[3] != before[3]


def test_a_call_to_one_process_names_its_rank_when_it_fails(pool: sky.ComputePool, tmp_path: Path) -> None:
    def die_at(path: Path, rank: int) -> None:
        own, _ = meet(path, 4, here().rank)
        if own == rank:
            os._exit(5)

    futures = [call(die_at, tmp_path, 2) > pool for _ in range(4)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    assert [(type(e), getattr(e, "rank", None)) for e in errors] == [(sky.errors.TaskCrashed, 2)]
    assert "rank 2 (node 1)" in str(errors[0])


def test_an_exception_says_which_rank_raised_it(pool: sky.ComputePool) -> None:
    def fail() -> None:
        if here().rank == 1:
            raise KeyError("no such thing")
        time.sleep(60)

    with pytest.raises(KeyError, match="no such thing") as raised:
        call(fail) @ pool
    assert any("raised on rank 1 (node 0)" in note for note in raised.value.__notes__)


def test_a_time_limit_names_the_rank_and_stops_the_others(pool: sky.ComputePool) -> None:
    def linger() -> None:
        if here().rank == 2:
            time.sleep(60)

    with pytest.raises(sky.errors.TaskTimeout, match=r"on rank 2 \(node 1\)"):
        call(linger).with_timeout(5) @ pool  # the others are done by then, on a busy machine too
    assert call(lambda: here().rank) @ pool == [0, 1, 2, 3]


def test_output_and_events_carry_the_rank(pool: sky.ComputePool, heard: Listener) -> None:
    call(lambda: print("rank", here().rank, end="")) @ pool
    until(lambda: len(heard.of(events.CallEnded)) == 4)
    lines = {(e.node, e.rank, e.text) for e in heard.of(events.Output)}
    assert lines == {(0, 0, "rank 0"), (0, 1, "rank 1"), (1, 2, "rank 2"), (1, 3, "rank 3")}
    assert {(e.node, e.rank) for e in heard.of(events.CallStarted)} == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert {(e.node, e.rank) for e in heard.of(events.CallEnded)} == {(0, 0), (0, 1), (1, 2), (1, 3)}


def test_generators_stream_from_every_rank(pool: sky.ComputePool) -> None:
    def count() -> Iterator[tuple[int, int]]:
        for i in range(3):
            yield here().rank, i

    streams = call(count) @ pool
    assert [list(stream) for stream in streams] == [[(rank, i) for i in range(3)] for rank in range(4)]


def test_two_broadcasts_run_in_the_same_order_in_every_rank(pool: sky.ComputePool, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def note(number: int) -> None:
        with (tmp_path / str(here().rank)).open("a") as file:
            file.write(f"{number}\n")

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda number: call(note, number) @ pool, range(30)))
    orders = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert len(set(orders)) == 1


def test_a_broadcast_with_retries_is_started_again_in_every_rank_when_a_node_is_lost(
    pool: sky.ComputePool, tmp_path: Path
) -> None:
    agent = pool._engine.greetings()[1]["pid"]  # pyright: ignore[reportPrivateUsage]

    @sky.compute(retries=1)
    def lose() -> tuple[int, int]:
        info = here()
        (tmp_path / f"{info.rank} {info.attempt}").touch()
        if info.attempt == 0:
            if info.rank == 3:
                os.kill(agent, signal.SIGKILL)
            time.sleep(60)
        return info.rank, info.attempt

    assert lose() @ pool == [(rank, 1) for rank in range(4)]
    assert len(list(tmp_path.iterdir())) >= 5


def test_a_rank_has_as_many_threads_as_it_runs_calls(tmp_path: Path) -> None:
    with sky.ComputePool(nodes=1, processes_per_node=2, concurrency=2, console=False) as pool:
        assert (pool.world_size, pool.slots) == (2, 4)
        met = sky.gather(*(call(meet, tmp_path, 4, i) for i in range(4))) >> pool
        assert sorted(rank for rank, _ in met) == [0, 0, 1, 1]
        assert len({pid for _, pid in met}) == 2
        assert call(lambda: here().rank) @ pool == [0, 1]


def test_each_rank_has_its_own_processes_where_slots_are_processes(tmp_path: Path) -> None:
    worker = sky.Worker(2, executor="process")
    with sky.ComputePool(nodes=1, processes_per_node=2, worker=worker, console=False) as pool:
        met = sky.gather(*(call(meet, tmp_path, 4, i) for i in range(4))) >> pool
        assert sorted(rank for rank, _ in met) == [0, 0, 1, 1]
        assert len({pid for _, pid in met}) == 4
        assert call(lambda: here().rank) @ pool == [0, 1]


def test_unequal_nodes_are_counted_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `processes_per_node="gpu"` has it where nodes have different numbers of GPUs."""
    monkeypatch.setattr(fleet, "counted_ranks", lambda *given: Ranks([1, 3]))
    with sky.ComputePool(nodes=2, console=False) as pool:
        found = call(place) @ pool
        assert [p[:6] for p in found] == [
            (0, 4, 0, 1, 0, 2),
            (1, 4, 0, 3, 1, 2),
            (2, 4, 1, 3, 1, 2),
            (3, 4, 2, 3, 1, 2),
        ]
        assert pool.slots == 4
        met = sky.gather(*(call(meet, tmp_path, 4, i) for i in range(4))) >> pool
        assert sorted(rank for rank, _ in met) == [0, 1, 2, 3]


@contextmanager
def _joined(path: str, info: InstanceInfo) -> Generator[None]:
    with open(os.path.join(path, "entered"), "a") as file:
        file.write(f"{info.rank}\n")
    yield


def test_the_ranks_of_one_node_are_made_again_together_when_one_is_gone(tmp_path: Path) -> None:
    """Plugins may have joined them to a group, also on one node."""
    from functools import partial

    plugin = sky.Plugin.create("joined").with_around_app(partial(_joined, str(tmp_path)))
    with sky.ComputePool(nodes=1, processes_per_node=2, plugins=[plugin], console=False) as pool:
        heard = Listener(pool)
        before = call(os.getpid) @ pool
        psutil.Process(before[1]).kill()
        until(lambda: any("cannot be repaired" in e.text for e in heard.of(events.Notice)))
        after = call(os.getpid) @ pool
        assert set(before).isdisjoint(after)
        assert any("rank 1 (node 0) died" in e.text for e in heard.of(events.Notice))
        heard.stop()
    entered = (tmp_path / "entered").read_text().split()
    assert sorted(entered[:2]) == sorted(entered[-2:]) == ["0", "1"]


def test_a_hook_that_fails_is_named_with_its_rank() -> None:
    @contextmanager
    def refuse(info: InstanceInfo) -> Generator[None]:
        if info.rank == 1:
            raise RuntimeError("not here")
        yield

    plugin = sky.Plugin.create("picky").with_around_app(refuse)
    with (
        pytest.raises(sky.errors.PluginError, match=r"on rank 1 \(node 0\)"),
        sky.ComputePool(nodes=1, processes_per_node=2, plugins=[plugin], console=False),
    ):
        pass


@pytest.mark.skipif(count_accelerators() > 0, reason="this computer has GPUs")
def test_one_process_for_each_gpu_is_refused_where_there_is_none() -> None:
    with (
        pytest.raises(sky.errors.BootstrapError, match=r'on node 0 .*processes_per_node="gpu".*processes_per_node=2'),
        sky.ComputePool(nodes=2, processes_per_node="gpu", console=False),
    ):
        pass
