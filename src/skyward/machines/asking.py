"""How a cluster is asked that decides by itself when things start: seldom, and again while it does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from skyward.api.provider import Report

__all__ = ["answered", "pauses"]

_T = TypeVar("_T")


def pauses() -> Iterator[float]:
    """How long to wait between two questions: all users of a cluster ask one controller."""
    began, pause = time.monotonic(), 0.1
    while True:
        yield pause
        waited = time.monotonic() - began
        pause = min(pause * 1.5, 1.0 if waited < 20 else 5.0 if waited < 300 else 15.0)


def answered(
    ask: Callable[[], _T],
    seconds: float | None,
    report: Report,
    who: str,
    meanwhile: str,
    passing: Callable[[Exception], bool],
) -> _T:
    """What a cluster answers. It is asked again for so many seconds after errors that pass: controllers restart."""
    began = time.monotonic()
    for pause in pauses():
        try:
            return ask()
        except Exception as exc:  # raised again but for those that pass
            if not passing(exc) or (seconds is not None and time.monotonic() - began > seconds):
                raise
            report(f"{who} does not answer; {meanwhile}. It is asked again. ({exc})")
        time.sleep(pause)
    raise AssertionError("pauses do not end")
