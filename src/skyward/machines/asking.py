"""Asks a cluster that decides by itself when things start and end: seldom, and again if it does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from skyward.api.provider import Report
from skyward.errors import CloudRefused, NotGivenBack

__all__ = ["Waiting", "answered", "ended", "pauses"]

_T = TypeVar("_T")


def pauses() -> Iterator[float]:
    """Growing, since all users ask one controller."""
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
    passing: Callable[[Exception], bool] = lambda error: isinstance(error, CloudRefused) and error.unanswered,
) -> _T:
    """Retries errors that pass: controllers restart."""
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


class Waiting:
    """Reports while a cluster has not given what was requested; None: no time limit."""

    def __init__(self, seconds: float | None, report: Report) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._report, self._told = report, ""

    @property
    def over(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def tell(self, text: str, late: Callable[[], Exception]) -> None:
        """Reports once; `late` makes the error when time is up."""
        over = self.over
        if text != self._told:
            self._told = text
            self._report(text)
        if over:
            raise late()


def ended(
    pool: str, where: str, left: Callable[[float], Sequence[str]], seconds: float, quiet: float, report: Report
) -> None:
    """NotGivenBack after `seconds`.

    `left` has the cluster end what is there, and names it. Reports after `quiet` seconds.
    """
    began = time.monotonic()
    for pause in pauses():
        waited = time.monotonic() - began
        names = left(waited)
        if not names:
            return
        if waited > seconds:
            text = f"It was asked to end them {waited:.0f} s ago; a node that does not answer may hold them."
            raise NotGivenBack(pool, where, names, 0.0, text)
        if waited > quiet:
            report(f"waiting for the end of {', '.join(names)}")
        time.sleep(pause)
