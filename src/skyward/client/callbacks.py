"""Runs users' functions (done-callbacks, event listeners) on threads of their own: none of them holds up a pool.

I/O thread --settles a future--> Worker "skyward-callbacks" --> the future's done-callbacks
any thread --emits an event----> Worker "skyward-events" -----> every listener, in order
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from skyward.api.futures import AwaitableFuture
from skyward.client import logs
from skyward.client.output_lines import Chunk
from skyward.client.worker import Worker
from skyward.events import Event, KeepEnd, Log, Warned
from skyward.transport.exceptions import PackedError

__all__ = ["Listener", "Listeners", "UserCode", "UserFuture", "when_done"]

log = logging.getLogger("skyward.callbacks")

T = TypeVar("T")
Listener = Callable[[Event], None]

_PATIENCE = 0.5  # a done-callback that runs for longer no longer holds up the others
_DELIVERY = 10.0  # a result waits at most so long for slow listeners to hear what came before it
_LAG = 0.1
_MOST_EVENTS = 100_000
_CLOSING = 2.0


def _relay_warning(event: Warned) -> None:
    from skyward.client.python_warnings import relay  # most bodies warn of nothing

    relay(event)


_RELAYS: dict[type[Event], Any] = {Log: logs.relay, Warned: _relay_warning}


def _relays(event: Event) -> tuple[Listener, ...]:
    """Who hears of it before listeners do: what this program has set up for its own records and warnings."""
    relay = _RELAYS.get(type(event))
    return () if relay is None else (relay,)


class Listeners:
    """Who hears of events: each listener hears every event in order, on one thread."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self.record: Listener | None = None  # hears of everything at once, in any thread: it only keeps it
        self.record_end: KeepEnd | None = None  # the same for calls that have ended, if nobody else listens
        self._lock = threading.Lock()
        self._dropped = 0
        self.worker = Worker("skyward-events")

    def add(self, listener: Listener) -> Callable[[], None]:
        """Has `listener` called with every event from now on; returns a function that ends this."""
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
        """Whether anybody listens."""
        return bool(self._listeners) or self.record is not None

    def wants(self) -> bool | KeepEnd:
        """Whether somebody hears events of calls; if a history alone is kept, what it is given when one ends."""
        return True if self._listeners else self.record_end or False

    def emit(self, event: Event | Chunk) -> None:
        """Passes an event on to the listeners' thread; waits for a moment if they are very far behind."""
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
        if worker.submitted - worker.finished >= _MOST_EVENTS and not worker.wait(
            worker.submitted - _MOST_EVENTS + 1, _LAG
        ):
            if not self._dropped:
                log.warning("a listener is %d events behind; further events are dropped", _MOST_EVENTS)
            self._dropped += 1
            return
        self._dropped = 0
        worker.submit(self._deliver, event, listeners)

    def flush(self, seconds: float = _DELIVERY) -> None:
        """Waits until listeners have heard everything that was emitted so far, unless one of them is stuck."""
        self.worker.wait(self.worker.submitted, seconds)

    def _take(self, chunk: Chunk) -> None:
        """Takes output apart, and has listeners hear of it."""
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
    """The threads on which a pool runs its user's functions; they end when the block is left."""

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
        self.listeners.worker.close(max(0.1, end - time.monotonic()))

    def is_current(self) -> bool:
        """Whether the caller is a callback or a listener."""
        return self.callbacks.is_current() or self.listeners.worker.is_current()


_CANCELLED = frozenset(("CANCELLED", "CANCELLED_AND_NOTIFIED"))
_ENDED = _CANCELLED | {"FINISHED"}


class UserFuture(AwaitableFuture[T]):
    """A future in a user's hands: its callbacks run on the threads of `user`, not in the thread that settles it.

    Whoever asks for its result does so after listeners have heard the events that came before it.
    """

    def __init__(self, user: UserCode | None = None) -> None:
        super().__init__()
        self.user = user
        self.on_cancel: Callable[[], None] | None = None
        self._cancelling = threading.Lock()
        self._events = 0  # how many had been emitted when this future was settled
        self._sleepers: list[_thread.LockType] = []  # of threads that wait, one each

    def done(self) -> bool:
        """Whether it has ended; takes no lock, so that Ctrl-C at any moment leaves none taken."""
        return self._state in _ENDED

    def cancelled(self) -> bool:
        """Whether it was cancelled; as `done`."""
        return self._state in _CANCELLED

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it has ended; False if that took longer.

        It waits on a lock of its own. On the future's condition, an interrupt at the wrong moment would leave that
        taken, and with it whoever settles the future: the thread that reads the links.
        """
        if not self.done():
            sleeper = _thread.allocate_lock()
            sleeper.acquire()
            self._sleepers.append(sleeper)
            if not self.done():
                sleeper.acquire(True, -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
        return self.done()

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Has `fn` called on a thread for callbacks; at once and in this thread if the future is done."""
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
        """Sets the result; does not wait for callbacks."""
        self._note_events()
        super().set_result(result)
        self._wake()

    def set_exception(self, exception: BaseException | None) -> None:
        """Sets the exception; does not wait for callbacks."""
        self._note_events()
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
        """Cancels what the future stands for; False if it has ended already."""
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
        for sleeper in self._sleepers:
            try:
                sleeper.release()
            except RuntimeError:
                pass  # it is awake

    def _load(self) -> None:
        """Makes the result ready for whoever asks for it, in their thread."""

    def _events_are_heard(self) -> bool:
        return self.user is None or self.user.listeners.worker.finished >= self._events

    def _prepare(self, timeout: float | None) -> None:
        if self.user is not None:
            worker = self.user.listeners.worker
            if worker.finished < self._events:
                worker.wait(self._events, _DELIVERY if timeout is None else min(timeout, _DELIVERY))
        self._load()
        if isinstance(self._exception, PackedError):
            self._exception = self._exception.rebuilt()

    def _note_events(self) -> None:
        if self.user is not None:
            self._events = self.user.listeners.worker.submitted


def when_done(future: Future[Any], act: Callable[[Future[Any]], object]) -> None:
    """Calls a function of ours, which neither blocks nor raises, in the very thread that settles the future."""
    Future.add_done_callback(future, act)
