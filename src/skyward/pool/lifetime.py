"""Pools that nobody closes: one that is dropped is closed in the background, the others when the interpreter ends.

What a pool's own threads and its closing hold of it is a `Reference`, which is weak: otherwise no pool would ever be
found to be dropped.
"""

from __future__ import annotations

import _thread
import atexit

# Not used here: boto3 and others import it when a pool is opened, and after the main thread's end that fails.
import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport]
import itertools
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

from skyward.errors import PoolClosed, SkywardError

__all__ = ["Closable", "Reference", "begin", "check_threads", "drop", "end"]

T = TypeVar("T")
P = ParamSpec("P")

log = logging.getLogger("skyward.pool")

_NOWHERE = 1000  # frames up from where a warning is given: no line of the program is to blame
_ADVICE = "use `with sky.ComputePool(...) as pool:`, or call pool.close()."


class Closable(Protocol):
    """What is closed here: a pool."""

    def close(self) -> None: ...


class Reference(Generic[T]):
    """Calls methods of an object without keeping it alive."""

    def __init__(self, target: T) -> None:
        self.renew(target)

    def renew(self, target: T) -> None:
        """Refers to the object again: the garbage collector clears references before it calls `__del__`."""
        self._target = weakref.ref(target)

    def call(self, method: Callable[Concatenate[T, P], None]) -> Callable[P, None]:
        """A function that calls the method of the object, for as long as there is one."""

        def act(*args: P.args, **kwargs: P.kwargs) -> None:
            target = self._target()
            if target is not None:
                method(target, *args, **kwargs)

        return act

    def ask(self, method: Callable[[T], object]) -> Callable[[], object]:
        """A function that says what the method does; False when there is no object any more."""

        def answer() -> object:
            target = self._target()
            return target is not None and method(target)

        return answer


_count = itertools.count()
_open: weakref.WeakValueDictionary[int, Closable] = weakref.WeakValueDictionary()
_dropped: set[Closable] = set()
_after_fork: dict[int, Callable[[], None]] = {}


def check_threads() -> None:
    """Raises if the interpreter is so near its end that it starts no more threads, before anything else is started."""
    try:
        threading.Thread(target=int, daemon=True).start()
    except RuntimeError as exc:
        raise SkywardError(
            f"a pool cannot be opened now: it needs threads, and Python starts no more of them ({exc}), since the "
            "program is ending. Wait for the thread that opens the pool, thread.join(), before the main thread ends."
        ) from exc


def begin(pool: Closable, after_fork: Callable[[], None]) -> int:
    """Has a pool closed when the interpreter ends, before whatever was there when it was opened; a number for `end`.

    `after_fork` is called in forked children, which have nothing to close.
    """
    number = next(_count)
    _open[number] = pool
    _after_fork[number] = after_fork
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    return number


def end(number: int) -> None:
    """The pool is closed."""
    _open.pop(number, None)
    _after_fork.pop(number, None)


def drop(pool: Closable) -> None:
    """Closes a pool that nobody refers to any more, in the background; called by its `__del__`."""
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
    """Closes what is open when the interpreter ends, the latest first; the failure of one does not stop the others."""
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
    """Daemon threads that use a pool are ended by Python without a word; that their pool ends first is no news."""
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


os.register_at_fork(after_in_child=_in_child)
