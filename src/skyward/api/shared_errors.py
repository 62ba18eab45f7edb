"""What can go wrong with shared collections."""

from __future__ import annotations

from skyward.api.base_errors import SkywardError

__all__ = ["BarrierBroken", "LockLost", "SharedError", "SharedLost", "SharedTimeout", "SharedTooLarge"]


class SharedError(SkywardError):
    """Something that a shared collection did not do."""


class SharedTimeout(SharedError, TimeoutError):
    """Nothing came within the time-out; says who holds the lock, or who is missing at the barrier."""


class BarrierBroken(SharedError, RuntimeError):
    """The barrier cannot be passed: a rank was lost, or has given up waiting. `rank` is its number, if it has one."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.message, self.rank = message, rank

    def __str__(self) -> str:
        return self.message


class LockLost(SharedError, RuntimeError):
    """The lock is not held by this process any more: another one may have held it since."""


class SharedLost(SharedError):
    """The collections of this pool are empty again: node 0, which kept them, was lost or restarted."""


class SharedTooLarge(SharedError, ValueError):
    """A value is larger than collections take, or they are full."""
