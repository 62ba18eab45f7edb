"""Leaving the block: normally, it waits for calls that were submitted; by an exception or Ctrl-C, it stops them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import PoolClosed
from tests.support.waiting import until


@sky.compute
def write(path: Path, seconds: float = 0.0) -> str:
    time.sleep(seconds)
    path.touch()
    return path.name


@sky.compute
def wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.02)
    return path.name


@sky.compute
def numbers() -> Iterator[int]:
    yield from itertools.count()


class Told:
    """The notices of a pool, and how it counts its calls in the end."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self.notices: list[str] = []
        self.ended: sky.events.PoolClosed | None = None
        pool.on_event(self._hear)

    def _hear(self, event: sky.events.Event) -> None:
        if isinstance(event, sky.events.Notice):
            self.notices.append(event.text)
        if isinstance(event, sky.events.PoolClosed):
            self.ended = event

    @property
    def counts(self) -> tuple[int, int, int]:
        assert self.ended is not None
        return self.ended.calls, self.ended.failed, self.ended.stopped


def test_leaving_the_block_waits_for_calls_whose_futures_nobody_holds(tmp_path: Path) -> None:
    pool = sky.ComputePool(nodes=2, console=False)
    told = Told(pool)
    with pool:
        for index in range(6):
            pool.submit(write(tmp_path / str(index), 0.1))
        kept = pool.executor.submit(pow, 2, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "4", "5"]
    assert kept.result(0) == 32
    assert told.counts == (7, 0, 0)


def test_leaving_the_block_says_that_it_waits_if_that_takes_long(tmp_path: Path) -> None:
    pool = sky.ComputePool(console=False)
    told = Told(pool)
    pool.on_event(lambda event: (tmp_path / "go").touch() if "waiting for" in getattr(event, "text", "") else None)
    with pool:
        future = wait_for(tmp_path / "go") > pool
    assert future.result(0) == "go"
    assert told.notices == ["waiting for 1 call to end before the pool is closed; Ctrl-C stops it."]


def test_leaving_the_block_waits_for_what_callbacks_send(tmp_path: Path) -> None:
    with sky.ComputePool(console=False) as pool:
        first = write(tmp_path / "first", 0.1) > pool
        first.add_done_callback(lambda _: pool.submit(write(tmp_path / "second")))
    assert (tmp_path / "second").exists()


def test_leaving_the_block_waits_for_callbacks_as_long_as_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, passed = threading.Semaphore(0), itertools.count(1)
    pool = sky.ComputePool(console=False)
    callbacks = pool._user.callbacks

    def wait_for_one(count: int, seconds: float) -> None:
        """The time is up when one more of them has ended, as with many that take a while each."""
        goal = min(count, callbacks.finished + 1)
        gate.release()
        until(lambda: callbacks.finished >= goal)

    def act(_: object) -> None:
        gate.acquire()
        if next(passed) == 3:
            pool.submit(write(tmp_path / "last"))

    monkeypatch.setattr(callbacks, "wait", wait_for_one)
    try:
        with pool:
            for _ in range(3):
                pool.submit(wait_for(tmp_path / "go")).add_done_callback(act)
            (tmp_path / "go").touch()
        assert (tmp_path / "last").exists()
    finally:
        gate.release(3)


def test_an_exception_that_leaves_the_block_stops_its_calls_and_says_so(tmp_path: Path) -> None:
    pool = sky.ComputePool(console=False, grace=1)
    told, futures = Told(pool), list[object]()
    with pytest.raises(ZeroDivisionError), pool:
        futures = [wait_for(tmp_path / "never") > pool for _ in range(6)]
        raise ZeroDivisionError
    assert told.notices == ["6 calls were stopped: the block was left by an exception before they ended."]
    assert told.counts == (6, 0, 6)
    for future in futures:
        assert isinstance(future.exception(0), PoolClosed)  # type: ignore[attr-defined]


def test_a_stream_that_is_not_read_to_its_end_holds_neither_the_block_nor_other_calls(tmp_path: Path) -> None:
    pool = sky.ComputePool(console=False, grace=1)
    told = Told(pool)
    with pool:
        stream = numbers() >> pool
        assert next(stream) == 0
        pool.submit(write(tmp_path / "behind"))  # the stream has the only slot
        pool.submit(numbers())
    assert (tmp_path / "behind").exists()
    with pytest.raises(PoolClosed, match="the pool was closed before numbers was read to its end"):
        for _ in stream:
            pass
    assert told.notices == ["2 streams were stopped: the block was left before they ended."]
    assert told.counts[0] == 3


def test_generators_that_have_not_begun_when_the_block_is_left_never_begin(tmp_path: Path) -> None:
    @sky.compute
    def mark(index: int) -> Iterator[int]:
        (tmp_path / str(index)).touch()
        yield from itertools.count()

    pool = sky.ComputePool(console=False, grace=1)
    told = Told(pool)
    with pool:
        first = mark(0) >> pool
        assert next(first) == 0
        others = [mark(index) > pool for index in range(1, 6)]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert told.notices == ["6 streams were stopped: the block was left before they ended."]
    for other in others:
        with pytest.raises(PoolClosed, match=r"the pool was closed before .*mark was read to its end"):
            other.result(0)
    assert told.counts == (6, 0, 6)


def test_closing_the_pool_from_another_thread_ends_the_wait(tmp_path: Path) -> None:
    pool = sky.ComputePool(console=False, grace=1)
    told = Told(pool)

    def close() -> None:
        until(lambda: bool(told.notices))
        pool.close()

    closing = threading.Thread(target=close)
    with pool:
        future = wait_for(tmp_path / "never") > pool
        closing.start()
    assert isinstance(future.exception(0), PoolClosed)
    assert told.notices[1] == "1 call was stopped: the pool was closed before it ended."
    closing.join(60)


def test_a_node_that_is_lost_meanwhile_ends_the_wait(tmp_path: Path) -> None:
    @sky.compute
    def die(path: Path) -> None:
        while not path.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    pool = sky.ComputePool(console=False)
    pool.on_event(lambda event: (tmp_path / "go").touch() if "waiting for" in getattr(event, "text", "") else None)
    with pool:
        future = die(tmp_path / "go") > pool
    assert isinstance(future.exception(0), sky.errors.TaskCrashed)


def test_async_with_waits_too_and_cancelling_stops_the_calls(tmp_path: Path) -> None:
    async def main() -> None:
        async with sky.ComputePool(console=False) as pool:
            done = write(tmp_path / "done", 0.2) > pool
        assert done.result(0) == "done"

    async def cancelled() -> None:
        pool = sky.ComputePool(console=False, grace=1)
        told = Told(pool)

        async def use() -> None:
            async with pool:
                pool.submit(wait_for(tmp_path / "never"))

        task = asyncio.create_task(use())
        while not told.notices:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert told.counts == (1, 0, 1)

    asyncio.run(main())
    asyncio.run(cancelled())


def test_a_second_ctrl_c_before_the_calls_are_stopped_closes_the_pool_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    pool = sky.ComputePool(console=False).__enter__()
    monkeypatch.setattr(pool._engine, "unfinished", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert repr(pool).startswith(f"<ComputePool {pool.name} closed")


PROGRAM = """
import sys, time
import skyward as sky

@sky.compute
def wait():
    time.sleep(600)

with sky.ComputePool(nodes=2, console="plain", grace=1, history=False) as pool:
    for _ in range(4):
        pool.submit(wait())
"""


def test_ctrl_c_while_the_block_waits_stops_the_calls_and_the_last_line_counts_them(
    script: Callable[..., subprocess.Popen[str]],
) -> None:
    program = script(PROGRAM)
    assert program.stderr is not None
    lines: list[str] = []
    for line in program.stderr:
        lines.append(line.strip())
        if "waiting for 4 calls" in line:
            program.send_signal(signal.SIGINT)
    program.wait(60)
    assert "skyward: warning: 4 calls were stopped: the block was left by Ctrl-C before they ended." in lines
    assert [line for line in lines if "pool closed: 4 calls (0 done, 0 failed, 4 stopped), 2 nodes" in line]
    assert lines[-1] == "KeyboardInterrupt"
