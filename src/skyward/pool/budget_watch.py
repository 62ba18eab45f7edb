"""Ends an open pool when its budget is spent, a little before its nodes end by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from skyward.api.context import PoolContext
from skyward.machines.offers import money
from skyward.pool.inspect_socket import spent

__all__ = ["BudgetWatch", "draining", "of_budget"]

_DRAIN = 120.0  # as long before the end bodies are told, as clouds tell of spot machines
_AGAIN = 30.0  # nodes are told again, in seconds that are left: a word that comes late would be wrong
_CLOSING = 5.0
_LOOK = 1.0


def draining(length: float) -> float:
    """How many seconds before the end bodies are told."""
    return min(_DRAIN, length / 4)


def of_budget(budget: float | None, prices: Sequence[tuple[float, float]]) -> str:
    if budget is None:
        return ""
    used = spent(prices, time.time()) or 0.0
    return f"\nbudget: {money(budget)}, of which {money(used)} is spent by the machines' prices per hour"


class BudgetWatch:
    """`tell` gets a number that grows, the seconds left, and when bodies are told."""

    def __init__(
        self,
        context: PoolContext,
        tell: Callable[[int, float, float], None],
        close: Callable[[str], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._context, self._tell, self._close, self._clock = context, tell, close, clock
        self._began, self._serial, self._told = clock(), 0, (0.0, 0.0)
        self._warned = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="skyward-budget", daemon=True)

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:  # which may be closing the pool
            self._thread.join(5)

    def look(self) -> bool:
        """Whether the pool continues."""
        now, end = self._clock(), self._context.ends_at
        left, drain = end - now, draining(end - self._began)
        if left <= min(drain, self._context.grace + _CLOSING):
            self._close(f"its budget of {money(self._context.budget or 0.0)} is spent")
            return False
        if self._told[0] != end or now - self._told[1] >= _AGAIN:
            self._serial, self._told = self._serial + 1, (end, now)
            self._tell(self._serial, left, drain)
        if left <= drain and not self._warned:
            self._warned = True
            text = f"the budget of {money(self._context.budget or 0.0)} is spent in {left:.0f} s: bodies are told, and "
            self._context.warn(f"{text}the pool closes before that. No more machines are rented for it.")
        return True

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK):
            if not self.look():
                return
