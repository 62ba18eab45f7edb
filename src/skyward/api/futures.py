"""Futures and streams for asyncio: waits without a thread, and slow reads in one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import asyncio

__all__ = ["AsyncItems", "AwaitableFuture", "LocalItems", "Source", "Stream", "Untyped"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_END = object()


class AwaitableFuture(Future[T]):
    """A `concurrent.futures.Future` that can be awaited; cancelling the awaiting task cancels it."""

    unasked = False
    """Whether its failure is reported when it is dropped."""

    def __await__(self) -> Generator[Any, None, T]:
        return _awaited(self).__await__()

    if not TYPE_CHECKING:  # for type checkers there is no such name

        def __getattr__(self, name: str) -> Any:
            words = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in ("get", "value", "ready", "join"):
                raise AttributeError(
                    f"{words}: what a call returns is `future.result()`, whether it has ended `.done()`."
                )
            hint = "" if name.startswith("_") else f". If the result has it: `future.result().{name}`."
            raise AttributeError(words + hint)

        def __aiter__(self) -> NoReturn:
            raise TypeError(
                "`call > pool` is a future. Items of a generator: `async for item in call >> pool`; the result: "
                "`await (call > pool)`."
            )

        def __getitem__(self, _: object) -> NoReturn:  # also what `for item in future` asks
            raise TypeError(
                "`call > pool` is a future. Its result is `future.result()`; items of a generator: "
                "`for item in call >> pool`."
            )

    @property
    def is_light(self) -> bool:
        return False


class Untyped:
    """For type checkers: only what has no annotation fits."""


class Stream(Protocol[T_co]):
    """What a generator or `gather(..., stream=True)` gives: read with `for` or `async for`, once; `close()` ends it."""

    def __iter__(self) -> Iterator[T_co]: ...
    def __next__(self) -> T_co: ...
    def __aiter__(self) -> AsyncIterator[T_co]: ...
    def close(self) -> None:
        """Ends the calls behind it and drops what was not read."""
        ...


class Source(Protocol[T_co]):
    def poll(self, wake: Callable[[], None]) -> tuple[Callable[[], T_co], bool] | None:
        """What gives the next item or raises, and whether it takes no time worth a thread. None if there is none yet:
        then `wake` is called once, from any thread, when there may be one.
        """
        ...

    def forget(self, wake: Callable[[], None]) -> None: ...


class AsyncItems(AsyncIterator[T]):
    """For `async for`. A cancelled wait loses no item; a dropped stream is closed."""

    def __init__(self, stream: Stream[T], source: Source[T]) -> None:
        self._stream, self._source = stream, source
        self._taken: list[asyncio.Future[T]] = []  # items that were being read when their reader was cancelled

    async def __anext__(self) -> T:
        import asyncio

        reading: asyncio.Future[T] | None = None
        try:
            await asyncio.sleep(0)  # where items come quickly, the loop does other things as well
            if self._taken:
                reading = self._taken.pop(0)
            else:
                read, is_light = await _arrival(self._source)
                if is_light:
                    return _given(_item_or_end(read))
                reading = asyncio.get_running_loop().run_in_executor(None, _item_or_end, read)
            await asyncio.wait([reading])  # unlike the future itself, this is cancelled without it
        except asyncio.CancelledError:
            if reading is not None:
                self._taken.append(reading)
            del self  # the traceback must not keep a stream open that its reader has dropped
            raise
        return _given(reading.result())

    async def aclose(self) -> None:
        import asyncio

        await asyncio.to_thread(self._stream.close)


class LocalItems(Iterator[T]):
    """Of an async generator in this process, for `for` or `async for`."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._runner: asyncio.Runner | None = None

    def __aiter__(self) -> AsyncIterator[T]:
        return self._items

    def __next__(self) -> T:
        import asyncio

        if self._runner is None:
            self._runner = asyncio.Runner()
        try:
            item = self._runner.run(self._next_or_end())
        except BaseException:
            self.close()
            raise
        if item is _END:
            self.close()
            raise StopIteration
        return item

    async def _next_or_end(self) -> T:
        return await anext(self._items, cast(Any, _END))

    async def _end(self) -> None:
        await self._items.aclose()

    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            with runner:
                runner.run(self._end())

    def __del__(self) -> None:
        self.close()


async def _arrival(source: Source[T]) -> tuple[Callable[[], T], bool]:
    import asyncio

    loop = asyncio.get_running_loop()
    while True:
        arrived: asyncio.Future[None] = loop.create_future()
        wake = partial(_wake, loop, arrived)
        found = source.poll(wake)
        if found is not None:
            return found
        try:
            await arrived
        finally:
            source.forget(wake)


def _item_or_end(read: Callable[[], T]) -> T:
    try:
        return read()
    except StopIteration:  # which no future can hold
        return cast(Any, _END)


def _given(item: T) -> T:
    if item is _END:
        raise StopAsyncIteration
    return item


async def _awaited(future: AwaitableFuture[T]) -> T:
    import asyncio  # takes a while to load, and most programs never need it

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def wake(_: Future[T]) -> None:
        _wake(loop, ended)

    Future.add_done_callback(future, wake)  # in the thread that settles it: `wake` neither blocks nor raises
    try:
        await ended
    except asyncio.CancelledError:
        future.cancel()
        raise
    if future.cancelled():
        raise asyncio.CancelledError
    return future.result() if future.is_light else await asyncio.to_thread(future.result)


def _wake(loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_settle, waiting)
    except RuntimeError:
        pass  # the loop is closed: nobody waits any more


def _settle(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
