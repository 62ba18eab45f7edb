"""Which pages are open, by their keys, and which of them have shown how the pool ended."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["Streams"]

_MOST = 32
_TOLD = 2.0  # seconds for writing the last state to all pages: far more than that takes
_SHOWN = 0.5  # seconds for pages to ask for the lists that belong to it


class Streams:
    """Streams of events to pages: woken when there is something to be said at once."""

    def __init__(self) -> None:
        self.woken = 0
        """How often all were woken: 0 until the pool, or the page, has ended."""
        self._open: Counter[str] = Counter()
        self._told: set[str] = set()
        self._shown: set[str] = set()
        self._change = threading.Condition()

    def begin(self, key: str) -> bool:
        """One more; False if there are too many."""
        with self._change:
            if self._open.total() >= _MOST:
                return False
            self._open[key] += 1
            return True

    def end(self, key: str) -> None:
        """One less."""
        with self._change:
            self._open[key] -= 1
            self._open += Counter()  # those with none are left out
            self._change.notify_all()

    def pause(self, woken: int, seconds: float) -> None:
        """Waits so long, or until all are woken once more than that."""
        with self._change:
            self._change.wait_for(lambda: self.woken != woken, seconds)

    def tell(self, key: str) -> None:
        """The last state was written to a page."""
        self._mark(self._told, key)

    def show(self, key: str) -> None:
        """A page says that it has all that it needs to show the last state."""
        self._mark(self._shown, key)

    def _mark(self, which: set[str], key: str) -> None:
        with self._change:
            which.add(key)
            self._change.notify_all()

    def wake(self) -> None:
        """Has all of them look at once."""
        with self._change:
            self._told, self._shown = set(), set()
            self.woken += 1
            self._change.notify_all()

    def wait_shown(self) -> None:
        """Waits shortly until all pages show the last state; at once if none is open."""
        with self._change:
            if self._change.wait_for(lambda: self._open.keys() <= self._told, _TOLD):
                self._change.wait_for(lambda: self._open.keys() <= self._shown, _SHOWN)

    def wait_ended(self) -> None:
        """Waits shortly until no stream is open."""
        with self._change:
            self._change.wait_for(lambda: not self._open, _SHOWN)
