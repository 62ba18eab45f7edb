"""`sky.dict(name)` and the others, in bodies; `pool.dict(name)` and the others, on the client."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from skyward.api.info import VARIABLE
from skyward.errors import PoolClosed, SharedError

if TYPE_CHECKING:  # imported when a collection is used: every runner and every client imports this file
    from skyward.node.shared.channel import Channel
    from skyward.node.shared.handles import (
        Handle,
        SharedBarrier,
        SharedCounter,
        SharedDict,
        SharedEvent,
        SharedLock,
        SharedQueue,
        SharedSet,
    )

__all__ = [
    "Collections",
    "attached",
    "barrier",
    "counter",
    "current_channel",
    "dict",
    "event",
    "lock",
    "queue",
    "serve_by",
    "set",
]

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class Collections:
    """The shared collections of one pool, by name."""

    def _shared_channel(self) -> Channel:
        raise NotImplementedError

    @overload
    def dict(self, name: str) -> SharedDict[Any, Any]: ...
    @overload
    def dict(self, name: str, keys: type[K], values: type[V]) -> SharedDict[K, V]: ...
    def dict(self, name: str, keys: Any = None, values: Any = None) -> SharedDict[Any, Any]:
        """The shared dict of this name. `keys` and `values` are for type checkers."""
        from skyward.node.shared.handles import SharedDict

        return SharedDict(name, self._shared_channel)

    @overload
    def set(self, name: str) -> SharedSet[Any]: ...
    @overload
    def set(self, name: str, members: type[T]) -> SharedSet[T]: ...
    def set(self, name: str, members: Any = None) -> SharedSet[Any]:
        """The shared set of this name. `members` is for type checkers."""
        from skyward.node.shared.handles import SharedSet

        return SharedSet(name, self._shared_channel)

    def counter(self, name: str) -> SharedCounter:
        """The shared counter of this name."""
        from skyward.node.shared.handles import SharedCounter

        return SharedCounter(name, self._shared_channel)

    @overload
    def queue(self, name: str, *, maxsize: int | None = None) -> SharedQueue[Any]: ...
    @overload
    def queue(self, name: str, items: type[T], *, maxsize: int | None = None) -> SharedQueue[T]: ...
    def queue(self, name: str, items: Any = None, *, maxsize: int | None = None) -> SharedQueue[Any]:
        """The shared queue of this name. `items` is for type checkers. `maxsize`: items before `put` waits; 0 for any
        number, None for whatever it has.
        """
        from skyward.node.shared.handles import SharedQueue

        return SharedQueue(name, self._shared_channel, maxsize)

    def lock(self, name: str, *, timeout: float | None = None) -> SharedLock:
        """The shared lock of this name; `with` waits for it at most `timeout` seconds (None: without a limit)."""
        from skyward.node.shared.handles import SharedLock

        return SharedLock(name, self._shared_channel, timeout)

    def barrier(self, name: str, parties: int | None = None) -> SharedBarrier:
        """The shared barrier of this name, for all ranks, or for so many `parties`."""
        from skyward.node.shared.handles import SharedBarrier

        return SharedBarrier(name, self._shared_channel, parties)

    def event(self, name: str) -> SharedEvent:
        """The shared event of this name."""
        from skyward.node.shared.handles import SharedEvent

        return SharedEvent(name, self._shared_channel)


_served: Callable[[], Channel] | None = None


def serve_by(channel: Callable[[], Channel]) -> None:
    global _served
    _served = channel


def current_channel() -> Channel:
    if _served is not None:
        return _served()
    if os.environ.get(VARIABLE):
        raise SharedError(
            "shared collections can be used in the process that runs the body, not in others that it has started. Use "
            "them in the body, or in threads of it."
        )
    from skyward.api.compute import innermost

    try:
        pool: Any = innermost()
    except PoolClosed:
        raise PoolClosed(
            "sky.dict(...) and the other shared collections belong to a pool, and none is open here. Use them in a "
            "body that runs in a pool, or pool.dict(...) inside `with sky.ComputePool(...) as pool:`."
        ) from None
    return pool._shared_channel()


class _Here(Collections):
    def _shared_channel(self) -> Channel:
        return current_channel()


_here = _Here()
dict = _here.dict
set = _here.set
counter = _here.counter
queue = _here.queue
lock = _here.lock
barrier = _here.barrier
event = _here.event


def attached(kind: type[Handle], name: str, *options: Any) -> Handle:
    return kind(name, current_channel, *options)
