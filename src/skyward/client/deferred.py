"""What is done later, when no lock is held: futures are settled and events handed over."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Deferred"]

log = logging.getLogger("skyward.engine")


class Deferred:
    """A queue of calls, filled by any thread and done by one."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._ended = False

    def add(self, act: Callable[..., Any], *args: Any) -> None:
        """Has something done later; it must not block."""
        self._calls.append((act, args))
        if self._ended:
            self.run()  # nobody else does it any more

    def run(self) -> None:
        """Does everything that was added."""
        while True:
            try:
                act, args = self._calls.popleft()
            except IndexError:
                return
            try:
                act(*args)
            except Exception:  # a bug of ours: what is left is done all the same
                log.exception("%r raised", act)

    def end(self) -> None:
        """Does everything that was added; from now on, whoever adds something does it."""
        self._ended = True
        self.run()
