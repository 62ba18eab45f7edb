"""Exceptions of other processes, rebuilt in the thread that asks for them: user code runs then, and may block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

__all__ = ["PackedError"]


class PackedError(Exception):
    """An exception that has come as bytes; `rebuild` gets the notes that were added here before it was rebuilt."""

    def __init__(self, rebuild: Callable[[Sequence[str]], BaseException]) -> None:
        super().__init__()
        self._rebuild = rebuild
        self._rebuilding = threading.RLock()  # of one thread twice: its code may ask for the same exception
        self._error: BaseException | None = None

    def rebuilt(self) -> BaseException:
        """The exception itself; the same one every time."""
        with self._rebuilding:
            if self._error is None:
                self._error = self._rebuild(tuple(getattr(self, "__notes__", ())))
            return self._error
