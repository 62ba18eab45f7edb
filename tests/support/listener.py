"""Keeps the events of a pool for tests to look at."""

from __future__ import annotations

from typing import Any

import skyward as sky
from skyward import events

__all__ = ["Listener"]


class Listener:
    """The events of a pool, in the order in which they came."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self.events: list[events.Event] = []
        self.stop = pool.on_event(self.events.append)

    def of(self, *kinds: type[events.Event]) -> list[Any]:
        """The events of these kinds."""
        return [event for event in list(self.events) if isinstance(event, kinds)]

    @property
    def output(self) -> list[events.Output]:
        """The events that carry output."""
        return self.of(events.Output)

    def lines(self, stream: str | None = None, progress: bool = False) -> list[str]:
        """Printed lines, of one stream or of both."""
        return [e.text for e in self.output if e.progress is progress and stream in (None, e.stream)]

    def notices(self) -> str:
        """Everything that was said to the user."""
        return "\n".join(e.text for e in self.of(events.Notice))
