"""What users hold of shared collections that processes wait at: SharedLock, SharedBarrier, SharedEvent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyward.errors import InvalidArgument, LockLost
from skyward.node.shared.channel import Channel
from skyward.node.shared.handles import Handle, checked_timeout

__all__ = ["SharedBarrier", "SharedEvent", "SharedLock"]


class SharedLock(Handle):
    """A lock that one call of the whole pool, or the client, holds at a time: `with sky.lock("x"): ...`

    It is not reentrant: who acquires it twice waits for itself. Whoever waits first gets it first. A holder that ends
    releases it: a call that returns, a process or node that is lost. `timeout` is how many seconds `with` waits at most
    (default: without a limit); `acquire` has its own.
    """

    kind = "lock"

    def __init__(self, name: str, channel: Callable[[], Channel], timeout: float | None = None) -> None:
        super().__init__(name, channel)
        self._timeout = checked_timeout(timeout)

    def acquire(self, timeout: float | None = None) -> int:
        """Waits for the lock, at most `timeout` seconds (None: without a limit), and returns its fencing token.

        Each holder has a larger token than all before. A store that refuses smaller ones than it has seen is safe from
        a holder that was given up for lost and goes on. Raises `sky.errors.SharedTimeout`, which says who holds it.
        """
        channel = self._channel()
        token = self._ask("acquire", [], None, checked_timeout(timeout))[0]
        channel.held[self.name] = token, channel.call()
        return token

    def release(self) -> None:
        """Lets the next one have it; raises LockLost if this process does not hold it (any more)."""
        held = self._channel().held.pop(self.name, None)
        if held is None:
            raise LockLost(f"lock '{self.name}' is not held by this process: acquire it first.")
        self._ask("release", [held[0]])

    def holder(self) -> str | None:
        """Who holds it at this moment ("rank 2", "the client"); None if nobody does."""
        found = self._ask("state", [])[0]
        return found and found[0]

    def locked(self) -> bool:
        """Whether somebody holds it at this moment."""
        return self.holder() is not None

    def __enter__(self) -> int:
        return self.acquire(self._timeout)

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _options(self) -> tuple[Any, ...]:
        return (self._timeout,)


class SharedBarrier(Handle):
    """A place where ranks wait for each other: `sky.barrier("epoch").wait()`. It can be passed again and again.

    It waits for all ranks of the pool, or for `parties` of whoever comes. If a rank is lost while others wait for it,
    or one gives up waiting, it raises `sky.errors.BarrierBroken` in all of them, which names the rank.
    """

    kind = "barrier"

    def __init__(self, name: str, channel: Callable[[], Channel], parties: int | None = None) -> None:
        super().__init__(name, channel)
        if parties is not None and (isinstance(parties, bool) or not isinstance(parties, int) or parties < 1):
            raise InvalidArgument(f"parties={parties!r}: a whole number, or None for all ranks of the pool.")
        self._parties = parties

    def wait(self, timeout: float | None = None) -> int:
        """Waits until all have come, at most `timeout` seconds (None: without a limit); says how many came before.

        Raises `sky.errors.SharedTimeout`, which says who is missing; the others get `sky.errors.BarrierBroken` then.
        """
        age = self._channel().age()
        return self._ask("wait", [self._parties, age], None, checked_timeout(timeout))[0]

    @property
    def waiting(self) -> int:
        """How many wait at this moment."""
        return self._ask("waiting", [])[0]

    def _options(self) -> tuple[Any, ...]:
        return (self._parties,)


class SharedEvent(Handle):
    """A flag that somebody sets and others wait for."""

    kind = "event"

    def set(self) -> None:
        """Sets it: all who wait go on, and who comes later does not wait."""
        self._ask("set", [])

    def clear(self) -> None:
        """Takes it back: who comes from now on waits."""
        self._ask("clear", [])

    def is_set(self) -> bool:
        """Whether it is set at this moment."""
        return self._ask("is_set", [])[0]

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it is set, at most `timeout` seconds (None: without a limit)."""
        self._ask("wait", [], None, checked_timeout(timeout))
