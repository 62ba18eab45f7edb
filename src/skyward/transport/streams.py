"""Streams with credit: the producer stops when the consumer does not keep up.

producer --items-->  consumer      at most WINDOW items (or WINDOW_BYTES) are under way
producer <--grant--  consumer      as they are used
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, NoReturn, TypeVar

from skyward.transport.exceptions import original
from skyward.transport.frames import Malformed
from skyward.transport.threads import run_in_thread

__all__ = ["WINDOW", "Consumer", "Producer", "Stream"]

WINDOW = 256
WINDOW_BYTES = 64 << 20
_BATCH = 512

T = TypeVar("T")


class Producer:
    """Sends items while there is credit, in batches, from a thread."""

    def __init__(self, send: Callable[[list[Any]], None], window: int = WINDOW) -> None:
        self._send = send
        self._credit = window
        self._flying: deque[int] = deque()
        self._flying_bytes = 0
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._finished = False
        self._error: BaseException | None = None
        self._sender = threading.Thread(target=self._run, name="skyward-stream", daemon=True)
        self._sender.start()

    def put(self, item: Any, size: int) -> bool:
        """Waits for room; False when the consumer wants no more."""
        with self._changed:
            while not self._closed and (self._credit <= 0 or (self._flying and self._flying_bytes > WINDOW_BYTES)):
                self._changed.wait()
            if self._closed:
                return False
            self._credit -= 1
            self._flying.append(size)
            self._flying_bytes += size
            self._ready.append(item)
            if len(self._ready) == 1:
                self._changed.notify_all()
        return True

    def grant(self, count: int) -> None:
        with self._changed:
            count = min(count, len(self._flying))
            self._credit += count
            for _ in range(count):
                self._flying_bytes -= self._flying.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()
        self._sender.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ready and not self._finished and not self._closed:
                    self._changed.wait()
                if not self._ready or self._closed:
                    return
                batch = [self._ready.popleft() for _ in range(min(_BATCH, len(self._ready)))]
            try:
                self._send(batch)
            except BaseException as exc:  # `finish` raises it
                self._error = exc
                self.close()
                return


class Consumer(Iterator[Any]):
    """Thread-safe: each item goes to one reader."""

    def __init__(
        self,
        grant: Callable[[int], None],
        close: Callable[[], None],
        load: Callable[[Any], Any],
        window: int = WINDOW,
        is_light: Callable[[Any], bool] = lambda item: False,
    ) -> None:
        self._grant, self._close, self._load, self._is_light = grant, close, load, is_light
        self._step = max(1, window // 2)
        self._owed = window  # how many items the producer may still send
        # Each item has its number, and the bytes of the stream up to its end. Readers take items without a lock; what
        # to grant follows from the number of the last one taken, so nothing is counted per item.
        self._items: deque[tuple[Any, int, int]] = deque()
        self._arrived = self._arrived_bytes = 0
        self._granted = self._granted_bytes = 0
        self._changed = threading.Condition()
        self._wakes: set[Callable[[], None]] = set()
        self._ended = False
        self._error: BaseException | None = None

    def __iter__(self) -> Consumer:
        return self

    def __next__(self) -> Any:
        try:
            item, number, size = self._items.popleft()
        except IndexError:
            item, number, size = self._take()
        due = number - self._granted >= self._step or size - self._granted_bytes >= WINDOW_BYTES // 4
        if due and not self._ended:
            self._grant_up_to(number, size)
        return self._load(item)

    def poll(self, wake: Callable[[], None]) -> tuple[Callable[[], Any], bool] | None:
        """What gives the next item or raises, and whether it takes no time worth a thread. None if there is none yet:
        then `wake` is called once, from any thread, when there may be one.
        """
        with self._changed:
            try:
                item, number, size = self._items.popleft()
            except IndexError:
                if self._ended:
                    return self._end, self._error is None
                self._wakes.add(wake)
                return None
        if number - self._granted >= self._step or size - self._granted_bytes >= WINDOW_BYTES // 4:
            self._grant_up_to(number, size)
        return partial(self._load, item), self._is_light(item)

    def forget(self, wake: Callable[[], None]) -> None:
        with self._changed:
            self._wakes.discard(wake)

    def _take(self) -> tuple[Any, int, int]:
        with self._changed:
            while True:
                try:
                    return self._items.popleft()
                except IndexError:
                    if self._ended:
                        break
                    self._changed.wait()
        return self._end()

    def _end(self) -> NoReturn:
        with self._changed:
            error, self._error = self._error, None
        error = original(error)
        if isinstance(error, StopIteration):  # as it is, it would end the loop as if all were well (PEP 479)
            raise RuntimeError("the body of the stream raised StopIteration") from error
        raise error or StopIteration

    def _wake(self) -> None:
        self._changed.notify_all()
        while self._wakes:
            self._wakes.pop()()

    def _grant_up_to(self, number: int, size: int) -> None:
        with self._changed:
            due = number - self._granted
            if due <= 0 or self._ended:  # another thread has granted more, or there is nothing more to send
                return
            self._granted, self._granted_bytes = number, size
            self._owed += due
        self._grant(due)

    @property
    def ended(self) -> bool:
        return self._ended

    def feed(self, items: list[tuple[Any, int]]) -> None:
        with self._changed:
            self._owed -= len(items)
            if self._owed < 0:
                raise Malformed("more items of a stream than were asked for")
            if not self._ended:
                number, total = self._arrived, self._arrived_bytes
                self._items.extend([(item, number := number + 1, total := total + size) for item, size in items])
                self._arrived, self._arrived_bytes = number, total
                self._wake()

    def end(self, error: BaseException | None = None) -> None:
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
                self._wake()

    def close(self) -> None:
        with self._changed:
            self._items.clear()
            self._error = None
            if self._ended:
                return
            self._ended = True
            self._wake()
        self._close()


class Stream(Iterator[T]):
    """What the user holds; dropping it stops the producer."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def __iter__(self) -> Stream[T]:
        return self

    def __aiter__(self) -> AsyncIterator[T]:
        from skyward.api.futures import AsyncItems  # only clients that use asyncio need it

        return AsyncItems(self, self._consumer)

    def __next__(self) -> T:
        return next(self._consumer)

    def close(self) -> None:
        self._consumer.close()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # the garbage collector may come here while this thread holds a lock that closing needs, a link's for instance
        consumer: Consumer | None = self.__dict__.get("_consumer")
        if consumer is not None and not consumer.ended:
            run_in_thread(consumer.close)
