"""Signals that would end the program at once, turned into an orderly way out of the with-block."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["OrderlyExit"]


class OrderlyExit:
    """While open, SIGTERM and SIGHUP raise SystemExit in the main thread, unless the program handles them itself."""

    def __enter__(self) -> OrderlyExit:
        global _open
        _open += 1
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, _leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        global _open
        _open -= 1
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                if signal.getsignal(number) is _leave:
                    signal.signal(number, handler)


_open = 0


def _leave(number: int, _: FrameType | None) -> None:
    if not _open:  # the last pool was closed by another thread, which could not put things back as they were
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    sys.exit(128 + number)
