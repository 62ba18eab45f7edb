"""Bodies, runners, agents and the rest of a pool that die: one verdict for every call, and the pool goes on."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import psutil
import pytest

import skyward as sky
from tests.support.processes import gone, seen
from tests.support.waiting import until


@sky.compute
def echo(x: int) -> int:
    return x


@sky.compute
def my_pid() -> int:
    return os.getpid()


@sky.compute
def nap(seconds: float, value: int) -> int:
    time.sleep(seconds)
    return value


def started(path: Path) -> None:
    """Leaves a mark; each line counts one start of a body."""
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")


def starts(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def segfault() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def bus_error() -> None:
    os.kill(os.getpid(), signal.SIGBUS)
    time.sleep(30)


@sky.compute
def die(mark: Path, how: Callable[[], None]) -> None:
    started(mark)
    print("last words", file=sys.stderr, flush=True)
    how()


@sky.compute
def report_and_die(steps: int) -> None:
    print("first words", file=sys.stderr)
    logging.getLogger("training").warning("the loss rises")
    warnings.warn("a rate that is high", stacklevel=1)
    for step in range(steps):
        sky.progress(step + 1, steps, loss=1.0)
        time.sleep(0.15 if step == 1 else 0.0)
    print("last words", file=sys.stderr)
    os._exit(3)


def agents(pool: sky.ComputePool) -> list[int]:
    return [about["pid"] for about in pool._engine.greetings()]


def keeper(pool: sky.ComputePool) -> psutil.Process:
    return psutil.Process(pool._fleet.by_node[0].keeper.pid)


def fork_server(pool: sky.ComputePool) -> psutil.Process:
    return next(p for p, name in seen(keeper(pool).children(), lambda p: p.name()) if name == "skyward-forks")


def dask_processes(pool: sky.ComputePool) -> list[psutil.Process]:
    """Scheduler and workers."""
    children = seen(keeper(pool).children(), lambda p: p.cmdline())
    return [p for p, argv in children if "skyward.node.dask_worker" in argv]


@pytest.fixture
def duo() -> Iterator[sky.ComputePool]:
    """A pool of two nodes for one test alone."""
    with sky.ComputePool(nodes=2, console=False) as opened:
        yield opened


@pytest.mark.parametrize(
    ("how", "name"), [(segfault, "SIGSEGV"), (abort, "SIGABRT"), (bus_error, "SIGBUS")], ids=["segv", "abrt", "bus"]
)
def test_a_body_that_kills_its_process_is_told_as_a_crash_and_not_run_again(
    pool: sky.ComputePool, tmp_path: Path, how: Callable[[], None], name: str
) -> None:
    """Row 1: signal, exit code, node, attempt, last stderr; executed once; the slot is usable again in 3 s."""
    mark = tmp_path / "mark"
    began = time.monotonic()
    with pytest.raises(sky.errors.TaskCrashed) as caught:
        die(mark, how) >> pool
    assert time.monotonic() - began < 45
    error = caught.value
    assert (error.signal, error.exit_code, error.attempt) == (name, -getattr(signal, name), 0)
    assert error.node in (0, 1)
    assert "last words" in error.stderr
    assert name in str(error)
    assert "last words" in str(error)
    frames = [line for line in error.stderr.splitlines() if line.startswith("  File ")]
    assert f" in {how.__name__}" in error.stderr
    assert frames[-1].endswith(" in die"), "frames of the runner around the body say nothing to the user"
    again = [echo(i) > pool for i in range(4)]
    assert [f.result(45) for f in again] == [0, 1, 2, 3]
    assert len(starts(mark)) == 1


def test_bystanders_do_not_notice_a_crash(tmp_path: Path) -> None:
    """Row 1: 0 of 20 bystanders fail."""
    worker = sky.Worker(concurrency=4, executor="process")
    with sky.ComputePool(nodes=2, worker=worker, console=False) as pool:
        bystanders = [nap(0.3, i) > pool for i in range(20)]
        crash = die(tmp_path / "mark", segfault) > pool
        with pytest.raises(sky.errors.TaskCrashed):
            crash.result(45)
        assert [f.result(45) for f in bystanders] == list(range(20))
    assert len(starts(tmp_path / "mark")) == 1


def test_calls_that_share_a_process_with_a_crash_fail_once_and_say_so(tmp_path: Path) -> None:
    """Row 1, threads: nothing tells which call did it, so all that had begun fail, none is run twice."""

    @sky.compute
    def neighbour(mark: Path) -> None:
        started(mark)
        time.sleep(30)

    with sky.ComputePool(concurrency=3, console=False) as pool:
        marks = [tmp_path / f"n{i}" for i in range(2)]
        neighbours = [neighbour(m) > pool for m in marks]
        while not all(m.exists() for m in marks):
            time.sleep(0.02)
        crash = die(tmp_path / "mark", segfault) > pool
        with pytest.raises(sky.errors.TaskCrashed, match="other calls ran in that process"):
            crash.result(45)
        for future in neighbours:
            with pytest.raises(sky.errors.TaskCrashed):
                future.result(45)
        assert [echo(i) >> pool for i in range(6)] == list(range(6))
    assert [len(starts(m)) for m in marks] == [1, 1]


def test_calls_queued_behind_a_crash_run_once(tmp_path: Path) -> None:
    """Row 1: what had not begun is not a victim."""

    @sky.compute
    def quick(mark: Path, i: int) -> int:
        with mark.open("a") as file:
            file.write(f"{i}\n")
        return i

    with sky.ComputePool(console=False) as pool:
        warm = [quick(tmp_path / "warm", i) > pool for i in range(200)]  # short calls: some are sent ahead
        wait(warm)
        crash = die(tmp_path / "mark", segfault) > pool
        behind = [quick(tmp_path / "behind", i) > pool for i in range(300)]
        with pytest.raises(sky.errors.TaskCrashed):
            crash.result(45)
        assert [f.result(45) for f in behind] == list(range(300))
    assert sorted(starts(tmp_path / "behind")) == list(range(300))
    assert len(starts(tmp_path / "mark")) == 1


def test_retries_do_not_apply_to_a_crash(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Contract: `retries` counts infrastructure loss only."""
    mark = tmp_path / "mark"
    with pytest.raises(sky.errors.TaskCrashed):
        sky.compute(retries=5)(die.fn)(mark, abort) >> pool
    assert len(starts(mark)) == 1


class Leave(SystemExit):
    pass


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (lambda: sys.exit(3), 3),
        (lambda: sys.exit(), 0),
        (lambda: sys.exit("no good"), 1),
        (lambda: sys.exit(True), 1),
        (lambda: sys.exit(-1), 255),
        (lambda: sys.exit(2**31 + 5), 5),
        (lambda: sys.exit(10**5000), 0),
        (lambda: os._exit(7), 7),
        (lambda: os._exit(0), 0),
    ],
    ids=["exit3", "exit", "exit-text", "exit-true", "exit-negative", "exit-large", "exit-huge", "_exit7", "_exit0"],
)
def test_a_body_that_exits_is_told_as_a_crash_with_its_status(
    pool: sky.ComputePool, tmp_path: Path, how: Callable[[], None], code: int
) -> None:
    """Row 2."""
    mark = tmp_path / "mark"
    with pytest.raises(sky.errors.TaskCrashed) as caught:
        die(mark, how) >> pool
    assert caught.value.exit_code == code
    assert caught.value.signal is None
    assert "last words" in caught.value.stderr
    assert len(starts(mark)) == 1
    assert echo(1) >> pool == 1


def test_a_subclass_of_system_exit_is_an_exit_too(pool: sky.ComputePool) -> None:
    """Row 2."""

    @sky.compute
    def leave() -> None:
        raise Leave(9)

    with pytest.raises(sky.errors.TaskCrashed) as caught:
        leave() >> pool
    assert caught.value.exit_code == 9
    assert echo(1) >> pool == 1


def test_a_keyboard_interrupt_of_the_body_comes_home_as_itself(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Row 2."""

    @sky.compute
    def interrupt(mark: Path) -> None:
        started(mark)
        raise KeyboardInterrupt("mine")

    with pytest.raises(KeyboardInterrupt, match="mine"):
        interrupt(tmp_path / "mark") >> pool
    assert len(starts(tmp_path / "mark")) == 1
    assert echo(1) >> pool == 1


OUT_OF_MEMORY = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
import skyward as sky

PATH = sys.argv[2]

@sky.compute
def greedy():
    with open(PATH, "a") as mark:
        mark.write("x")
    held = []
    while True:
        held.append(bytearray(16 << 20))

@sky.compute
def killed():
    os.kill(os.getpid(), 9)

@sky.compute
def echo(x):
    return x

with sky.ComputePool(nodes=2, console=False) as pool:
    for body in (greedy, killed):
        try:
            body() >> pool
        except sky.errors.TaskCrashed as exc:
            print(type(exc).__name__, exc.signal, exc.node in (0, 1))
        print([echo(i) >> pool for i in range(4)])
"""


def test_out_of_memory_is_told_from_a_plain_kill(script: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """Row 3: the kernel's oom_kill counter decides; everything of ours survives."""
    group = Path(f"/sys/fs/cgroup/memory/skyward-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(400 << 20))
    except OSError as exc:
        pytest.skip(f"no memory control group can be made here: {exc}")
    mark = tmp_path / "mark"
    try:
        program = script(OUT_OF_MEMORY, str(group), str(mark))
        out, err = program.communicate(timeout=120)
        lines = out.splitlines()
        assert lines == ["TaskOutOfMemory SIGKILL True", "[0, 1, 2, 3]", "TaskCrashed SIGKILL True", "[0, 1, 2, 3]"], (
            err
        )
        assert mark.read_text() == "x"
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().split())
        group.rmdir()


def test_a_runner_killed_from_outside_is_a_crash(duo: sky.ComputePool, tmp_path: Path) -> None:
    """Rows 1 and 5: nothing tells it from a body that killed itself; the call is not run again."""
    mark = tmp_path / "mark"

    @sky.compute
    def wait_to_die(mark: Path) -> None:
        started(mark)
        time.sleep(60)

    future = wait_to_die(mark) > duo
    until(lambda: starts(mark))
    os.kill(starts(mark)[0], signal.SIGKILL)
    with pytest.raises(sky.errors.TaskCrashed) as caught:
        future.result(45)
    assert caught.value.signal == "SIGKILL"
    assert not isinstance(caught.value, sky.errors.TaskOutOfMemory)
    assert echo(3) >> duo == 3
    assert len(starts(mark)) == 1


def test_an_idle_runner_that_is_killed_is_replaced(duo: sky.ComputePool) -> None:
    """Row 5."""
    before = set(my_pid() @ duo)
    for pid in before:
        os.kill(pid, signal.SIGKILL)

    def replaced() -> bool:
        try:
            return not before & set(my_pid() @ duo)
        except sky.errors.TaskCrashed:  # it was sent before the agent could know
            return False

    until(replaced)
    assert [echo(i) >> duo for i in range(4)] == [0, 1, 2, 3]


def test_a_call_is_run_again_when_its_agent_is_lost(duo: sky.ComputePool, tmp_path: Path) -> None:
    """Row 5: infrastructure loss, within retries; the first attempt's process is gone."""
    mark = tmp_path / "mark"

    @sky.compute
    def survivor(mark: Path) -> tuple[str, int]:
        info = sky.instance_info()
        assert info is not None
        started(mark)
        if info.attempt == 0:
            time.sleep(60)
        return info.task_id or "", info.attempt

    future = survivor(mark) > duo
    until(lambda: starts(mark))
    first = starts(mark)[0]
    for pid in agents(duo):
        os.kill(pid, signal.SIGKILL)
    call, attempt = future.result(45)
    assert (bool(call), attempt) == (True, 1)
    assert len(starts(mark)) == 2
    until(lambda: gone(first))


def test_without_retries_a_lost_agent_is_node_lost(duo: sky.ComputePool, tmp_path: Path) -> None:
    """Row 5 and contract: retries=0 is at most once; the node is back within seconds."""
    mark = tmp_path / "mark"

    @sky.compute(retries=0)
    def once(mark: Path) -> None:
        started(mark)
        time.sleep(60)

    future = once(mark) > duo
    until(lambda: starts(mark))
    for pid in agents(duo):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(sky.errors.NodeLost) as caught:
        future.result(45)
    assert caught.value.attempts == 1
    assert caught.value.node in (0, 1)
    assert "once" in str(caught.value)
    until(lambda: duo.current_nodes() == 2)
    assert len(my_pid() @ duo) == 2
    assert len(starts(mark)) == 1


def test_many_calls_survive_agents_that_are_killed_again_and_again(duo: sky.ComputePool) -> None:
    """Row 5, N18, N19: every call ends once, with its own result."""
    results = [nap(0.02, i) > duo for i in range(150)]
    for round_ in range(3):
        until(lambda enough=20 * (round_ + 1): sum(f.done() for f in results) > enough)
        os.kill(agents(duo)[round_ % 2], signal.SIGKILL)
    assert [f.result(45) for f in results] == list(range(150))


def test_a_broadcast_on_a_lost_agent_fails_naming_the_rank(duo: sky.ComputePool, tmp_path: Path) -> None:
    """Rows 5, 15: a broadcast fails as one, the next one works."""

    @sky.compute
    def long(directory: Path) -> None:
        info = sky.instance_info()
        assert info is not None
        started(directory / f"rank{info.node}")
        time.sleep(60)

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(lambda: long(tmp_path) @ duo)
        until(lambda: starts(tmp_path / "rank0") and starts(tmp_path / "rank1"))
        os.kill(agents(duo)[1], signal.SIGKILL)
        with pytest.raises(sky.errors.NodeLost) as caught:
            future.result(45)
    assert caught.value.node == 1
    assert "rank 1 of 2" in "".join(caught.value.__notes__)
    until(lambda: gone(starts(tmp_path / "rank0")[0]) or my_pid() @ duo)
    assert len(set(my_pid() @ duo)) == 2
    assert [len(starts(tmp_path / f"rank{i}")) for i in range(2)] == [1, 1]


def test_the_pool_goes_on_when_the_nursery_is_killed(duo: sky.ComputePool, tmp_path: Path) -> None:
    """Row 5: runners come from a new one; a running call is run again."""
    mark = tmp_path / "mark"

    @sky.compute
    def survivor(mark: Path) -> int:
        info = sky.instance_info()
        assert info is not None
        started(mark)
        if info.attempt == 0:
            time.sleep(60)
        return info.attempt

    future = survivor(mark) > duo
    until(lambda: starts(mark))
    first = starts(mark)[0]
    fork_server(duo).kill()
    assert future.result(45) == 1
    until(lambda: gone(first))
    assert len(set(my_pid() @ duo)) == 2


def test_dask_runs_in_processes_of_its_own_and_may_die_there(duo: sky.ComputePool) -> None:
    """Row 19: losing dask costs dask work only. It is not there before it is asked for, and ends with the keeper."""
    pytest.importorskip("distributed")
    assert dask_processes(duo) == []
    ours = {*agents(duo), fork_server(duo).pid, *(my_pid() @ duo)}
    with duo.dask() as client:
        workers = set(client.run(os.getpid).values())
        assert len(workers) == 2
        assert not workers & ours
        assert len(dask_processes(duo)) == 3
        for pid in workers:
            os.kill(pid, signal.SIGKILL)

        def members() -> set[int]:
            return set(client.run(os.getpid, on_error="ignore").values()) - workers

        until(lambda: len(members()) == 2)
        next(p for p in dask_processes(duo) if p.pid not in members()).kill()  # the scheduler
    assert [echo(i) >> duo for i in range(20)] == list(range(20))
    until(lambda: duo._fleet.by_node[0].keeper.scheduler is None)
    with duo.dask() as client:
        assert client.submit(pow, 2, 10).result(timeout=45) == 1024
        assert set(map(str, (w["name"] for w in client.scheduler_info(n_workers=-1)["workers"].values()))) == {
            "node-0",
            "node-1",
        }
    processes = dask_processes(duo)
    assert len(processes) == 3
    keeper(duo).kill()
    until(lambda: all(gone(process.pid) for process in processes))


def test_every_call_gets_a_verdict_when_the_keeper_is_killed(tmp_path: Path) -> None:
    """Row 19, N18: running, queued and later calls all end; nothing hangs."""
    with sky.ComputePool(nodes=2, console=False) as pool:
        calls = [nap(60, i) > pool for i in range(6)]
        until(lambda: sum(f.running() for f in calls) >= 2)
        keeper(pool).kill()
        for future in calls:
            with pytest.raises(sky.errors.NodeLost):
                future.result(45)
        with pytest.raises(sky.errors.NodeLost):
            (echo(1) > pool).result(45)
        with pytest.raises(sky.errors.NodeLost):
            echo(1) @ pool


def test_a_killed_keeper_is_not_waited_for() -> None:
    """Row 19, N2: its end is known here, and nobody starts it again."""
    with sky.ComputePool(nodes=2, console=False) as pool:
        notices: list[str] = []
        pool.on_event(lambda event: notices.append(event.text) if isinstance(event, sky.events.Notice) else None)
        call = nap(60, 1).with_retries(0) > pool
        until(call.running)
        keeper(pool).kill()
        with pytest.raises(sky.errors.NodeLost, match="first process on this computer was killed by signal 9"):
            call.result(45)
        until(lambda: any("was killed by signal 9" in text for text in notices))


def test_a_crash_in_a_broadcast_names_the_rank_and_stops_the_others(duo: sky.ComputePool, tmp_path: Path) -> None:
    """Row 16, here: first failing rank named, the others stopped, the pool goes on."""

    @sky.compute
    def gang(directory: Path, culprit: int) -> None:
        info = sky.instance_info()
        assert info is not None
        started(directory / f"rank{info.node}")
        while not (directory / f"rank{1 - info.node}").exists():
            time.sleep(0.01)
        if info.node == culprit:
            ctypes.string_at(0)
        time.sleep(60)

    for culprit in (0, 1):
        directory = tmp_path / str(culprit)
        directory.mkdir()
        began = time.monotonic()
        with pytest.raises(sky.errors.TaskCrashed) as caught:
            gang(directory, culprit) @ duo
        assert time.monotonic() - began < 45
        assert caught.value.node == culprit
        note = "".join(caught.value.__notes__)
        assert re.search(rf"rank {culprit} of 2.*first", note), note
        assert [len(starts(directory / f"rank{i}")) for i in range(2)] == [1, 1]
        other = starts(directory / f"rank{1 - culprit}")[0]
        assert len(set(my_pid() @ duo)) == 2
        assert other not in my_pid() @ duo
        assert gone(other)


def test_a_body_whose_environment_cannot_be_made_fails_and_the_pool_goes_on(pool: sky.ComputePool) -> None:
    """Row 9: an argument that cannot be rebuilt on the node is an error of that call."""

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return int, ("not a number",)

    with pytest.raises(ValueError, match="not a number"):
        echo(Bomb()) >> pool  # type: ignore[arg-type]
    assert echo(1) >> pool == 1


@pytest.mark.filterwarnings("always")
def test_a_crash_shows_what_the_body_said_in_words_and_no_reports_of_progress(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.errors.TaskCrashed) as caught:
        report_and_die(5) >> pool
    first, record, warning, *rest = caught.value.stderr.splitlines()
    assert (first, record) == ("first words", "WARNING training: the loss rises")
    assert warning.endswith(": UserWarning: a rate that is high")
    assert rest == ["last words"]
