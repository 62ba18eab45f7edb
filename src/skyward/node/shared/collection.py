"""What all kinds of shared collections have in common: questions, replies, and questions that wait.

No clock, socket or thread here. Each method `do_...` is one operation: it is told who asks, and returns replies. An
asker that is not among the replies waits. Keys are texts, values are bytes; nothing is unpickled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

__all__ = ["Asker", "Collection", "Refused", "Reply", "Request", "Surroundings", "done", "seconds"]


@dataclass(eq=False, slots=True)
class Asker:
    """A process that uses collections."""

    name: str
    label: str = "a process"
    rank: int | None = None


@dataclass(eq=False, slots=True)
class Request:
    """One question of a process."""

    asker: Asker
    id: int
    arguments: list[Any]
    values: list[bytes]
    since: float
    """When it came."""
    timeout: float | None = None
    """How long it may wait; None: as long as it takes."""


@dataclass
class Surroundings:
    """What the collections of a pool share."""

    ranks: int = 1
    """How many ranks the pool has."""
    losses: dict[int, tuple[float, str]] = field(default_factory=dict[int, tuple[float, str]])
    """When ranks were lost last, and why."""


Reply = tuple[Request, str, Any, list[bytes]]
"""Who is answered, an error code or nothing, the result, and values."""


class Refused(Exception):
    """An operation that cannot be done; code and text of the answer."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


def done(request: Request, result: Any = None, values: list[bytes] | None = None) -> Reply:
    """The answer to a question."""
    return request, "", result, values or []


def seconds(value: float) -> str:
    """A time for people."""
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


class Collection:
    """What all kinds have: a name, a size in bytes, and questions that wait."""

    kind: ClassVar[str]
    lasting: ClassVar[bool] = True
    """Whether it is kept when nobody waits there."""

    def __init__(self, name: str, around: Surroundings) -> None:
        self.name, self.around = name, around
        self.size = 0
        self.waiting: deque[Request] = deque()

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}'"

    def late(self, request: Request) -> tuple[str | list[int], list[Reply]]:
        """The time-out of a question is over: says why it has waited, and who else is answered."""
        raise NotImplementedError

    def leave(self, request: Request, why: str) -> list[Reply]:
        """Takes a waiting question away; returns answers for others."""
        self.waiting.remove(request)
        return []

    def gone(self, asker: Asker, now: float) -> list[Reply]:
        """A process has ended; what it waited for was taken away before."""
        return []

    def lost(self, rank: int, why: str) -> list[Reply]:
        """A rank was lost."""
        return []
