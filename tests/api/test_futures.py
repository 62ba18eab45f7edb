"""Streams in asyncio: waiting takes no thread, and a reader that is cancelled loses nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from skyward.api.futures import _wake
from skyward.client.gather import streamed
from skyward.transport.streams import Consumer, Stream
from tests.support.waiting import until


def consumer(
    load: Callable[[Any], Any] = lambda item: item, is_light: bool = True, close: Callable[[], None] = lambda: None
) -> Consumer:
    return Consumer(lambda _: None, close, load, is_light=lambda _: is_light)


def fed(*items: Any) -> list[tuple[Any, int]]:
    return [(item, 1) for item in items]


async def read_all(stream: Any) -> list[Any]:
    return [item async for item in stream]


async def waiting(source: Any, count: int = 1) -> None:
    """Waits until so many readers wait for an item."""
    while len(source._wakes) != count:
        await asyncio.sleep(0)


def run(program: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(program, 60)

    return asyncio.run(limited())


@pytest.mark.parametrize("is_light", [True, False])
def test_readers_that_wait_take_no_thread(is_light: bool) -> None:
    sources = [consumer(is_light=is_light) for _ in range(40)]  # more than asyncio has threads

    async def program() -> None:
        before = threading.active_count()
        readers = [asyncio.ensure_future(read_all(Stream[int](source))) for source in sources]
        for source in sources:
            await waiting(source)
        assert threading.active_count() <= before
        assert await asyncio.to_thread(lambda: "free") == "free"
        for number, source in enumerate(sources):
            source.feed(fed(number))
            source.end()
        assert await asyncio.gather(*readers) == [[number] for number in range(40)]

    run(program())


@pytest.mark.parametrize("ordered", [True, False], ids=["in-order", "as-they-come"])
def test_results_of_a_group_are_waited_for_without_a_thread(ordered: bool) -> None:
    groups: list[list[Future[int]]] = [[Future(), Future()] for _ in range(40)]

    async def program() -> None:
        streams: list[Any] = [streamed(futures, ordered) for futures in groups]
        readers = [asyncio.ensure_future(read_all(stream)) for stream in streams]
        for stream in streams:
            await waiting(stream)
        assert await asyncio.to_thread(lambda: "free") == "free"
        for first, second in groups:
            second.set_result(2)
            first.set_result(1)
        expected = [1, 2] if ordered else [2, 1]
        assert await asyncio.gather(*readers) == [expected] * 40

    run(program())


def test_a_failure_of_a_stream_is_raised_where_it_is_read() -> None:
    async def program() -> None:
        source = consumer()
        source.feed(fed("a"))
        source.end(ValueError("broken"))
        items = aiter(Stream[str](source))
        assert await anext(items) == "a"
        with pytest.raises(ValueError, match="broken"):
            await anext(items)
        with pytest.raises(StopAsyncIteration):
            await anext(items)

        futures: Sequence[Future[int]] = [Future(), Future()]
        results = aiter(streamed(futures, True))
        futures[0].set_exception(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await anext(results)
        assert futures[1].cancelled()
        with pytest.raises(StopAsyncIteration):
            await anext(results)

    run(program())


def test_a_reader_that_is_cancelled_while_it_waits_loses_nothing() -> None:
    """As `asyncio.wait_for(anext(items), seconds)` does, to say now and then that it is still there."""

    async def program() -> None:
        source = consumer()
        items = aiter(Stream[str](source))
        for _ in range(10):
            reader = asyncio.ensure_future(anext(items))
            await waiting(source)
            reader.cancel()
            await asyncio.wait([reader])
            assert reader.cancelled()
        assert not source._wakes, "nothing is kept for a reader that is gone"
        source.feed(fed("a", "b"))
        source.end()
        assert await read_all(items) == ["a", "b"]

    run(program())


def test_a_reader_that_is_cancelled_while_an_item_is_rebuilt_gets_it_the_next_time() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def load(item: str) -> str:
        begun.set()
        assert go_on.wait(60)
        return item

    async def program() -> None:
        source = consumer(load, is_light=False)
        source.feed(fed("a", "b"))
        source.end()
        items = aiter(Stream[str](source))
        task = asyncio.ensure_future(anext(items))  # type: ignore[arg-type]
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert await read_all(items) == ["a", "b"]

    run(program())


def test_a_stream_whose_reader_was_cancelled_is_closed_when_it_is_dropped() -> None:
    """Also while somebody has the cancelled task, and with it the traceback."""
    closed = threading.Event()
    source = consumer(close=closed.set)

    async def program() -> asyncio.Task[Any]:
        async def read() -> None:
            async for _ in Stream[int](source):
                pass

        task = asyncio.ensure_future(read())
        await waiting(source)
        task.cancel()
        await asyncio.wait([task])
        return task

    task = asyncio.run(program())
    assert closed.wait(60)
    assert task.cancelled()


def test_items_that_come_when_the_loop_is_closed_are_there_for_the_next_reader() -> None:
    source = consumer()
    loop = asyncio.new_event_loop()
    source.poll(partial(_wake, loop, loop.create_future()))  # as a reader does that then waits
    loop.close()
    source.feed(fed("a"))
    source.end()
    assert run(read_all(Stream[str](source))) == ["a"]


def test_loops_of_several_threads_share_a_stream() -> None:
    source = consumer()
    stream = Stream[int](source)
    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(run, read_all(stream)) for _ in range(2)]
        until(lambda: len(source._wakes) == 2)
        for number in range(200):
            source.feed(fed(number))
        source.end()
        found = [reader.result(60) for reader in readers]
    assert sorted(found[0] + found[1]) == list(range(200))


def test_a_stream_that_has_many_items_leaves_the_loop_its_turn() -> None:
    async def program() -> int:
        source = consumer()
        source.feed(fed(*range(200)))
        source.end()
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(take_turns())
        assert await read_all(Stream[int](source)) == list(range(200))
        other.cancel()
        return turns

    assert run(program()) > 100
