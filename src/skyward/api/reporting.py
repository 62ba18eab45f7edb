"""`sky.progress`: a body says how far it is, and how well it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from skyward.api.brief import brief
from skyward.api.info import current_call

__all__ = ["progress", "send_by"]

_EVERY = 0.1

_send: Callable[[dict[str, Any]], object] | None = None
_last = threading.local()


def progress(step: float, total: float | None = None, **metrics: float) -> None:
    """Says how far a body is: `sky.progress(step, total, loss=0.3)`; the live view and `events.Progress` show it.

    `step` and `total` are counts of whatever the body does; without `total` no share is shown. `metrics` are numbers.
    Of each call, the first report, ten a second, and the last ones (from `total - 1` on) are passed on.
    Outside a pool it does nothing.
    """
    if _send is None:
        return
    now, call = time.monotonic(), current_call()
    before, at = getattr(_last, "told", (None, 0.0))
    if call == before and now - at < _EVERY and (total is None or step < total - 1):
        return
    _last.told = call, now
    given = {"step": step, "total": total, **metrics}
    numbers = {name: _number(name, value) for name, value in given.items() if value is not None}
    _send({"step": numbers.pop("step"), "total": numbers.pop("total", None), "metrics": numbers})


def send_by(send: Callable[[dict[str, Any]], object]) -> None:
    """Has reports of this process passed on; for runners."""
    global _send
    _send = send


def _number(name: str, value: Any) -> float:
    """A number, also out of a tensor or an array with one element."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"sky.progress({name}={brief(value)}): a number is wanted.") from None
