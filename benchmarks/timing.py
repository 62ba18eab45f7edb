"""How long things take."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["repeated", "timed"]


def repeated(act: Callable[[], object], times: int) -> list[float]:
    """The seconds that each of so many runs took."""
    return [timed(act) for _ in range(times)]


def timed(act: Callable[[], object]) -> float:
    """The seconds that one run took."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
