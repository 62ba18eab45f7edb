"""Many calls as one: groups, streams of results, and `map` in chunks."""

from __future__ import annotations

import inspect
import itertools
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Never, NoReturn, ParamSpec, TypeVar, cast

from skyward.api.brief import brief
from skyward.api.compute import Chunk, Compute, PendingCompute, as_compute
from skyward.api.futures import AsyncItems, AwaitableFuture, Stream
from skyward.client.futures import UserFuture, when_done
from skyward.client.outcomes import (
    failed_part,
    interrupted,
    note_call,
    note_items,
    partial_of,
    say_how_many,
)
from skyward.errors import Preempted, RemoteError, TaskError
from skyward.events import Event, GroupProgress
from skyward.node.items import EachItem, FailedItem, not_for_generators
from skyward.transport.exceptions import set_partial
from skyward.transport.threads import run_in_thread

if TYPE_CHECKING:
    from skyward.client.resume import Resumed

__all__ = [
    "Ended",
    "GroupCounter",
    "Later",
    "PoolExecutor",
    "Send",
    "combined",
    "error_of",
    "gathered",
    "mapped",
    "name_of_all",
    "streamed",
]


T = TypeVar("T")
Ended = Callable[[Future[Any]], None]
Send = Callable[[Sequence[PendingCompute[Any]]], Sequence[Future[Any]]]

_CHUNK_SECONDS = 0.05
_LEAST_SECONDS = 0.002
_LEAST_ITEMS = 1024
_MISSING: Any = object()


def gathered(
    futures: Sequence[Future[Any]],
    calls: Sequence[PendingCompute[Any]] = (),
    keep: bool = False,
    ended: Ended | None = None,
) -> tuple[Any, ...]:
    """Results in order; the first failure, in time, cancels the rest. With `keep`, failures are results."""
    whole: Any = combined(futures, calls, keep, ended)
    try:
        return whole.result()
    except BaseException as exc:
        _cancel(futures)
        if not isinstance(exc, Exception) and exc is not whole._exception:  # Ctrl-C, not what a call has raised
            interrupted(exc, futures, keep)
        raise


def streamed(
    futures: Sequence[Future[T]], ordered: bool, calls: Sequence[PendingCompute[Any]] = (), keep: bool = False
) -> Stream[T]:
    return _Results(futures, ordered, calls, keep)


def combined(
    futures: Sequence[Future[Any]],
    calls: Sequence[PendingCompute[Any]] = (),
    keep: bool = False,
    ended: Ended | None = None,
) -> AwaitableFuture[tuple[Any, ...]]:
    """A tuple or the first failure; cancelling it cancels them all. `ended` runs in the thread that settled each."""
    whole = _Combined(futures, calls, keep, ended)
    if not futures:
        whole.set_result(())
    for future in futures:
        when_done(future, whole.settled)
    return whole


def mapped(
    send: Send,
    each: PendingCompute[Any],
    items: list[Any],
    slots: int,
    keep: bool = False,
    count: Callable[[int, int], None] | None = None,
    run: Resumed | None = None,
) -> list[Any]:
    """Maps in chunks: small at first, then as large as measured time allows.

    `count` gets how many more have ended well, and how many have failed. What `run` knows is taken from there, and new
    results are kept there first.
    """
    if inspect.isgeneratorfunction(each.fn) or inspect.isasyncgenfunction(each.fn):
        raise not_for_generators(each.fn)
    fn, results = EachItem(each.fn, keep), [_MISSING] * len(items)
    pending: dict[Future[Any], tuple[int, int]] = {}
    done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()  # unlike a condition, Ctrl-C leaves it whole
    per_item: float | None = None
    before: dict[int, Any] = {}  # what had finished of a chunk when one of its items failed
    known: Mapping[int, Any] = {} if run is None else run.known
    keep_results: Callable[[int, list[Any]], None] = run.keep if run is not None else lambda first, results: None
    for index, result in known.items():
        results[index] = result
    at, left, limited = 0, len(items) - len(known), each.timeout is not None and each.timeout < math.inf
    try:
        while pending or left:
            chunks: list[tuple[int, int]] = []
            ahead = slots if per_item is None else 2 * slots  # one of each slot says how long an item takes
            while left and len(pending) + len(chunks) < ahead:
                start, end = _next(at, 1 if limited else _chunk_size(left, per_item, slots), known)
                chunks.append((start, end))
                at, left = end, left - (end - start)
            calls = [_chunk_call(each, fn, items[a:b], a) for a, b in chunks]
            sent = dict(zip(send(calls), chunks, strict=True))
            pending |= sent
            for future in sent:
                when_done(future, done.put)
            future = done.get()
            while future is not None:
                start, end = pending.pop(future)
                error = error_of(future)
                ours = isinstance(error, TaskError) and not isinstance(error, RemoteError | Preempted)
                if error is not None and (keep or ours):  # an exception of the body has said it itself
                    note_items(error, each, items[start:end], start)
                if error is not None and not keep:
                    before = partial_of(error)
                    for index, result in before.items():
                        keep_results(index, [result])
                    if count is not None:
                        count(len(before), 0 if isinstance(error, CancelledError) else 1)
                    raise error
                if error is None:
                    seconds, failures, found = future.result()
                    if len(found) != end - start:
                        raise ValueError(f"{len(found)} results for {end - start} items")
                    keep_results(start, found)
                    results[start:end] = found
                    per_item = seconds / (end - start)
                    failed = failures[0] if failures else 0
                else:
                    results[start:end] = [error] * (end - start)
                    failed = end - start
                if count is not None:
                    count(end - start - failed, failed)
                future = None if done.empty() else done.get()
    except BaseException as exc:
        for future, (start, end) in pending.items():
            if future.done() and error_of(future) is None and len(found := future.result()[2]) == end - start:
                keep_results(start, found)
                results[start:end] = found
        _cancel(list(pending))
        finished = {index: _restored(result) for index, result in enumerate(results) if result is not _MISSING}
        set_partial(exc, {**finished, **before})
        say_how_many(exc, len(items), "items")
        raise
    return [_restored(result) if type(result) is FailedItem else result for result in results] if keep else results


def _next(at: int, size: int, known: Mapping[int, Any]) -> tuple[int, int]:
    while at in known:
        at += 1
    end = at + size
    return at, next((each for each in range(at, end) if each in known), end) if known else end


def error_of(future: Future[Any]) -> BaseException | None:
    """Cancellation counts as an error."""
    try:
        return future.exception()
    except CancelledError as exc:
        return exc


class _Combined(UserFuture[tuple[Any, ...]]):
    """Results are read when asked for, never in the thread that settles them."""

    def __init__(
        self, parts: Sequence[Future[Any]], calls: Sequence[PendingCompute[Any]], keep: bool, ended: Ended | None
    ) -> None:
        first = parts[0] if parts else None
        super().__init__(first.user if isinstance(first, UserFuture) else None)
        self._parts, self._left, self._counting = parts, len(parts), threading.Lock()
        self._calls, self._keep, self._ended = calls, keep, ended
        self._failed: Future[Any] | None = None  # the part whose failure is that of the whole
        self._told = False
        self._collected = not parts
        self._collecting = (
            threading.RLock()
        )  # of one thread twice: reading a result may run code that asks for this one
        self.on_cancel = partial(_cancel, parts)

    def settled(self, part: Future[Any]) -> None:
        if self._ended is not None:
            self._ended(part)
        error = None if self._keep else _error_as_it_came(part)
        with self._counting:
            self._left -= 1
            last = self._left == 0
            if error is not None and self._failed is None:
                self._failed = part
        try:
            if error is not None and self._failed is part:
                self.set_exception(error)
                run_in_thread(partial(_cancel, self._parts))  # many of them would hold up the thread that settles
            elif last:
                self.on_cancel = None
                self.set_result(())  # `_load` puts the results there
        except InvalidStateError:
            pass  # another part has failed before, or the whole was cancelled

    def _load(self) -> None:
        with self._collecting:
            if self._collected or self._exception is not None:
                return
            try:
                self._result = tuple(self._kept() if self._keep else (part.result() for part in self._parts))
            except KeyboardInterrupt:
                raise  # it can be asked for again
            except BaseException as exc:  # a result that cannot be read
                self._exception = exc
            self._collected, self._parts = True, ()  # which have this one among their callbacks: a cycle

    def _kept(self) -> Iterator[Any]:
        for index, part in enumerate(self._parts):
            error = error_of(part)
            if error is not None:
                note_call(error, index, self._calls)
            yield part.result() if error is None else error

    def _prepare(self, timeout: float | None) -> None:
        super()._prepare(timeout)
        with self._collecting:
            if self._failed is not None and not self._told and isinstance(self._exception, Exception):
                failed_part(self._exception, self._failed, self._parts, self._calls)
            self._told = True


class _Results(Iterator[T]):
    """Thread-safe: each result goes to one reader."""

    def __init__(
        self, futures: Sequence[Future[T]], ordered: bool, calls: Sequence[PendingCompute[Any]], keep: bool
    ) -> None:
        self._futures, self._left = list(futures), len(futures)
        self._calls, self._keep = calls, keep
        self._indices: dict[int, int] | None = None
        self._claiming = threading.RLock()  # of one thread twice: a signal handler may close it
        self._wakes: set[Callable[[], None]] = set()
        self._watched = False
        self._done: queue.SimpleQueue[Future[T]] | None = None if ordered else queue.SimpleQueue()
        if self._done is not None:
            for future in self._futures:
                when_done(future, self._done.put)

    def __iter__(self) -> _Results[T]:
        return self

    def __aiter__(self) -> AsyncIterator[T]:
        return AsyncItems(self, self)

    def __next__(self) -> T:
        with self._claiming:
            if not self._left:
                raise StopIteration
            self._left -= 1
            future = self._futures[-1 - self._left] if self._done is None else None
        return self._read(future)

    def poll(self, wake: Callable[[], None]) -> tuple[Callable[[], T], bool] | None:
        if not self._watched:  # now, since only readers in asyncio need it
            self._watched = True
            for future in self._futures:
                when_done(future, partial(_wake, self._wakes))  # not a method: futures must not keep what is dropped
        with self._claiming:
            if not self._left:
                return partial(next, self), True
            self._wakes.add(wake)  # before it looks: whatever ends from now on wakes it
            future = self._ended()
            if future is None:
                return None
            self._wakes.discard(wake)
            self._left -= 1
        return partial(self._read, future), isinstance(future, AwaitableFuture) and future.is_light

    def forget(self, wake: Callable[[], None]) -> None:
        self._wakes.discard(wake)

    def _ended(self) -> Future[T] | None:
        if self._done is None:
            future = self._futures[-self._left]
            return future if future.done() else None
        try:
            return self._done.get_nowait()
        except queue.Empty:
            return None

    def _read(self, future: Future[T] | None) -> T:
        try:
            if future is None:
                assert self._done is not None
                future = self._done.get()
            error = error_of(future)
            if error is None:
                return future.result()
            if self._keep:
                note_call(error, self._index(future), self._calls)
                return cast(T, error)
            if isinstance(error, Exception):
                failed_part(error, future, self._futures, self._calls, partial=False)
            raise error
        except StopIteration as exc:  # as it is, it would end the loop as if all were well (PEP 479)
            self.close()
            raise RuntimeError("a call of the stream raised StopIteration") from exc
        except BaseException:
            self.close()
            raise

    def _index(self, future: Future[T]) -> int:
        if self._indices is None:  # made when the first one fails
            self._indices = {id(each): index for index, each in enumerate(self._futures)}
        return self._indices[id(future)]

    def close(self) -> None:
        with self._claiming:
            self._left = 0
        _cancel(self._futures)

    def __del__(self) -> None:
        if self.__dict__.get("_left"):
            run_in_thread(partial(_cancel, self._futures))  # cancelling takes locks, which this thread may hold


def _wake(wakes: set[Callable[[], None]], _: Future[Any]) -> None:
    for wake in list(wakes):
        wakes.discard(wake)
        wake()


def _error_as_it_came(future: Future[Any]) -> BaseException | None:
    """Without reading its result, and without a lock."""
    ended: Any = future
    return ended._exception if ended._state == "FINISHED" else CancelledError()


def _chunk_size(left: int, per_item: float | None, slots: int) -> int:
    if per_item is None:
        return 1
    least = min(_LEAST_ITEMS, int(_LEAST_SECONDS / max(per_item, 1e-7)))  # a long tail of tiny chunks costs more
    share = max(-(-left // (slots * 3)), least)
    return max(1, min(left, share, int(_CHUNK_SECONDS / max(per_item, 1e-7))))


def _chunk_call(each: PendingCompute[Any], fn: EachItem, items: list[Any], start: int) -> PendingCompute[Any]:
    chunk = Chunk(len(items), start, fn.keep)
    return PendingCompute(fn, (items, start), timeout=each.timeout, retries=each.retries, label=each.name, chunk=chunk)


def _restored(result: Any) -> Any:
    return result.error() if isinstance(result, FailedItem) else result


def _cancel(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        future.cancel()


Later = Callable[[float, Callable[[], None]], None]

_EVERY = 0.25
_numbers = itertools.count(1)


def _later(seconds: float, act: Callable[[], None]) -> None:
    def wait() -> None:
        time.sleep(seconds)
        act()

    run_in_thread(wait)


class GroupCounter:
    """Counts a group's calls; `emit` is called seldom enough to cost nothing, but always with the last state. `flush`
    waits until listeners had it.
    """

    def __init__(
        self,
        pool: str,
        name: str,
        total: int | None,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
        later: Later = _later,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool, self._name, self._total, self._emit, self._clock = pool, name, total, emit, clock
        self._later, self._flush = later, flush
        self._follows = False
        self._group = next(_numbers)
        self._began = self._told = clock()
        self._done = self._failed = self._stopped = 0
        self._over = self._untold = self._late = False
        self._lock = threading.RLock()  # a signal handler may stop calls of the group in the thread that counts

    def follow(self, futures: Sequence[Future[Any]]) -> None:
        for future in futures:
            when_done(future, self.ended)

    def ended(self, future: Any) -> None:
        with self._lock:
            self._follows = self._untold = True
            if future._state != "FINISHED":
                self._stopped += 1
            elif future._exception is not None:  # it has ended: asking properly would take a lock, for every call
                self._failed += 1
            else:
                self._done += 1
            if not self._late or self._done + self._failed + self._stopped == self._total:
                self.add(0)

    def add(self, done: int, failed: int = 0, stopped: int = 0) -> None:
        with self._lock:
            self._done += done
            self._failed += failed
            self._stopped += stopped
            if self._over:
                return
            complete = self._done + self._failed + self._stopped == self._total
            self._over = complete and self._follows
            if complete:
                self._tell()
            else:
                self._untold = True
                self._tell_soon()

    def expect(self, total: int) -> None:
        with self._lock:
            if total != self._total:
                self._total = total
                self.add(0)

    def end(self) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._tell()
        self._flush()

    def _tell_soon(self) -> None:
        """The next call may take an hour."""
        wait = self._told + _EVERY - self._clock()
        if wait <= 0:
            self._tell()
        elif not self._late:
            self._late = True
            self._later(wait, self._tell_late)

    def _tell_late(self) -> None:
        with self._lock:
            self._late = False
            if not self._over and self._untold:
                self._tell_soon()

    def _tell(self) -> None:
        now = self._told = self._clock()
        self._untold = False
        seconds = now - self._began
        # with the lock held: nothing is told after the end
        self._emit(
            GroupProgress(
                self._pool, self._group, self._name, self._done, self._total, seconds, self._failed, self._over
            )
        )


def name_of_all(calls: Sequence[PendingCompute[Any]]) -> str:
    different = {(id(call.fn), call.label): call for call in calls}  # often one, while names take a while to make
    names = {call.name for call in different.values()}
    return names.pop() if len(names) == 1 else f"{len(names)} functions"


P = ParamSpec("P")


class PoolExecutor(Executor):
    def __init__(self, send: Callable[[Sequence[PendingCompute[Any]]], Sequence[Future[Any]]]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        known = as_compute(fn)
        plain = known.fn if isinstance(known, Compute) else known
        if isinstance(plain, PendingCompute):
            name = plain.name
            raise TypeError(
                f"an executor takes a function and its arguments, `submit({name}, ...)`; `{name}(...) > pool` "
                "sends a call."
            )
        if not callable(plain):
            raise TypeError(f"an executor takes a function and its arguments, `submit(fn, x)`, not {brief(plain)}.")
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[T] = self._send([PendingCompute(plain, args, kwargs)])[0]  # pickles: code of the user's may run
        with self._lock:
            shut = self._shut
            if not shut:
                self._pending.add(future)
        if shut:  # meanwhile
            future.cancel()
            raise RuntimeError("cannot schedule new futures after shutdown")
        when_done(future, self._settled)
        return future

    @property
    def is_shut(self) -> bool:
        return self._shut

    def __call__(self, *_: Never) -> NoReturn:
        raise TypeError(
            "pool.executor is not a method: `pool.executor.submit(fn, x)`, without brackets after its name."
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._shut = True
            pending = set(self._pending)
        if cancel_futures:
            for future in pending:
                if not future.running():
                    future.cancel()
        if wait:
            _wait(pending)

    def _settled(self, future: Future[Any]) -> None:
        self._pending.discard(future)


_wait = wait
