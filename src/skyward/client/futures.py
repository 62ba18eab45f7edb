"""The futures that users hold, and the threads that run users' functions."""

from __future__ import annotations

import _thread
import itertools
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from skyward.api.futures import AwaitableFuture
from skyward.client import output
from skyward.client.output import Chunk
from skyward.events import Event, KeepEnd, Log, Notice, Warned
from skyward.transport.exceptions import original

__all__ = ["Deferred", "Listener", "Listeners", "UserCode", "UserFuture", "Worker", "wait_for_all", "when_done"]


# Runs users' functions (done-callbacks, event listeners) on threads of their own: none of them holds up a pool.
#
# I/O thread --settles a future--> Worker "skyward-callbacks" --> the future's done-callbacks
# any thread --emits an event----> Worker "skyward-events" -----> every listener, in order


log = logging.getLogger("skyward.callbacks")

T = TypeVar("T")
Listener = Callable[[Event], None]

_PATIENCE = 0.5  # a done-callback that runs for longer no longer holds up the others
_DELIVERY = 10.0  # a result waits at most so long for slow listeners to hear what came before it
_MOST_EVENTS = 100_000
_CLOSING = 2.0


def _relay_warning(event: Warned) -> None:
    from skyward.client.output import relay_warnings  # most bodies warn of nothing

    relay_warnings(event)


_RELAYS: dict[type[Event], Any] = {Log: output.relay_records, Warned: _relay_warning}


def _relays(event: Event) -> tuple[Listener, ...]:
    relay_warnings = _RELAYS.get(type(event))
    return () if relay_warnings is None else (relay_warnings,)


class Listeners:
    """Each gets every event in order, on one thread."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self.record: Listener | None = None  # hears of everything at once, in any thread: it only keeps it
        self.record_end: KeepEnd | None = None  # the same for calls that have ended, if nobody else listens
        self._lock = threading.Lock()
        self._left_out = 0  # events, since listeners are very far behind
        self.worker = Worker("skyward-events")

    def add(self, listener: Listener) -> Callable[[], None]:
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def remove() -> None:
            with self._lock:
                others = list(self._listeners)
                if listener in others:
                    others.remove(listener)
                self._listeners = tuple(others)

        return remove

    def any(self) -> bool:
        return bool(self._listeners) or self.record is not None

    def wants(self) -> bool | KeepEnd:
        return True if self._listeners else self.record_end or False

    def emit(self, event: Event | Chunk) -> None:
        listeners = self._listeners
        if isinstance(event, Chunk):  # of output: nodes send no more of it than was taken
            if self.any() or self.worker.submitted != self.worker.finished:
                self.worker.submit(self._take, event)
            else:
                self._take(event)
            return
        if self.record is not None:
            self.record(event)
        if type(event) in _RELAYS:
            listeners = (*_relays(event), *listeners)
        if not listeners:
            return
        worker = self.worker
        if (self._left_out or worker.submitted - worker.finished >= _MOST_EVENTS) and self._leave_out(event, listeners):
            return
        worker.submit(self._deliver, event, listeners)

    def _leave_out(self, event: Event, listeners: tuple[Listener, ...]) -> bool:
        behind = self.worker.submitted - self.worker.finished
        with self._lock:
            full = behind >= (_MOST_EVENTS // 2 if self._left_out else _MOST_EVENTS)
            before, self._left_out = self._left_out, self._left_out + 1 if full else 0
        if full and not before:
            log.warning("a listener is %d events behind; events are left out until it has caught up", behind)
        if before and not full:
            text = f"{before:,} events are omitted here: a listener was {_MOST_EVENTS:,} events behind."
            log.warning("%s", text)
            self.worker.submit(self._deliver, Notice(event.pool, text, "warning"), listeners)
        return full

    def flush(self, seconds: float = _DELIVERY) -> None:
        """Returns early if a listener is stuck."""
        self.worker.wait(self.worker.submitted, seconds)

    def close(self, seconds: float) -> None:
        self.worker.close(seconds)
        left_out, self._left_out = self._left_out, 0
        if left_out:
            log.warning("the last %d events were left out: a listener was too far behind", left_out)

    def _take(self, chunk: Chunk) -> None:
        try:
            for event in chunk.events(self.any()):
                relays = _relays(event)
                if relays and not self.worker.is_current():
                    self.emit(event)  # where nobody else listens, the user's handlers do
                    continue
                self.worker.go_on()
                if self.record is not None:
                    self.record(event)
                self._deliver(event, (*relays, *self._listeners))
        finally:
            chunk.taken()

    def _deliver(self, event: Event, listeners: tuple[Listener, ...]) -> None:
        for listener in listeners:
            if listener not in self._listeners and listener not in _RELAYS.values():
                continue  # it was removed meanwhile
            try:
                listener(event)
            except BaseException:  # the user's; the other listeners hear of the event all the same
                log.exception("a listener raised on %r", event)


class UserCode:
    def __init__(self) -> None:
        self.callbacks = Worker("skyward-callbacks", _PATIENCE)
        self.listeners = Listeners()

    def __enter__(self) -> UserCode:
        self.callbacks.open()
        self.listeners.worker.open()
        return self

    def __exit__(self, *exc: object) -> None:
        end = time.monotonic() + _CLOSING
        self.callbacks.close(_CLOSING)  # first: a callback may still make events
        self.listeners.close(max(0.1, end - time.monotonic()))

    def is_current(self) -> bool:
        return self.callbacks.is_current() or self.listeners.worker.is_current()


_CANCELLED = frozenset(("CANCELLED", "CANCELLED_AND_NOTIFIED"))
_ENDED = _CANCELLED | {"FINISHED"}


class _Unwaited(_thread.RLock):  # pyright: ignore[reportGeneralTypeIssues] - it can be subclassed, since Python 3.2
    """Replaces a future's condition, for which nobody waits: a tenth of its objects, which the garbage collector would
    visit.
    """

    __slots__ = ()
    notify_all = wait = staticmethod(bool)


class UserFuture(AwaitableFuture[T]):
    """Its callbacks run on the threads of `user`. Listeners get earlier events before a result is available."""

    def __init__(self, user: UserCode | None = None) -> None:
        # what `Future.__init__` would do, but for the condition
        self._condition: Any = _Unwaited()
        self._state = "PENDING"
        self._result = self._exception = None
        self._waiters, self._done_callbacks = list[Any](), list[Any]()
        self.user = user
        self.on_cancel: Callable[[], None] | None = None
        self._cancelling = threading.Lock()
        self._events = 0  # how many had been emitted when this future was settled
        self.sleepers: list[_Sleeper] = []  # of threads that wait, one each

    def done(self) -> bool:
        """Takes no lock, so Ctrl-C leaves none taken."""
        return self._state in _ENDED

    def cancelled(self) -> bool:
        return self._state in _CANCELLED

    def wait(self, timeout: float | None = None) -> bool:
        """Waits on its own lock: an interrupt could leave the future's condition taken, and block the I/O thread."""
        if not self.done():
            sleeper = _thread.allocate_lock()
            sleeper.acquire()
            self.sleepers.append(sleeper)
            try:
                if not self.done():
                    sleeper.acquire(True, -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
            finally:
                self.sleepers.remove(sleeper)
        return self.done()

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        user = self.user
        if user is None:
            super().add_done_callback(fn)
            return
        adding: int | None = threading.get_ident()

        def hand_over(future: Future[T]) -> None:
            if adding == threading.get_ident():
                fn(future)
            else:
                user.callbacks.submit(fn, future)

        super().add_done_callback(hand_over)
        adding = None

    def set_result(self, result: T) -> None:
        if self.user is not None:
            self._events = self.user.listeners.worker.submitted
        super().set_result(result)
        if self.sleepers:
            self._wake()

    def set_exception(self, exception: BaseException | None) -> None:
        if self.user is not None:
            self._events = self.user.listeners.worker.submitted
        super().set_exception(exception)
        self._wake()

    def result(self, timeout: float | None = None) -> T:
        if self._state != "FINISHED":
            self.wait(timeout)
            super().exception(0)
        self._prepare(timeout)
        found: Any = self._result
        return super().result() if self._exception is not None else found  # it has ended: no lock is needed

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.wait(timeout)
        super().exception(0)
        self._prepare(timeout)
        return super().exception()

    def cancel(self) -> bool:
        if not super().cancel():
            return False
        self._wake()
        if self._cancelling.acquire(blocking=False):  # of several threads one goes on
            try:
                if self._state == "CANCELLED":
                    self.set_running_or_notify_cancel()  # tells wait() and as_completed()
                on_cancel = self.on_cancel
                if on_cancel is not None:
                    on_cancel()
            except BaseException:
                self._cancelling.release()  # interrupted: the next cancel() does the rest
                raise
        return True

    def _wake(self) -> None:
        for sleeper in tuple(self.sleepers):  # those that wake take themselves off the list
            try:
                sleeper.release()
            except RuntimeError:
                pass  # it is awake

    def _load(self) -> None:
        """Makes the result ready, in the thread that asks for it."""

    def _events_are_heard(self) -> bool:
        return self.user is None or self.user.listeners.worker.finished >= self._events

    def _prepare(self, timeout: float | None) -> None:
        if self.user is not None:
            worker = self.user.listeners.worker
            if worker.finished < self._events:
                worker.wait(self._events, _DELIVERY if timeout is None else min(timeout, _DELIVERY))
        self._load()
        if self._exception is not None:
            self._exception = original(self._exception)


class _Sleeper(Protocol):
    def release(self) -> None: ...


class _Part:
    """Of several futures that a thread waits for, only the last wakes it."""

    __slots__ = ("_all_ended", "_once")

    def __init__(self, all_ended: Callable[[], None]) -> None:
        self._all_ended, self._once = all_ended, _thread.allocate_lock()

    def release(self) -> None:
        if self._once.acquire(False):
            self._all_ended()


def wait_for_all(futures: Sequence[UserFuture[Any]]) -> None:
    """As `UserFuture.wait`, with one wake-up."""
    sleeper, ended = _thread.allocate_lock(), itertools.count(1)
    sleeper.acquire()

    def count() -> None:
        if next(ended) == len(futures):
            sleeper.release()

    waiting: list[tuple[UserFuture[Any], _Part]] = []
    try:
        for future in futures:
            part = _Part(count)
            waiting.append((future, part))
            future.sleepers.append(part)
            if future.done():
                part.release()
        if futures:
            sleeper.acquire()
    finally:
        for future, part in waiting:
            if part in future.sleepers:
                future.sleepers.remove(part)


def when_done(future: Future[Any], act: Callable[[Future[Any]], object]) -> None:
    """Calls our function in the thread that settles the future; it must not block or raise."""
    Future.add_done_callback(future, act)


_MANY_THREADS = 64
_STUCK = 1.0  # a listener that is at one event for longer is waited for no more


class Worker:
    """Runs functions in order on a daemon thread. With `patience`, a longer one keeps its thread, and another
    continues.
    """

    def __init__(self, name: str, patience: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._patience, self._clock = name, patience, clock
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0  # threads that run no function
        self._turn = 0  # the number of the function that began last
        self._began: float | None = None  # when it began; None once it has ended
        self._closed = False
        self._told = False  # that many functions do not return
        self.submitted = 0
        self.finished = 0

    def submit(self, act: Callable[..., object], *args: Any) -> None:
        with self._changed:
            self._queue.append((act, args))
            self.submitted += 1
            self._grow()
            if self._began is None or len(self._queue) == 1:  # else a thread looks at the queue in time by itself
                self._changed.notify()

    def wait(self, count: int, seconds: float) -> bool:
        if self.finished >= count:
            return True
        if self.is_current():
            return False
        deadline = self._clock() + seconds
        with self._changed:
            while self.finished < count:
                now = self._clock()
                end = deadline if self._began is None else min(deadline, self._began + _STUCK)
                if end <= now:
                    return False
                self._changed.wait(min(end - now, _STUCK))  # nobody notifies of a function that begins
        return True

    def go_on(self) -> None:
        if self._began is not None:
            self._began = self._clock()

    def is_current(self) -> bool:
        return threading.current_thread() in self._threads

    def open(self) -> None:
        self._closed = False

    def close(self, seconds: float) -> None:
        deadline = self._clock() + seconds
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._threads - {threading.current_thread()}:
                left = deadline - self._clock()
                if left <= 0:
                    log.warning("%s: a callback or listener does not return; it is abandoned", self._name)
                    return
                self._changed.wait(left)

    def _grow(self) -> None:
        if self._queue and not self._idle and (self._patience is not None or not self._threads):
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._threads.add(thread)
            self._idle += 1
            try:
                thread.start()
            except RuntimeError:  # no thread can be started now; the next function that is submitted tries again
                log.warning("%s: no thread can be started", self._name)
                self._threads.discard(thread)
                self._idle -= 1

    def _work(self) -> None:
        # the I/O thread, which may have started this one, blocks signals; programs that a callback starts must not
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        with self._changed:
            while self._queue or not self._closed:
                pause = self._pause()
                if pause != 0:
                    self._changed.wait(pause)
                elif not self._run_next():
                    break
            self._idle -= 1
            self._threads.discard(threading.current_thread())
            self._changed.notify_all()

    def _pause(self) -> float | None:
        if not self._queue:
            return None
        if self._began is None:
            return 0
        return None if self._patience is None else max(0.0, self._began + self._patience - self._clock())

    def _run_next(self) -> bool:
        act, args = self._queue.popleft()
        self._turn += 1
        turn, self._began = self._turn, self._clock()
        self._idle -= 1
        if self._patience is not None:
            self._grow()
        many = len(self._threads) >= _MANY_THREADS and not self._told
        self._told = self._told or many
        self._changed.release()
        try:
            if many:
                log.warning(
                    "%s: %d done-callbacks have not returned. Each holds a thread until it returns; move "
                    "slow work to threads of your own.",
                    self._name,
                    _MANY_THREADS - 1,
                )
            act(*args)
        except BaseException:  # whatever it is, it is the user's: it ends neither this thread nor the pool
            log.exception("a callback or listener raised")
        finally:
            self._changed.acquire()
        self._idle += 1
        self.finished += 1
        current = turn == self._turn
        if current:
            self._began = None
        self._changed.notify_all()
        return current or self._idle == 1  # where no thread could be started, this one does the rest


class Deferred:
    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._ended = False

    def add(self, act: Callable[..., Any], *args: Any) -> None:
        self._calls.append((act, args))
        if self._ended:
            self.run()  # nobody else does it any more

    def run(self) -> None:
        while True:
            try:
                act, args = self._calls.popleft()
            except IndexError:
                return
            try:
                act(*args)
            except Exception:  # a bug of ours: what is left is done all the same
                log.exception("%r raised", act)
            del act, args  # or the last result of all would be kept until the next

    def end(self) -> None:
        self._ended = True
        self.run()
