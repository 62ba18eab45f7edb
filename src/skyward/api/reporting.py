"""`sky.progress`: a body reports its progress and metrics."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypedDict

from skyward.api.brief import brief
from skyward.api.info import Call, current_call, instance_info

__all__ = ["Report", "Thinned", "end_of_call", "progress", "send_by"]

_AT_ONCE = 1000.0
_A_SECOND, _IN_POOL, _LEAST = 1000.0, 5000.0, 10.0
_MOST_CALLS = 1000  # threads that outlive their calls may still report


class Report(TypedDict):
    """One or more calls of `sky.progress`."""

    step: float
    total: float | None
    metrics: dict[str, float]


class Thinned:
    """Limits the reports of one call to `rate` per second after the first thousand. A delayed one is merged with the
    next: the newest value of each name stays.
    """

    __slots__ = ("_last", "_left", "_rate", "_then", "held")

    def __init__(self, rate: float, now: float) -> None:
        self._rate, self._then, self._left = rate, now, _AT_ONCE
        self.held: Report | None = None
        self._last: float | None = None  # the step that was sent last

    def offer(self, report: Report, now: float) -> Report | None:
        if self.held is not None:
            report = {**report, "metrics": self.held["metrics"] | report["metrics"]}
        self.held = report
        self._left, self._then = min(_AT_ONCE, self._left + (now - self._then) * self._rate), now
        step, total = report["step"], report["total"]
        if self._left >= 1.0:
            self._left -= 1.0
        elif total is None or step == self._last or not total - 1 <= step <= total:
            return None
        return report

    def sent(self) -> None:
        """Until then the report is kept: a body may be stopped at any moment."""
        self._last, self.held = self.held["step"] if self.held else None, None


_send: Callable[[Report], object] | None = None
_calls: dict[Call | None, Thinned] = {}
_lock = threading.RLock()  # a signal handler of a body may report, too


def progress(step: float, total: float | None = None, **metrics: float) -> None:
    """Reports progress: `sky.progress(step, total, loss=0.3)`; the live view and `events.Progress` show it.

    `step` and `total` are counts of whatever the body does; without `total` no share is shown. `metrics` are numbers; a
    tensor on a GPU is waited for.

    A call may send 1,000 at once and 1,000 per second (5,000 for all processes of a pool); further ones are merged,
    with the newest value of each name. Reports travel on stderr, and are dropped where that is silenced or redirected.
    Outside a pool it does nothing.
    """
    if _send is None:
        return
    given = {"step": step, "total": total, **metrics}
    numbers = {name: _number(name, value) for name, value in given.items() if value is not None}
    report: Report = {"step": numbers.pop("step"), "total": numbers.pop("total", None), "metrics": numbers}
    call = current_call()
    with _lock:
        now = time.monotonic()
        thinned = _calls.get(call)
        if thinned is None:
            thinned = _calls[call] = Thinned(_rate(), now)
            if len(_calls) > _MOST_CALLS:
                del _calls[next(iter(_calls))]
        due = thinned.offer(report, now)
        if due is not None:
            _send(due)
            thinned.sent()


def end_of_call() -> None:
    if not _calls:
        return  # most bodies report nothing
    with _lock:
        thinned = _calls.pop(current_call(), None)
        if thinned is not None and thinned.held is not None and _send is not None:
            _send(thinned.held)


def send_by(send: Callable[[Report], object]) -> None:
    global _send
    _send = send
    os.register_at_fork(after_in_child=_in_fork)


def _in_fork() -> None:
    """Delayed reports are the parent's, and the lock may be held forever here."""
    global _lock
    _lock = threading.RLock()
    _calls.clear()


def _rate() -> float:
    return max(_LEAST, min(_A_SECOND, _IN_POOL / instance_info().world_size))


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"sky.progress({name}={brief(value)}): expected a number.") from None
