"""The same work for several things at once, in threads; also while the interpreter shuts down."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

__all__ = ["each", "spread"]

T = TypeVar("T")
R = TypeVar("R")

_MOST = 64


def spread(act: Callable[[T], R], items: Sequence[T], most: int = _MOST) -> list[Future[R]]:
    """Runs `act` for every item, `most` at a time; without threads (Python 3.12 in atexit handlers), here."""
    futures: list[Future[R]] = [Future() for _ in items]
    left = deque(zip(futures, items, strict=True))

    def work() -> None:
        while True:
            try:
                future, item = left.popleft()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(act(item))
                except BaseException as exc:  # whoever asks for the result gets it
                    future.set_exception(exc)

    for _ in range(min(most, len(items))):
        try:
            threading.Thread(target=work, name="skyward-parallel", daemon=True).start()
        except RuntimeError:
            work()
            break
    return futures


def each(act: Callable[[T], R], items: Sequence[T], most: int = _MOST) -> list[R]:
    """Results in order; an error is raised once all have ended."""
    futures = spread(act, items, most)
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        wait(futures)
        raise
