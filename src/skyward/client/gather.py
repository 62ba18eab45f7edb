"""Many calls as one: groups, streams of results, and `map` in chunks. Knows calls and futures, not nodes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, replace
from functools import partial
from types import CoroutineType
from typing import Any, TypeVar, cast

from skyward.api.brief import brief
from skyward.api.compute import Chunk, PendingCompute, name_of
from skyward.api.futures import AsyncItems, AwaitableFuture, Stream
from skyward.client.callbacks import UserFuture, when_done
from skyward.client.partial import failed_part, note_call, note_items, partial_of, say_how_many, set_partial
from skyward.errors import TaskError
from skyward.transport import exceptions
from skyward.transport.threads import run_in_thread

__all__ = ["Ended", "Send", "combined", "error_of", "gathered", "mapped", "streamed"]

T = TypeVar("T")
Ended = Callable[[Future[Any]], None]
Send = Callable[[Sequence[PendingCompute[Any]]], Sequence[Future[Any]]]

_CHUNK_SECONDS = 0.05
_LEAST_SECONDS = 0.002
_LEAST_ITEMS = 256
_LONGEST = 8 << 10  # of the traceback that listeners and histories get of a chunk's first failure
_MISSING: Any = object()
_COROUTINE: Any = CoroutineType


def gathered(
    futures: Sequence[Future[Any]],
    calls: Sequence[PendingCompute[Any]] = (),
    keep: bool = False,
    ended: Ended | None = None,
) -> tuple[Any, ...]:
    """Results in order; the first failure, in time, cancels the rest. With `keep`, failures stand in their places."""
    try:
        return combined(futures, calls, keep, ended).result()
    except BaseException:
        _cancel(futures)
        raise


def streamed(
    futures: Sequence[Future[T]], ordered: bool, calls: Sequence[PendingCompute[Any]] = (), keep: bool = False
) -> Stream[T]:
    """Results one by one, in order or as they come; leaving early cancels the rest."""
    return _Results(futures, ordered, calls, keep)


def combined(
    futures: Sequence[Future[Any]],
    calls: Sequence[PendingCompute[Any]] = (),
    keep: bool = False,
    ended: Ended | None = None,
) -> AwaitableFuture[tuple[Any, ...]]:
    """One future for several: a tuple, or the first failure; cancelling it cancels them all.

    `ended` is told of each that has ended, before the whole ends, in the thread that has settled it.
    """
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
    count: Callable[[int, int], None] = lambda done, failed: None,
) -> list[Any]:
    """Applies the function of `each` to items, in chunks: first small ones, then as large as measured time allows.

    `count` is told how many more have ended well, and how many have failed.
    """
    results: list[Any] = [_MISSING] * len(items)
    pending: dict[Future[Any], tuple[int, int]] = {}
    done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()  # unlike a condition, Ctrl-C leaves it whole
    per_item: float | None = None
    before: dict[int, Any] = {}  # what had finished of a chunk when one of its items failed
    at = 0
    try:
        while pending or at < len(items):
            chunks: list[tuple[int, int]] = []
            while at < len(items) and len(pending) + len(chunks) < 2 * slots:
                size = 1 if each.timeout is not None else _chunk_size(len(items) - at, per_item, slots)
                chunks.append((at, at + size))
                at += size
            calls = [_chunk_call(each, items[a:b], a, keep) for a, b in chunks]
            sent = dict(zip(send(calls), chunks, strict=True))
            pending |= sent
            for future in sent:
                when_done(future, done.put)
            future = done.get()
            while future is not None:
                start, end = pending.pop(future)
                error = error_of(future)
                if error is not None and (keep or isinstance(error, TaskError)):  # a body has said it itself
                    note_items(error, each, items[start:end], start)
                if error is not None and not keep:
                    before = partial_of(error)
                    count(len(before), 0 if isinstance(error, CancelledError) else 1)
                    raise error
                if error is None:
                    seconds, failures, found = future.result()
                    if len(found) != end - start:
                        raise ValueError(f"{len(found)} results for {end - start} items")
                    results[start:end] = found
                    per_item = seconds / (end - start)
                    failed = failures[0] if failures else 0
                else:
                    results[start:end] = [error] * (end - start)
                    failed = end - start
                count(end - start - failed, failed)
                future = None if done.empty() else done.get()
    except BaseException as exc:
        _cancel(list(pending))
        if isinstance(exc, Exception):
            finished = {index: result for index, result in enumerate(results) if result is not _MISSING}
            set_partial(exc, {**finished, **before})
            say_how_many(exc, len(items), "items")
        raise
    return [_restored(result) for result in results] if keep else results


def error_of(future: Future[Any]) -> BaseException | None:
    """The exception of a future that is done; being cancelled counts as one."""
    try:
        return future.exception()
    except CancelledError as exc:
        return exc


class _Combined(UserFuture[tuple[Any, ...]]):
    """Several futures as one. Their results are read when they are asked for, never in the thread that settles them."""

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
        """One of the parts is done."""
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
            self._collected = True

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
    """Results of several futures, one by one."""

    def __init__(
        self, futures: Sequence[Future[T]], ordered: bool, calls: Sequence[PendingCompute[Any]], keep: bool
    ) -> None:
        self._futures, self._left = list(futures), len(futures)
        self._calls, self._keep = calls, keep
        self._indices: dict[int, int] | None = None
        self._next: Callable[[], Future[T]] = iter(self._futures).__next__
        if not ordered:
            done: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
            self._next = done.get
            for future in self._futures:
                when_done(future, done.put)

    def __iter__(self) -> _Results[T]:
        return self

    def __aiter__(self) -> AsyncIterator[T]:
        return AsyncItems(self)

    def __next__(self) -> T:
        if not self._left:
            raise StopIteration
        self._left -= 1
        try:
            future = self._next()
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
        """Cancels what is left."""
        self._left = 0
        _cancel(self._futures)

    def __del__(self) -> None:
        if self.__dict__.get("_left"):
            run_in_thread(partial(_cancel, self._futures))  # cancelling takes locks, which this thread may hold


def _error_as_it_came(future: Future[Any]) -> BaseException | None:
    """The exception of a future that is done, without reading its result, and without a lock for every call."""
    ended: Any = future
    return ended._exception if ended._state == "FINISHED" else CancelledError()


def _chunk_size(left: int, per_item: float | None, slots: int) -> int:
    if per_item is None:
        return 1
    least = min(_LEAST_ITEMS, int(_LEAST_SECONDS / max(per_item, 1e-7)))  # a long tail of tiny chunks costs more
    share = max(-(-left // (slots * 3)), least)
    return max(1, min(left, share, int(_CHUNK_SECONDS / max(per_item, 1e-7))))


def _chunk_call(each: PendingCompute[Any], items: list[Any], start: int, keep: bool) -> PendingCompute[Any]:
    args = (each.fn, items, start, keep)
    return replace(each, fn=_apply, args=args, label=each.name, chunk=Chunk(len(items), start, keep))


def _apply(
    fn: Callable[[Any], Any], items: list[Any], start: int, keep: bool
) -> tuple[float, tuple[int, str] | None, list[Any]]:
    """The seconds it took, how many have failed and the first of these in words, and the results."""
    began = time.perf_counter()
    results: list[Any] = []
    failed, first = 0, ""
    for index, item in enumerate(items, start):
        try:
            result: Any = fn(item)
            if type(result) is _COROUTINE:
                import asyncio

                result = asyncio.run(result)
        except Exception as exc:
            exceptions.noted(exc, f"item {index}: {name_of(fn)}({brief(item)})")
            if not keep:
                set_partial(exc, dict(enumerate(results, start)))
                raise
            result = _Failed(*exceptions.capture(exc))
            failed += 1
            if failed == 1:
                first = f"item {index}: {name_of(fn)}({brief(item)})\n\n{result.described['traceback'][-_LONGEST:]}"
        results.append(result)
    return time.perf_counter() - began, (failed, first) if failed else None, results


@dataclass(frozen=True)
class _Failed:
    """An exception in the place of a result, on its way home."""

    described: dict[str, Any]
    data: bytes


def _restored(result: Any) -> Any:
    if not isinstance(result, _Failed):
        return result
    return exceptions.annotate(exceptions.rebuild(result.described, result.data), result.described, "raised on a node")


def _cancel(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        future.cancel()
