"""Many calls at once on a pool: groups, streams of results, and `map`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar, TypeVarTuple, cast, overload

from skyward.api.compute import Compute, PendingCompute, PendingComputeGroup, PendingStream
from skyward.api.futures import AwaitableFuture, Stream
from skyward.api.keywords import FOR_GROUPS, check_switches, corrects_call
from skyward.client import gather
from skyward.client.progress import GroupCounter
from skyward.pool.mistakes import for_awaiting, not_mapped
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
            return cast("tuple[*Ts]", gather.gathered(*self._counted(group, calls)))
        except BaseException:
            self._user.listeners.flush(_TOLD)  # that it has ended is shown before the error is
            raise

    def submit_parallel(self, group: PendingComputeGroup[*Ts], /) -> AwaitableFuture[tuple[*Ts]]:
        """The same as `run_parallel(group)`, later: `group > pool`."""
        calls = checked_group(group).calls()
        return cast("AwaitableFuture[tuple[*Ts]]", gather.combined(*self._counted(group, calls)))

    def stream_parallel(self, group: PendingStream[T], /) -> Stream[T]:
        """Runs the calls of a `group` at once and yields results as they come (or in order)."""
        futures = self._send(group.items)
        if (counter := self._counter(group, group.items)) is not None:
            counter.follow(futures)
        return gather.streamed(futures, group.ordered, group.items, group.return_exceptions)

    def _counted(self, group: Any, calls: Sequence[PendingCompute[Any]]) -> tuple[Any, ...]:
        """What `gather` needs to know of calls that are sent as a group."""
        futures, counter = self._send(calls), self._counter(group, calls)
        return futures, calls, group.return_exceptions, counter.ended if counter is not None else None

    def _counter(self, group: Any, calls: Sequence[PendingCompute[Any]]) -> GroupCounter | None:
        """Counts the calls of a group as they end, if anybody wants to know."""
        if len(calls) < 2 or not group.progress or not self._listening():
            return None
        different = {(id(call.fn), call.label): call for call in calls}  # often one, while names take a while to make
        names = {call.name for call in different.values()}
        name = names.pop() if len(names) == 1 else f"{len(names)} functions"
        return GroupCounter(self.name, name, len(calls), self._emit)

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
    @corrects_call("pool.map", FOR_GROUPS, "pool.map(fn, items)")
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
        check_switches(return_exceptions=return_exceptions, progress=progress)
        known: Compute[[Any], Any] = cast("Any", fn) if isinstance(fn, Compute) else Compute(fn)
        self._state.check_open()
        each = self._sender.limited(PendingCompute[Any](known.fn, timeout=known.timeout, retries=known.retries))
        chosen = list(items)
        counter = self.follow_group(each.name, len(chosen)) if progress and len(chosen) > 1 else None
        if counter is None:
            return for_awaiting(gather.mapped(self._send, each, chosen, self.slots, return_exceptions))
        try:
            return for_awaiting(gather.mapped(self._send, each, chosen, self.slots, return_exceptions, counter.add))
        finally:
            counter.end()
