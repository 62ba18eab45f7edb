"""Pools in asyncio programs: futures are awaited, pools opened and closed, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import skyward as sky
from tests.support.waiting import until


@sky.compute
def double(n: int) -> int:
    return 2 * n


@sky.compute
def fail() -> None:
    raise LookupError("not there")


@sky.compute
def wait_long() -> None:
    time.sleep(120)


@sky.compute
def count(n: int) -> Iterator[int]:
    yield from range(n)


class SlowToLoad:
    """Takes a while to unpickle."""

    def __reduce__(self) -> Any:
        return time.sleep, (1.0,)


@sky.compute
def slow_result() -> Any:
    return SlowToLoad()


def test_futures_are_awaited(pool: sky.ComputePool) -> None:
    async def program() -> None:
        assert await (double(2) > pool) == 4
        assert await asyncio.gather(*((double(n) > pool) for n in range(20))) == [2 * n for n in range(20)]
        assert await (sky.gather(double(1), double(2)) > pool) == (2, 4)
        assert (await (sky.compute(np.ones)(500_000) > pool)).sum() == 500_000
        future = double(5) > pool
        assert (await future, await future) == (10, 10)
        with pytest.raises(LookupError, match="not there"):
            await (fail() > pool)

    asyncio.run(program())


def test_cancelling_a_task_stops_the_body(pool: sky.ComputePool) -> None:
    async def program() -> None:
        future = wait_long() > pool
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await future
        assert future.cancelled()
        assert await (double(1) > pool) == 2

    asyncio.run(program())


def test_a_cancelled_future_cancels_whoever_awaits_it(pool: sky.ComputePool) -> None:
    async def program() -> None:
        future = wait_long() > pool
        asyncio.get_running_loop().call_later(0.2, future.cancel)
        with pytest.raises(asyncio.CancelledError):
            await future

    asyncio.run(program())


def test_the_loop_goes_on_while_a_result_is_read(pool: sky.ComputePool) -> None:
    async def program() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        future = slow_result() > pool
        await asyncio.to_thread(future.wait)
        before = ticks
        assert await future is None
        ticking.cancel()
        return ticks - before

    assert asyncio.run(program()) > 10


def test_streams_are_read_with_async_for(pool: sky.ComputePool) -> None:
    async def program() -> None:
        stream: Any = await (count(5) > pool)
        assert [item async for item in stream] == [0, 1, 2, 3, 4]
        results: Any = sky.gather(*(double(n) for n in range(5)), stream=True) >> pool
        assert [item async for item in results] == [0, 2, 4, 6, 8]

    asyncio.run(program())


def test_idle_streams_hold_up_nothing_else() -> None:
    """There are more of them than asyncio has threads for."""

    @sky.compute
    def idle() -> Iterator[int]:
        yield 0
        time.sleep(600)

    @sky.compute
    def large() -> str:
        return "x" * 100_000  # read in a thread

    async def program(pool: sky.ComputePool) -> None:
        begun = 0

        async def read() -> None:
            nonlocal begun
            stream: Any = await (idle() > pool)
            async for _ in stream:
                begun += 1

        readers = [asyncio.ensure_future(read()) for _ in range(40)]
        async with asyncio.timeout(60):
            while begun < 40:
                await asyncio.sleep(0.01)
            assert len(await (large() > pool)) == 100_000
            assert await asyncio.to_thread(lambda: "free") == "free"
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        assert all(reader.cancelled() for reader in readers)

    with sky.ComputePool(console=False, concurrency=41) as pool:
        asyncio.run(program(pool))


def test_a_pool_is_opened_and_closed_beside_the_loop() -> None:
    async def program() -> tuple[int, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        async with sky.ComputePool(console=False) as pool:
            opened = ticks
            assert await (double(3) > pool) == 6
            assert pool.is_active
        ticking.cancel()
        assert not pool.is_active
        return opened, ticks

    opened, closed = asyncio.run(program())
    assert opened > 5
    assert closed > opened


def test_a_task_that_is_cancelled_while_its_pool_opens_leaves_nothing() -> None:
    pool = sky.ComputePool(console=False)

    async def program() -> None:
        async with pool:
            await asyncio.sleep(60)

    async def cancelled() -> None:
        task = asyncio.ensure_future(program())
        while pool._state.now == "new":
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    until(lambda: not pool.is_active)


def test_a_call_that_was_not_sent_says_so(pool: sky.ComputePool) -> None:
    async def program() -> None:
        await double(1)  # type: ignore[misc]

    with pytest.raises(TypeError, match=r"await \(double\(\.\.\.\) > pool\)"):
        asyncio.run(program())
