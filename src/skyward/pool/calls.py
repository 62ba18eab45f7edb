"""Single calls on a pool: to one node, to all of them at once, and as an executor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Never, TypeVar, overload

from skyward.api.compute import PendingCompute
from skyward.api.futures import AwaitableFuture, Stream, Untyped
from skyward.pool.mistakes import called_like_an_executor

if TYPE_CHECKING:
    from skyward.api.compute import PendingKept
    from skyward.api.ref import Ref
    from skyward.client.executor import PoolExecutor
    from skyward.pool.sending import Sender
    from skyward.pool.state import PoolState

__all__ = ["Calls"]

T = TypeVar("T")


class Calls:
    """The part of a pool that sends calls."""

    if TYPE_CHECKING:
        _state: PoolState
        _sender: Sender

    @overload
    def run(self, call: PendingKept[T], /, *args: Never, **kwargs: Never) -> Ref[T]: ...
    @overload
    def run(self, call: PendingCompute[Untyped], /, *args: Never, **kwargs: Never) -> Any: ...
    @overload
    def run(self, call: PendingCompute[Iterator[T]], /, *args: Never, **kwargs: Never) -> Stream[T]: ...
    @overload
    def run(self, call: PendingCompute[T], /, *args: Never, **kwargs: Never) -> T: ...
    def run(self, call: PendingCompute[Any], /, *args: Never, **kwargs: Never) -> Any:
        """Runs a call on one node and returns its result; Ctrl-C stops it there. The same as `call >> pool`."""
        if args or kwargs:
            raise called_like_an_executor(call, "run", args, kwargs)
        future = self.submit(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @overload
    def submit(self, call: PendingKept[T], /, *args: Never, **kwargs: Never) -> AwaitableFuture[Ref[T]]: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def submit(self, call: PendingCompute[Untyped], /, *args: Never, **kwargs: Never) -> AwaitableFuture[Any]: ...
    @overload
    def submit(
        self, call: PendingCompute[Iterator[T]], /, *args: Never, **kwargs: Never
    ) -> AwaitableFuture[Stream[T]]: ...
    @overload
    def submit(self, call: PendingCompute[T], /, *args: Never, **kwargs: Never) -> AwaitableFuture[T]: ...
    def submit(self, call: PendingCompute[Any], /, *args: Never, **kwargs: Never) -> AwaitableFuture[Any]:
        """Sends a call to one node; the future's cancel() stops it there. The same as `call > pool`."""
        if args or kwargs:
            raise called_like_an_executor(call, "submit", args, kwargs)
        future = self._send([call], alone=True)[0]
        future.unasked = True
        return future

    def submit_all(self, calls: Sequence[PendingCompute[T]], /) -> list[AwaitableFuture[T]]:
        """Sends calls to any nodes, in as few messages as possible; one future for each."""
        return self._send(calls)

    def run_async(self, call: PendingCompute[T], /) -> AwaitableFuture[T]:
        """The same as `submit(call)`."""
        return self.submit(call)

    @overload
    def broadcast(self, call: PendingKept[T], /, *args: Never, **kwargs: Never) -> list[Ref[T]]: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def broadcast(self, call: PendingCompute[Untyped], /, *args: Never, **kwargs: Never) -> list[Any]: ...
    @overload
    def broadcast(self, call: PendingCompute[Iterator[T]], /, *args: Never, **kwargs: Never) -> list[Stream[T]]: ...
    @overload
    def broadcast(self, call: PendingCompute[T], /, *args: Never, **kwargs: Never) -> list[T]: ...
    def broadcast(self, call: PendingCompute[Any], /, *args: Never, **kwargs: Never) -> list[Any]:
        """Runs a call on every rank at once; results in rank order. If one fails, the others are stopped.

        There is one rank on each node, or as many as `processes_per_node` says.

        If the call has retries and a node is lost, all of it is started again when every node is there.
        """
        if args or kwargs:
            raise called_like_an_executor(call, "broadcast", args, kwargs)
        self._state.check_open()
        return self._sender.broadcast(call, self)

    @property
    def executor(self) -> PoolExecutor:
        """A concurrent.futures.Executor over this pool; shutting it down leaves the pool open."""
        self._state.check_open()
        from skyward.client.executor import PoolExecutor

        return PoolExecutor(self._send)

    def _send(self, calls: Sequence[PendingCompute[Any]], alone: bool = False) -> list[AwaitableFuture[Any]]:
        self._state.check_open()
        return self._sender.send(calls, self, alone)
