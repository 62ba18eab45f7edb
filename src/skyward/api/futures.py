"""Futures and streams for asyncio: waits without a thread, and reads what takes time in a thread of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import asyncio

__all__ = ["AsyncItems", "AwaitableFuture", "Stream", "Untyped"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_END = object()


class AwaitableFuture(Future[T]):
    """A `concurrent.futures.Future` that can also be awaited; cancelling whoever awaits it cancels it."""

    unasked = False
    """Whether a failure is to be told when the future is dropped, since nobody has asked for its result."""

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
        """Whether `result` of a future that has ended takes no time worth a thread."""
        return False


class Untyped:
    """No type that a function returns: for type checkers, only what has no annotation passes for it."""


class Stream(Protocol[T_co]):
    """What a generator or `gather(..., stream=True)` gives: read with `for` or `async for`, once; `close()` ends it."""

    def __iter__(self) -> Iterator[T_co]: ...
    def __next__(self) -> T_co: ...
    def __aiter__(self) -> AsyncIterator[T_co]: ...
    def close(self) -> None:
        """Ends the calls behind it; what has not been read is dropped."""
        ...


class AsyncItems(AsyncIterator[T]):
    """An iterator that blocks, for `async for`: each item is waited for in a thread."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items

    async def __anext__(self) -> T:
        import asyncio

        try:
            item = await asyncio.to_thread(next, self._items, cast(Any, _END))
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if item is _END:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """Ends the stream, and the calls behind it."""
        import asyncio

        close = getattr(self._items, "close", None)
        if close is not None:
            await asyncio.to_thread(close)


async def _awaited(future: AwaitableFuture[T]) -> T:
    import asyncio  # takes a while to load, and most programs never need it

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def wake(_: Future[T]) -> None:
        try:
            loop.call_soon_threadsafe(_settle, ended)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    Future.add_done_callback(future, wake)  # in the thread that settles it: `wake` neither blocks nor raises
    try:
        await ended
    except asyncio.CancelledError:
        future.cancel()
        raise
    if future.cancelled():
        raise asyncio.CancelledError
    return future.result() if future.is_light else await asyncio.to_thread(future.result)


def _settle(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
