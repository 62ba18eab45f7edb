"""Who reads a runner's socket: its main thread while it is idle, a helper thread once a body takes longer.

This costs one wake-up per call. Each method of `Turn` is one step, and returns what to do. Pure.
"""

from __future__ import annotations

import threading
from typing import Literal

__all__ = ["TICK", "Turn"]

TICK = 0.01  # seconds


class Turn:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.helps = True  # whether the helper reads: it does while hooks are entered, which may need messages
        self.running = False  # whether the main thread runs a body
        self._waits = False  # whether it waits for what the helper hears
        self._body = self._seen = 0  # the number of the body, and when the helper looked last
        self._rests = self._hurries = False

    # the main thread

    def begin(self) -> bool:
        """Whether the helper must be woken, to look at it later."""
        with self._lock:
            self.running, self._waits = True, False
            self._body += 1
            woken, self._rests = self._rests, False
            return woken

    def may_read(self) -> bool:
        """False if a body runs or the helper reads."""
        with self._lock:
            self.running = self._hurries = False
            self._waits = self.helps
            return not self.helps

    def hurry(self) -> bool:
        """The body may wait for an answer; whether the helper must be woken."""
        with self._lock:
            self._hurries = self.running and not self.helps
            self._rests = self._rests and not self._hurries
            return self._hurries

    # the helper

    def look(self) -> Literal["read", "rest", "again"]:
        with self._lock:
            unchanged, self._seen = self._body == self._seen, self._body
            if self.running:
                self.helps = unchanged or self._hurries
                return "read" if self.helps else "again"
            self._rests = unchanged
            return "rest" if unchanged else "again"

    def hand_back(self) -> bool:
        """Whether the main thread reads from now on, and must be woken."""
        with self._lock:
            if not self._waits:
                return False
            self.helps = self._waits = False
            return True
