"""Closes pools that nobody closes: a dropped one in the background, the others when the interpreter ends.

The pool's threads refer to it weakly, or it would never be dropped.
"""

from __future__ import annotations

import _thread
import atexit

# Not used here: boto3 and others import it when a pool is opened, and after the main thread's end that fails.
import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport]
import itertools
import logging
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar

from skyward.errors import ForkedPoolError, NestedPoolError, PoolClosed, SkywardError

__all__ = [
    "PAGE_NOTICE",
    "OrderlyExit",
    "PoolState",
    "Reference",
    "begin",
    "check_threads",
    "drop",
    "end",
    "is_ending",
    "no_core_dumps",
    "notify_watchers",
    "stopping_pools",
    "watching_pools",
]


T = TypeVar("T")
P = ParamSpec("P")

log = logging.getLogger("skyward.pool")

_NOWHERE = 1000  # frames up from where a warning is given: no line of the program is to blame
_ADVICE = "use `with sky.ComputePool(...) as pool:`, or call pool.close()."


class Closable(Protocol):
    def close(self) -> None: ...


class Reference(Generic[T]):
    def __init__(self, target: T) -> None:
        self.renew(target)

    def renew(self, target: T) -> None:
        """The garbage collector clears references before it calls `__del__`."""
        self._target = weakref.ref(target)

    def call(self, method: Callable[Concatenate[T, P], None]) -> Callable[P, None]:
        def act(*args: P.args, **kwargs: P.kwargs) -> None:
            target = self._target()
            if target is not None:
                method(target, *args, **kwargs)

        return act

    def ask(self, method: Callable[[T], object]) -> Callable[[], object]:
        def answer() -> object:
            target = self._target()
            return target is not None and method(target)

        return answer


_ending = False
_count = itertools.count()
_open: weakref.WeakValueDictionary[int, Closable] = weakref.WeakValueDictionary()
_dropped: set[Closable] = set()
_after_fork: dict[int, Callable[[], None]] = {}
_guarded: list[int] = []  # the limit of core dumps that there was, once for each pool that is open
_guarding = threading.Lock()


def check_threads() -> None:
    """Raises if the interpreter is too near its end to start threads."""
    try:
        threading.Thread(target=int, daemon=True).start()
    except RuntimeError as exc:
        raise SkywardError(
            f"a pool cannot be opened now: it needs threads, and Python starts no more of them ({exc}), since the "
            "program is ending. Wait for the thread that opens the pool, thread.join(), before the main thread ends."
        ) from exc


@contextmanager
def no_core_dumps() -> Generator[None]:
    import resource  # pools on this computer do not need it

    with _guarding:
        soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
        _guarded.append(_guarded[0] if _guarded else soft)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        yield
    finally:
        with _guarding:
            before = _guarded.pop()
            soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
            if not _guarded and soft == 0:  # else the program has set another one meanwhile
                with suppress(ValueError):  # it may no longer have as much
                    resource.setrlimit(resource.RLIMIT_CORE, (before, hard))


def begin(pool: Closable, after_fork: Callable[[], None]) -> int:
    """Closes a pool when the interpreter ends, before what was there when it was opened; returns a number for `end`.
    `after_fork` is called in forked children.
    """
    number = next(_count)
    _open[number] = pool
    _after_fork[number] = after_fork
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    return number


def end(number: int) -> None:
    _open.pop(number, None)
    _after_fork.pop(number, None)


def is_ending() -> bool:
    return _ending


def drop(pool: Closable) -> None:
    text = f"{pool!r} was dropped without being closed; {_ADVICE}"
    _dropped.add(pool)
    try:
        # not threading.Thread: the garbage collector may have interrupted `threading` itself, with its lock held
        _thread.start_new_thread(_close_soon, (pool,))
    except RuntimeError:
        pass  # the interpreter ends: _close_all does it, or the processes beside us that notice our end
    warnings.warn(text, ResourceWarning, stacklevel=3, source=pool)


def _close_soon(pool: Closable) -> None:
    try:
        threading.Thread(target=_close, args=(pool,), name="skyward-close", daemon=True).start()
    except RuntimeError:
        pass  # as above


def _close(pool: Closable) -> None:
    try:
        pool.close()
    except Exception:
        log.exception("%r was dropped without being closed, and closing it failed", pool)
    finally:
        _dropped.discard(pool)


def _close_all() -> None:
    global _ending
    _ending = True
    pools = [pool for _, pool in sorted(_open.items())]
    if pools or _dropped:
        _hush_threads()
    with ExitStack() as stack:
        for pool in list(_dropped):
            stack.callback(pool.close)
        for pool in pools:
            stack.callback(pool.close)
            if pool not in _dropped:
                text = f"{pool!r} was not closed before the end of the program; {_ADVICE}"
                stack.callback(warnings.warn, text, ResourceWarning, _NOWHERE, pool)


def _hush_threads() -> None:
    """Python silently ends daemon threads that use a pool; that the pool ends first is no news."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, PoolClosed):
            before(args)

    threading.excepthook = hook


def _in_child() -> None:
    for act in list(_after_fork.values()):
        act()
    for known in (_open, _dropped, _after_fork):
        known.clear()
    global _guarding
    _guarding = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_in_child)


class OrderlyExit:
    """SIGTERM and SIGHUP raise SystemExit in the main thread, unless the program handles them."""

    def __enter__(self) -> OrderlyExit:
        global _handled
        _handled += 1
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, _leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        global _handled
        _handled -= 1
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                if signal.getsignal(number) is _leave:
                    signal.signal(number, handler)


_handled = 0


def _leave(number: int, _: FrameType | None) -> None:
    if not _handled:  # the last pool was closed by another thread, which could not put things back as they were
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    sys.exit(128 + number)


PAGE_NOTICE = "its page, for one browser: "
"""How the notice with the page's address begins; the address works once, for whoever opened the pool."""

_heard: list[Callable[[object], None]] = []
_watching: list[Callable[[object], None]] = []


@contextmanager
def stopping_pools(heard: Callable[[object], None]) -> Generator[None]:
    """No pool opens in this process inside the block: `heard` gets each, and its program ends there."""
    _heard.append(heard)
    try:
        yield
    finally:
        _heard.remove(heard)


@contextmanager
def watching_pools(watcher: Callable[[object], None]) -> Generator[None]:
    _watching.append(watcher)
    try:
        yield
    finally:
        _watching.remove(watcher)


def notify_watchers(pool: object) -> None:
    """Stops the program here if pools are not to be opened."""
    for watcher in _watching:
        watcher(pool)
    if _heard:
        _heard[-1](pool)
        raise SystemExit(0)  # itself, no subclass: threads end without a word then


class PoolState:
    def __init__(self) -> None:
        self.now: Literal["new", "opening", "open", "closing", "closed"] = "new"
        self.pid = os.getpid()
        self.began = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._doer: threading.Thread | None = None  # which opens or closes it
        self._unwanted = False

    @property
    def is_ours(self) -> bool:
        return os.getpid() == self.pid

    def begin_opening(self, allow_nested: bool) -> None:
        self.check_process()
        if "COMPUTE_POOL" in os.environ and not allow_nested:
            raise NestedPoolError(
                "this code runs on a node of a pool already; a body that opens a pool of its own could start "
                "machines without end. If you mean it, pass ComputePool(..., allow_nested=True)."
            )
        with self._lock:
            if self.now not in ("new", "closed"):
                raise PoolClosed(f"the pool is {self.now} already; make another ComputePool for a second block.")
            self.now, self.pid, self.began = "opening", os.getpid(), time.time()
            self._doer, self._unwanted = threading.current_thread(), False
            self._over.clear()

    def check_wanted(self) -> None:
        if self._unwanted:
            raise PoolClosed(
                "the pool was closed while it was opening, by another thread or a listener; what was started for it "
                "was ended. Open it again if you need it."
            )

    @contextmanager
    def opened(self) -> Generator[None]:
        with self._lock:
            self.check_wanted()
            yield
            self.now = "open"

    def begin_closing(self, waits: bool) -> bool:
        """Whether the caller has to close the pool; if another thread opens or closes it, and `waits`, this waits.

        A pool that is opening is closed by the thread that opens it, after its current step.
        """
        if not self.is_ours:
            return False  # a forked child: nothing here belongs to it
        with self._lock:
            if self.now == "open":
                self.now, self._doer = "closing", threading.current_thread()
                self._over.clear()
                return True
            self._unwanted = self._unwanted or self.now == "opening"
        if self.now in ("opening", "closing") and waits and threading.current_thread() is not self._doer:
            self._over.wait()
        return False

    def end_closing(self) -> None:
        self.now = "closed"
        self._over.set()

    def check_open(self) -> None:
        self.check_process()
        if self.now != "open":
            raise PoolClosed(
                f"the pool is {'not open yet' if self.now in ('new', 'opening') else self.now}; "
                "calls are sent inside `with sky.ComputePool(...) as pool:`."
            )

    def check_process(self) -> None:
        if not self.is_ours and self.now != "new":
            raise ForkedPoolError(
                f"this pool was opened by process {self.pid}, of which this one ({os.getpid()}) is a fork. "
                "Use it there, or open another pool here."
            )
