"""`async with sky.ComputePool(...)`: a pool is opened and closed in a thread, and the event loop goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from skyward.pool.signals import OrderlyExit

__all__ = ["AsyncPool"]

Self = TypeVar("Self", bound="AsyncPool")


class AsyncPool:
    """The part of a pool that asyncio uses."""

    if TYPE_CHECKING:

        def __enter__(self) -> Any: ...
        def close(self) -> None: ...

    async def __aenter__(self: Self) -> Self:
        self._signals = OrderlyExit().__enter__()  # in this thread: only the main one can have handlers
        try:
            await _in_thread(self.__enter__, undo=self.close)
        except BaseException:
            self._signals.__exit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await _in_thread(self.close)
        finally:
            self._signals.__exit__(None, None, None)


async def _in_thread(act: Any, undo: Any = None) -> None:
    """Runs `act` to its end in a thread, also if whoever waits is cancelled; then `undo` is run, too."""
    import asyncio  # takes a while to load, and most programs never need it

    with ThreadPoolExecutor(1, "skyward-async") as threads:
        work = asyncio.get_running_loop().run_in_executor(threads, act)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            if undo is not None and work.exception() is None:
                await asyncio.get_running_loop().run_in_executor(threads, undo)
            raise
