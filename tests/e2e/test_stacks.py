"""Where bodies stand: from outside, while they run, sleep, or hold Python's lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

import skyward as sky
from skyward.api.stacks import Stack
from tests.support.waiting import until


@sky.compute
def hold_the_lock() -> int:
    return sum(range(10**12))


@sky.compute
def sleep_in_two_functions(seconds: float) -> int:
    return _inner(seconds)


def _inner(seconds: float) -> int:
    time.sleep(seconds)
    return 1


@sky.compute
def block_signals() -> None:
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(600)


def running(pool: sky.ComputePool, count: int) -> list[Stack]:
    """The bodies that run, once so many of them do and can be seen."""
    found: list[Stack] = []

    def seen() -> bool:
        found[:] = [stack for stack in pool.stacks() if stack.call is not None]
        return len(found) == count and all(stack.frames or stack.problem for stack in found)

    until(seen)
    return found


def test_a_body_in_c_code_and_a_body_that_sleeps_are_shown_with_their_lines() -> None:
    with sky.ComputePool(nodes=2, console=False) as pool:
        futures = [pool.submit(hold_the_lock()), pool.submit(sleep_in_two_functions(600))]
        stacks = {stack.name: stack for stack in running(pool, 2)}
        counting, sleeping = stacks["hold_the_lock"], stacks["sleep_in_two_functions"]
        assert [frame.function for frame in counting.frames] == ["hold_the_lock"]
        assert [frame.function for frame in sleeping.frames] == ["sleep_in_two_functions", "_inner"]
        assert sleeping.place is not None
        assert sleeping.place.file == __file__
        assert {stack.rank for stack in stacks.values()} == {0, 1}
        until(lambda: running(pool, 2)[0].cpu_seconds + running(pool, 2)[1].cpu_seconds > 0.1)
        text = str(pool.stacks())
        assert "in _inner" in text
        assert "s CPU (call " in text
        for future in futures:
            future.cancel()


def test_threads_of_one_process_are_told_apart() -> None:
    with sky.ComputePool(nodes=1, concurrency=3, console=False) as pool:
        futures = [pool.submit(sleep_in_two_functions(600)) for _ in range(3)]
        stacks = running(pool, 3)
        assert len({stack.call for stack in stacks}) == 3
        assert all(
            [frame.function for frame in stack.frames] == ["sleep_in_two_functions", "_inner"] for stack in stacks
        )
        for future in futures:
            future.cancel()


def test_an_idle_process_is_told_as_such_and_a_body_that_blocks_signals_too() -> None:
    with sky.ComputePool(nodes=1, console=False) as pool:
        assert [stack.state for stack in pool.stacks()] == ["idle"]
        future = pool.submit(block_signals())
        until(lambda: "blocks signal" in running(pool, 1)[0].problem)
        assert "no stack: " in str(pool.stacks())
        future.cancel()


def test_many_may_ask_at_the_same_time() -> None:
    with sky.ComputePool(nodes=2, console=False) as pool:
        future = pool.submit(sleep_in_two_functions(600))
        running(pool, 1)
        answers: list[int] = []
        threads = [threading.Thread(target=lambda: answers.append(len(pool.stacks()))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [2] * 4
        future.cancel()


def sky_stacks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyward", "stacks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_another_terminal_sees_where_bodies_stand_until_the_pool_is_closed() -> None:
    with sky.ComputePool(nodes=2, name="seen-elsewhere", console=False) as pool:
        future = pool.submit(sleep_in_two_functions(600))
        running(pool, 1)
        shown = sky_stacks("seen-elsewhere")
        assert shown.returncode == 0, shown.stderr
        assert f"pool seen-elsewhere, process {os.getpid()}" in shown.stdout
        assert "in _inner" in shown.stdout
        assert "): idle" in shown.stdout
        (record,) = map(json.loads, sky_stacks("seen-elsewhere", "--json").stdout.splitlines())
        assert (record["pool"], record["pid"]) == ("seen-elsewhere", os.getpid())
        assert sorted(stack["state"] for stack in record["stacks"]) == ["idle", "running"]
        frames = [frame["function"] for stack in record["stacks"] for frame in stack["frames"]]
        assert "_inner" in frames
        future.cancel()
    gone = sky_stacks("seen-elsewhere")
    assert gone.returncode == 1
    assert gone.stdout.startswith("no pool seen-elsewhere of yours is open on this computer. `sky ps` lists")


def test_a_closed_pool_has_no_stacks() -> None:
    pool = sky.ComputePool(nodes=1, console=False)
    with pytest.raises(sky.errors.PoolClosed):
        pool.stacks()


def test_a_time_limit_for_stalls_is_a_number_above_zero_or_none() -> None:
    with pytest.raises(sky.errors.InvalidArgument, match="stall_timeout"):
        sky.ComputePool(nodes=1, stall_timeout=0)
    sky.ComputePool(nodes=1, stall_timeout=None)
