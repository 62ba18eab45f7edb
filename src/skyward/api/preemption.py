"""Whether this machine is about to be taken away, as a body sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Preemption", "announce", "preempted"]


@dataclass(frozen=True)
class Preemption:
    """The cloud takes this machine back at `deadline` (as of time.time())."""

    deadline: float

    @property
    def seconds_left(self) -> float:
        """How long the machine still has; 0 when its time is over."""
        return max(0.0, self.deadline - time.time())


def preempted() -> Preemption | None:
    """The notice that this machine will be taken away, once there is one: save what matters before its deadline."""
    return _notice


def announce(seconds: float) -> None:
    """Says that the machine goes in so many seconds; for the runner."""
    global _notice
    _notice = Preemption(time.time() + seconds)


_notice: Preemption | None = None
