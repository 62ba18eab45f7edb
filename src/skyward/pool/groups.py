"""Many calls at once on a pool: groups, streams of results, and `map`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar, TypeVarTuple, cast, overload

from skyward.api.compute import Compute, PendingCompute, PendingComputeGroup, PendingStream
from skyward.api.futures import AwaitableFuture, Stream
from skyward.client import gather
from skyward.client.progress import GroupCounter
from skyward.pool.mistakes import not_mapped
from skyward.pool.options import checked_group

if TYPE_CHECKING:
    from skyward.client.callbacks import UserCode
    from skyward.events import Event
    from skyward.pool.sending import Sender
    from skyward.pool.state import PoolState

__all__ = ["Groups"]

S = TypeVar("S")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_TOLD = 1.0


class Groups:
    """The part of a pool that sends many calls as one."""

    if TYPE_CHECKING:
        _state: PoolState
        _sender: Sender
        _user: UserCode

        def _send(self, calls: Sequence[PendingCompute[Any]], alone: bool = False) -> list[AwaitableFuture[Any]]: ...

        name: str

        @property
        def slots(self) -> int: ...
        def _listening(self) -> object: ...
        def _emit(self, event: Event) -> None: ...

    def run_parallel(self, group: PendingComputeGroup[*Ts], /) -> tuple[*Ts]:
        """Runs the calls of a `group` at once; results in their order. The same as `group >> pool`."""
        calls = checked_group(group).calls()
        try:
            return cast("tuple[*Ts]", gather.gathered(self._followed(group, calls), calls, group.return_exceptions))
        except BaseException:
            self._user.listeners.flush(_TOLD)  # that it has ended is shown before the error is
            raise

    def submit_parallel(self, group: PendingComputeGroup[*Ts], /) -> AwaitableFuture[tuple[*Ts]]:
        """The same as `run_parallel(group)`, later: `group > pool`."""
        calls = checked_group(group).calls()
        return cast(
            "AwaitableFuture[tuple[*Ts]]", gather.combined(self._followed(group, calls), calls, group.return_exceptions)
        )

    def stream_parallel(self, group: PendingStream[T], /) -> Stream[T]:
        """Runs the calls of a `group` at once and yields results as they come (or in order)."""
        futures = self._followed(group, group.items)
        return gather.streamed(futures, group.ordered, group.items, group.return_exceptions)

    def _followed(self, group: Any, calls: Sequence[PendingCompute[Any]]) -> list[AwaitableFuture[Any]]:
        """The futures of calls that are sent as a group, counted as they end if anybody wants to know."""
        futures = self._send(calls)
        if len(calls) > 1 and group.progress and self._listening():
            names = {call.name for call in calls}
            name = names.pop() if len(names) == 1 else f"{len(names)} functions"
            GroupCounter(self.name, name, len(calls), self._emit).follow(futures)
        return futures

    def follow_group(self, name: str, total: int | None) -> GroupCounter | None:
        """Counts a `total` of calls sent as one, called `name`, and shows how far they are; None if nobody looks."""
        if not self._listening():
            return None
        flush = partial(self._user.listeners.flush, _TOLD)
        return GroupCounter(self.name, name, total, self._emit, flush=flush)

    # a compute function by how it is called: one with more parameters, which have defaults, is no Compute[[S], T]
    @overload
    def map(
        self,
        fn: Callable[[S], PendingCompute[T]],
        items: Iterable[S],
        *,
        return_exceptions: Literal[False] = ...,
        progress: bool = ...,
    ) -> list[T]: ...
    @overload
    def map(
        self, fn: Callable[[S], PendingCompute[T]], items: Iterable[S], *, return_exceptions: bool, progress: bool = ...
    ) -> list[T | BaseException]: ...
    @overload
    def map(
        self, fn: Callable[[S], T], items: Iterable[S], *, return_exceptions: Literal[False] = ..., progress: bool = ...
    ) -> list[T]: ...
    @overload
    def map(
        self, fn: Callable[[S], T], items: Iterable[S], *, return_exceptions: bool, progress: bool = ...
    ) -> list[T | BaseException]: ...
    def map(
        self,
        fn: Callable[[Any], Any],
        items: Iterable[Any],
        *more: Never,
        return_exceptions: bool = False,
        progress: bool = True,
    ) -> list[Any]:
        """Applies `fn` to every one of `items`, in chunks sized by how long items take; results in order.

        `return_exceptions`: an item that fails has its exception in its place, and the others go on. Otherwise (the
        default) the first failure is raised and the rest is stopped; what had finished is in its `partial`, by index.
        `progress`: whether to show how many are done, how many a second, and the time left (the default).
        """
        if mistake := not_mapped(fn, items, more):
            raise mistake
        known: Compute[[Any], Any] = cast("Any", fn) if isinstance(fn, Compute) else Compute(fn)
        self._state.check_open()
        each = self._sender.limited(PendingCompute[Any](known.fn, timeout=known.timeout, retries=known.retries))
        chosen = list(items)
        counter = self.follow_group(each.name, len(chosen)) if progress and len(chosen) > 1 else None
        if counter is None:
            return gather.mapped(self._send, each, chosen, self.slots, return_exceptions)
        try:
            return gather.mapped(self._send, each, chosen, self.slots, return_exceptions, counter.add)
        finally:
            counter.end()
