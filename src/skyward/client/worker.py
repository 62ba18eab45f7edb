"""A thread that runs functions one at a time, in order; one that takes long does not hold up the others, if so told."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Worker"]

log = logging.getLogger("skyward.callbacks")

_MOST_THREADS = 64
_STUCK = 1.0  # a listener that is at one event for longer is waited for no more


class Worker:
    """Runs functions one at a time, in order, on a daemon thread that starts with the first one.

    One thread rather than several: callbacks of a pool do not run at the same time, so they need no locks of their
    own. With `patience`, a function that runs for longer is left to its thread, and another thread does the rest.
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
        self.submitted = 0
        self.finished = 0

    def submit(self, act: Callable[..., object], *args: Any) -> None:
        """Has a function run; returns at once."""
        with self._changed:
            self._queue.append((act, args))
            self.submitted += 1
            self._grow()
            if self._began is None or len(self._queue) == 1:  # else a thread looks at the queue in time by itself
                self._changed.notify()

    def wait(self, count: int, seconds: float) -> bool:
        """Waits until `count` functions have ended; not at all for one that seems to be stuck."""
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
        """Says, in a function that does many things, that one more of them begins: it is not stuck."""
        if self._began is not None:
            self._began = self._clock()

    def is_current(self) -> bool:
        """Whether the caller is one of the functions that run here."""
        return threading.current_thread() in self._threads

    def open(self) -> None:
        """Keeps threads that have nothing to do."""
        self._closed = False

    def close(self, seconds: float) -> None:
        """Runs what is left and ends the threads; leaves behind what takes longer than `seconds`."""
        deadline = self._clock() + seconds
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._threads - {threading.current_thread()}:
                left = deadline - self._clock()
                if left <= 0:
                    log.warning("%s: a callback or listener does not return; it is left behind", self._name)
                    return
                self._changed.wait(left)

    def _grow(self) -> None:
        """Starts a thread if there is work and none is free for it, or none would be when the running one is stuck."""
        most = 1 if self._patience is None else _MOST_THREADS
        if self._queue and not self._idle and len(self._threads) < most:
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
        """How long to wait before the next function may begin; None means until something changes."""
        if not self._queue:
            return None
        if self._began is None:
            return 0
        return None if self._patience is None else max(0.0, self._began + self._patience - self._clock())

    def _run_next(self) -> bool:
        """Runs a function, with the lock released; False if another thread has gone on meanwhile."""
        act, args = self._queue.popleft()
        self._turn += 1
        turn, self._began = self._turn, self._clock()
        self._idle -= 1
        if self._patience is not None:
            self._grow()
        self._changed.release()
        try:
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
        return current
