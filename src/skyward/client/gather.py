"""Many calls as one: groups, streams of results, and `map` in chunks. Knows calls and futures, not nodes."""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from skyward.api.compute import PendingCompute
from skyward.client.callbacks import UserFuture, when_done
from skyward.transport.threads import run_in_thread

__all__ = ["Send", "combined", "error_of", "gathered", "mapped", "streamed"]

T = TypeVar("T")
Send = Callable[[Sequence[PendingCompute[Any]]], list[Future[Any]]]

_CHUNK_SECONDS = 0.05
_LEAST_SECONDS = 0.002
_LEAST_ITEMS = 256


def gathered(futures: Sequence[Future[Any]]) -> tuple[Any, ...]:
    """Results in order; the first failure, in time, cancels the rest."""
    try:
        return combined(futures).result()
    except BaseException:
        _cancel(futures)
        raise


def streamed(futures: Sequence[Future[T]], ordered: bool) -> Iterator[T]:
    """Results one by one, in order or as they come; leaving early cancels the rest."""
    return _Results(futures, ordered)


def combined(futures: Sequence[Future[Any]]) -> Future[tuple[Any, ...]]:
    """One future for several: a tuple, or the first failure; cancelling it cancels them all."""
    whole = _Combined(futures)
    if not futures:
        whole.set_result(())
    for future in futures:
        when_done(future, whole.settled)
    return whole


def mapped(send: Send, each: PendingCompute[Any], items: list[Any], slots: int) -> list[Any]:
    """Applies the function of `each` to items, in chunks: first small ones, then as large as measured time allows."""
    results: list[Any] = [None] * len(items)
    pending: dict[Future[Any], tuple[int, int]] = {}
    done: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()  # unlike a condition, Ctrl-C leaves it whole
    per_item: float | None = None
    at = 0
    try:
        while pending or at < len(items):
            chunks: list[tuple[int, int]] = []
            while at < len(items) and len(pending) + len(chunks) < 2 * slots:
                size = 1 if each.timeout is not None else _chunk(len(items) - at, per_item, slots)
                chunks.append((at, at + size))
                at += size
            calls = [replace(each, fn=_apply, args=(each.fn, items[a:b]), label=each.name) for a, b in chunks]
            sent = dict(zip(send(calls), chunks, strict=True))
            pending |= sent
            for future in sent:
                when_done(future, done.put)
            future = done.get()
            while future is not None:
                start, end = pending.pop(future)
                seconds, results[start:end] = future.result()
                per_item = seconds / (end - start)
                future = None if done.empty() else done.get()
    except BaseException:
        _cancel(list(pending))
        raise
    return results


def error_of(future: Future[Any]) -> BaseException | None:
    """The exception of a future that is done; being cancelled counts as one."""
    try:
        return future.exception()
    except CancelledError as exc:
        return exc


class _Combined(UserFuture[tuple[Any, ...]]):
    """Several futures as one. Their results are read when they are asked for, never in the thread that settles them."""

    def __init__(self, parts: Sequence[Future[Any]]) -> None:
        first = parts[0] if parts else None
        super().__init__(first.user if isinstance(first, UserFuture) else None)
        self._parts, self._left, self._counting = parts, len(parts), threading.Lock()
        self._collected = not parts
        self._collecting = (
            threading.RLock()
        )  # of one thread twice: reading a result may run code that asks for this one
        self.on_cancel = partial(_cancel, parts)

    def settled(self, part: Future[Any]) -> None:
        """One of the parts is done."""
        with self._counting:
            self._left -= 1
            last = self._left == 0
        error = _error_as_it_came(part)
        try:
            if error is not None:
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
                self._result = tuple(part.result() for part in self._parts)
            except KeyboardInterrupt:
                raise  # it can be asked for again
            except BaseException as exc:  # a result that cannot be read
                self._exception = exc
            self._collected = True


class _Results(Iterator[T]):
    """Results of several futures, one by one."""

    def __init__(self, futures: Sequence[Future[T]], ordered: bool) -> None:
        self._futures, self._left = list(futures), len(futures)
        self._next: Callable[[], Future[T]] = iter(self._futures).__next__
        if not ordered:
            done: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
            self._next = done.get
            for future in self._futures:
                when_done(future, done.put)

    def __iter__(self) -> _Results[T]:
        return self

    def __next__(self) -> T:
        if not self._left:
            raise StopIteration
        self._left -= 1
        try:
            return self._next().result()
        except StopIteration as exc:  # as it is, it would end the loop as if all were well (PEP 479)
            self.close()
            raise RuntimeError("a call of the stream raised StopIteration") from exc
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancels what is left."""
        self._left = 0
        _cancel(self._futures)

    def __del__(self) -> None:
        if self.__dict__.get("_left"):
            run_in_thread(partial(_cancel, self._futures))  # cancelling takes locks, which this thread may hold


def _error_as_it_came(future: Future[Any]) -> BaseException | None:
    """The exception of a future that is done, without reading its result."""
    try:
        return Future.exception(future)
    except CancelledError as exc:
        return exc


def _chunk(left: int, per_item: float | None, slots: int) -> int:
    if per_item is None:
        return 1
    least = min(_LEAST_ITEMS, int(_LEAST_SECONDS / max(per_item, 1e-7)))  # a long tail of tiny chunks costs more
    share = max(-(-left // (slots * 3)), least)
    return max(1, min(left, share, int(_CHUNK_SECONDS / max(per_item, 1e-7))))


def _apply(fn: Callable[[Any], Any], items: list[Any]) -> tuple[float, list[Any]]:
    began = time.perf_counter()
    results = [fn(item) for item in items]
    if results and inspect.iscoroutine(results[0]):
        import asyncio

        results = [asyncio.run(result) for result in results]
    return time.perf_counter() - began, results


def _cancel(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        future.cancel()
