"""Bodies that run too long, or are no longer wanted: they end, and their slot is used again."""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, as_completed, wait
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.errors import TaskTimeout
from tests.support.waiting import until


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    """A pool of one node with little patience, for the tests at the end of this file."""
    with sky.ComputePool(grace=1, console=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def patient() -> Iterator[sky.ComputePool]:
    """The same with much patience, for bodies that end by themselves when they are stopped, soon or not so soon."""
    with sky.ComputePool(grace=30, console=False) as opened:
        yield opened


@pytest.fixture
def fresh() -> Iterator[sky.ComputePool]:
    """The same for one test alone."""
    with sky.ComputePool(grace=1, console=False) as opened:
        yield opened


@pytest.fixture
def threads() -> Iterator[sky.ComputePool]:
    """A pool of one node whose four slots share a process."""
    with sky.ComputePool(concurrency=4, grace=1, console=False) as opened:
        yield opened


@pytest.fixture
def patient_threads() -> Iterator[sky.ComputePool]:
    """The same with much patience."""
    with sky.ComputePool(concurrency=4, grace=30, console=False) as opened:
        yield opened


@sky.compute
def echo(x: int) -> int:
    return x


@sky.compute
def my_pid() -> int:
    return os.getpid()


@sky.compute
def sleep(seconds: float, mark: Path | None = None) -> float:
    if mark is not None:
        mark.write_text(str(os.getpid()))
    time.sleep(seconds)
    return seconds


@sky.compute
def meet(directory: Path, rank: int, total: int) -> int:
    """Ends when as many run at the same time."""
    (directory / str(rank)).touch()
    while len(list(directory.iterdir())) < total:
        time.sleep(0.01)
    return rank


@sky.compute
def spin(mark: Path) -> None:
    """Python code that a thread can be stopped in, and that cleans up."""
    mark.with_suffix(".begun").touch()
    try:
        while True:
            time.sleep(0.01)
    finally:
        mark.touch()


def test_the_default_limit_of_a_pool_applies() -> None:
    """Row 4."""
    with sky.ComputePool(default_compute_timeout=0.3, grace=1, console=False) as pool:
        with pytest.raises(TaskTimeout):
            sleep(60) >> pool
        assert sleep(0.5).with_timeout(30) >> pool == 0.5
        assert sleep(0.5).with_timeout(None) >> pool == 0.5
        assert sleep(0.5).with_timeout(math.inf) >> pool == 0.5


def test_a_timeout_that_meets_the_end_of_its_body_leaves_the_slot_usable(fresh: sky.ComputePool) -> None:
    """Row 4: a verdict that crosses the stop on its way does not cost the slot."""
    rng = random.Random(4)
    for _ in range(120):
        future = sleep(0.02 + rng.uniform(-0.003, 0.003)).with_timeout(0.02) > fresh
        try:
            assert future.result(45) > 0
        except TaskTimeout:
            pass
        assert (echo(1) > fresh).result(45) == 1


def test_in_threads_a_timeout_that_meets_the_end_of_its_body_leaves_all_slots_usable(tmp_path: Path) -> None:
    """Row 4, threads: the stop must not hit the runner's own code, nor the next call."""
    rng = random.Random(5)

    @sky.compute
    def busy(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    with sky.ComputePool(concurrency=4, grace=3, console=False) as pool:
        calls = [busy(0.01 + rng.uniform(-0.006, 0.006)).with_timeout(0.02) > pool for _ in range(150)]
        for future in as_completed(calls, timeout=60):
            assert isinstance(future.exception(), TaskTimeout | None)
        together = [meet(tmp_path, i, 4) > pool for i in range(4)]
        assert [f.result(45) for f in together] == [0, 1, 2, 3]


def test_in_threads_a_timeout_leaves_the_neighbours_alone(patient_threads: sky.ComputePool, tmp_path: Path) -> None:
    """Row 4, threads: Python code is stopped in its thread alone; the process then begins nothing new."""
    pid = my_pid() >> patient_threads
    neighbours = [sleep(1.0, tmp_path / f"n{i}") > patient_threads for i in range(3)]
    with pytest.raises(TaskTimeout) as caught:
        spin(tmp_path / "mark").with_timeout(0.3) >> patient_threads
    assert not caught.value.killed
    assert (tmp_path / "mark").exists()
    assert [f.result(45) for f in neighbours] == [1.0] * 3
    assert {int((tmp_path / f"n{i}").read_text()) for i in range(3)} == {pid}
    assert my_pid() >> patient_threads != pid


def test_in_threads_a_stuck_body_costs_the_process_but_no_neighbour_its_result(threads: sky.ComputePool) -> None:
    """Row 4, threads: nothing ends a thread in C but the end of its process; the others are run again."""

    @sky.compute(timeout=0.3)
    def stuck() -> None:
        time.sleep(60)

    neighbours = [sleep(2.0) > threads for _ in range(3)]
    with pytest.raises(TaskTimeout) as caught:
        stuck() >> threads
    assert caught.value.killed
    assert [f.result(45) for f in neighbours] == [2.0] * 3


def test_in_threads_all_slots_are_usable_after_timeouts(threads: sky.ComputePool, tmp_path: Path) -> None:
    """Row 4, threads."""
    calls = [spin(tmp_path / f"{i}").with_timeout(0.2) > threads for i in range(12)]
    for future in calls:
        with pytest.raises(TaskTimeout):
            future.result(45)
    (tmp_path / "meeting").mkdir()
    together = [meet(tmp_path / "meeting", i, 4) > threads for i in range(4)]
    assert [f.result(45) for f in together] == [0, 1, 2, 3]


def test_a_cancel_that_meets_the_end_of_its_body_leaves_the_slot_usable(fresh: sky.ComputePool) -> None:
    """Row 38: cancel at any moment."""
    rng = random.Random(6)
    for _ in range(150):
        future = sleep(0.004) > fresh
        time.sleep(rng.uniform(0.002, 0.008))
        if not future.cancel():
            assert future.result() == 0.004
        assert (echo(1) > fresh).result(45) == 1


def test_a_timeout_in_a_broadcast_stops_all_ranks(tmp_path: Path) -> None:
    """Row 17."""

    begun, ended = tmp_path / "begun", tmp_path / "ended"
    begun.mkdir()
    ended.mkdir()

    @sky.compute(timeout=2)
    def hang() -> None:
        info = sky.instance_info()
        assert info is not None
        try:
            (begun / str(info.node)).touch()
            time.sleep(600)
        finally:
            (ended / str(info.node)).touch()

    with sky.ComputePool(nodes=2, grace=60, console=False) as pool:
        with pytest.raises(TaskTimeout):
            hang() @ pool
        assert echo(1) @ pool == [1, 1]
    both = {path.name for path in ended.iterdir()}
    # on a slow machine one may not have begun when the time of the other was over
    assert {path.name for path in begun.iterdir()} <= both
    assert both


def test_a_sleeping_body_ends_at_its_time_limit(patient: sky.ComputePool) -> None:
    """Row 4."""
    began = time.monotonic()
    with pytest.raises(TaskTimeout) as caught:
        sleep(60).with_timeout(0.3) >> patient
    assert 0.3 <= time.monotonic() - began < 45
    assert (caught.value.seconds, caught.value.node, caught.value.killed) == (0.3, 0, False)
    assert isinstance(caught.value, TimeoutError)
    assert "0.3 s" in str(caught.value)
    note, _ = caught.value.__notes__  # the other one names `sky replay`
    assert note.startswith("where the body was when its time ran out:\n")
    frames = [line for line in note.splitlines() if line.startswith("  File ")]
    assert len(frames) == 1, note
    assert frames[0].startswith(f'  File "{__file__}"')
    assert frames[0].endswith(" in sleep")
    assert "time.sleep(" in note
    assert echo(1) >> patient == 1


def test_a_body_that_holds_the_gil_in_c_is_killed(pool: sky.ComputePool) -> None:
    """Row 4: heartbeats and verdicts do not depend on the body."""

    @sky.compute(timeout=0.3)
    def stuck() -> None:
        ctypes.PyDLL(None).usleep(60_000_000)

    began = time.monotonic()
    with pytest.raises(TaskTimeout) as caught:
        stuck() >> pool
    assert time.monotonic() - began < 45
    assert caught.value.killed
    assert echo(1) >> pool == 1


def test_a_stopped_process_is_killed(pool: sky.ComputePool) -> None:
    """Row 4: SIGSTOP of the child."""

    @sky.compute(timeout=0.3)
    def frozen() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(TaskTimeout) as caught:
        frozen() >> pool
    assert caught.value.killed
    assert echo(1) >> pool == 1


def test_a_body_that_swallows_the_stop_is_killed_after_the_grace(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Row 4."""

    @sky.compute(timeout=0.3)
    def stubborn(mark: Path) -> None:
        with mark.open("a") as file:
            file.write("x")
        while True:
            try:
                time.sleep(60)
            except BaseException:
                continue

    began = time.monotonic()
    with pytest.raises(TaskTimeout) as caught:
        stubborn(tmp_path / "mark") >> pool
    assert 1.3 <= time.monotonic() - began < 45
    assert caught.value.killed
    assert "killed" in str(caught.value)
    assert echo(1) >> pool == 1
    assert (tmp_path / "mark").read_text() == "x"


def test_a_body_that_ignores_sigterm_is_killed_after_the_grace(pool: sky.ComputePool) -> None:
    """Row 4: the user's own signal handler is no way out."""

    @sky.compute(timeout=0.3)
    def deaf() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    with pytest.raises(TaskTimeout) as caught:
        deaf() >> pool
    assert caught.value.killed
    assert echo(1) >> pool == 1


def test_finally_blocks_of_a_stopped_body_run(patient: sky.ComputePool, tmp_path: Path) -> None:
    """Row 4."""
    with pytest.raises(TaskTimeout):
        spin(tmp_path / "mark").with_timeout(0.3) >> patient
    assert (tmp_path / "mark").exists()


def test_the_signal_handlers_of_a_body_end_with_it(patient: sky.ComputePool, tmp_path: Path) -> None:
    """Libraries set them quietly; a later body in the same process can be stopped all the same."""

    @sky.compute
    def handle() -> int:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return os.getpid()

    @sky.compute
    def sigint() -> tuple[int, bool]:
        return os.getpid(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    pid = handle() >> patient
    assert sigint() >> patient == (pid, True)
    with pytest.raises(TaskTimeout) as caught:
        spin(tmp_path / "mark").with_timeout(0.3) >> patient
    assert not caught.value.killed
    assert (tmp_path / "mark").exists()


def test_a_body_that_returns_after_the_stop_has_timed_out_all_the_same(patient: sky.ComputePool) -> None:
    """Row 4: one verdict, whatever the body makes of the stop."""

    @sky.compute(timeout=0.3)
    def late() -> str:
        try:
            time.sleep(60)
        except BaseException:
            return "I made it"
        return "no"

    with pytest.raises(TaskTimeout):
        late() >> patient
    assert echo(1) >> patient == 1


def test_a_coroutine_is_stopped_too(patient: sky.ComputePool, tmp_path: Path) -> None:
    """Row 4."""

    @sky.compute(timeout=0.3)
    async def waiter(mark: Path) -> None:
        import asyncio

        try:
            await asyncio.sleep(60)
        finally:
            mark.touch()

    with pytest.raises(TaskTimeout):
        waiter(tmp_path / "mark") >> patient
    assert (tmp_path / "mark").exists()
    assert echo(1) >> patient == 1


def test_the_subprocess_a_stopped_body_waits_for_ends_with_it(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Rows 4 and 12."""

    @sky.compute(timeout=0.5)
    def outsource(mark: Path) -> None:
        import subprocess

        subprocess.run(["sh", "-c", f"echo $$ > {mark}.new && mv {mark}.new {mark} && exec sleep 60"], check=True)

    with pytest.raises(TaskTimeout):
        outsource(tmp_path / "mark") >> pool
    pid = int((tmp_path / "mark").read_text())
    until(lambda: not psutil.pid_exists(pid))


def test_the_limit_counts_from_the_start_of_the_body(pool: sky.ComputePool) -> None:
    """Row 4: waiting in the queue is not running."""
    queued = [sleep(0.5).with_timeout(2) > pool for _ in range(5)]
    assert [f.result(45) for f in queued] == [0.5] * 5


class SlowToLoad:
    """Stands for an argument whose module takes its time to be imported."""

    def __reduce__(self) -> tuple[object, ...]:
        return time.sleep, (4.0,)


@sky.compute(timeout=3)
def plain(_: object) -> int:
    return 1


@sky.compute(timeout=3)
async def awaited(_: object) -> int:
    return 2


@sky.compute(timeout=3)
def yielded(_: object) -> Iterator[int]:
    yield 3


def test_loading_a_call_is_not_running_it(pool: sky.ComputePool, threads: sky.ComputePool) -> None:
    """Imports do not count, however a body is written and run."""
    alone = plain(SlowToLoad()) > pool
    together = plain(SlowToLoad()) > threads, awaited(SlowToLoad()) > threads
    stream = yielded(SlowToLoad()) >> threads
    assert threads.map(plain, [SlowToLoad()]) == [1]
    assert list(stream) == [3]
    assert alone.result(60) == 1
    assert [future.result(60) for future in together] == [1, 2]


def test_cancelling_a_future_stops_the_body(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Row 32: what is no longer wanted ends, within 5 s."""
    future = spin(tmp_path / "mark") > pool
    until((tmp_path / "mark.begun").exists)
    assert future.running()
    assert future.cancel()
    assert future.cancelled()
    with pytest.raises(CancelledError):
        future.result(1)
    until((tmp_path / "mark").exists)
    assert (echo(1) > pool).result(45) == 1


def test_cancelling_a_body_that_cannot_be_stopped_kills_it(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Row 32."""

    @sky.compute
    def stuck(mark: Path) -> None:
        mark.write_text(str(os.getpid()))
        ctypes.PyDLL(None).usleep(60_000_000)

    future = stuck(tmp_path / "mark") > pool
    until(lambda: (tmp_path / "mark").exists() and (tmp_path / "mark").read_text())
    future.cancel()
    assert (echo(1) > pool).result(45) == 1
    assert not psutil.pid_exists(int((tmp_path / "mark").read_text()))


def test_a_cancelled_call_in_the_queue_never_runs(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Contract: a cancelled call is never started."""
    first = spin(tmp_path / "first") > pool
    until((tmp_path / "first.begun").exists)
    queued = [sleep(0, tmp_path / f"queued{i}") > pool for i in range(5)]
    assert all(f.cancel() for f in queued)
    last = echo(2) > pool
    first.cancel()
    assert last.result(45) == 2
    assert not list(tmp_path.glob("queued*"))


def test_cancelled_futures_count_as_done_for_everyone_who_waits(pool: sky.ComputePool, tmp_path: Path) -> None:
    """`concurrent.futures.wait` and `as_completed` return for a cancelled call."""
    running = spin(tmp_path / "mark") > pool
    until((tmp_path / "mark.begun").exists)
    queued = echo(1) > pool
    running.cancel()
    queued.cancel()
    assert not wait([running, queued], timeout=45).not_done
    assert set(as_completed([running, queued], timeout=45)) == {running, queued}


def test_a_call_to_one_node_that_wants_a_group_of_all_ends_after_the_stall_timeout() -> None:
    """What `>>` of a function with `@sky.integrations.torch` does; torch itself is not needed for it."""

    @sky.compute
    def forms_a_group() -> None:
        from skyward.plugins._ranks import Rendezvous

        Rendezvous("the torch group", sky.instance_info(), 1, 600, "timeout").meet()

    with sky.ComputePool(nodes=2, stall_timeout=1, console=False) as pool:
        with pytest.raises(sky.SkywardError, match=r"did not arrive within stall_timeout=1 s.*`call\(\) @ pool`"):
            forms_a_group() >> pool
        assert forms_a_group() @ pool == [None, None]
