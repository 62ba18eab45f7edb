"""`ComputePool(budget=...)`: when a sum is spent, what is refused, and that pool and nodes end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.api.budget import check_price, spent_at
from skyward.api.provider import Lease, Offer
from skyward.errors import InvalidArgument, PoolClosed
from skyward.pool.budget_watch import BudgetWatch, draining
from tests.support.contexts import pool_context
from tests.support.waiting import until

HOUR = 3600.0


def test_a_budget_lasts_as_long_as_its_prices_say() -> None:
    assert spent_at(4.0, [(1000.0, 2.0)]) == 1000.0 + 2 * HOUR
    assert spent_at(4.0, [(0.0, 2.0), (HOUR, 4.0)]) == 1.5 * HOUR, "two dollars are left, at four an hour"
    assert spent_at(4.0, [(0.0, 2.0), (HOUR, 0.0)]) == math.inf
    assert spent_at(1.0, [(0.0, 2.0), (HOUR, 0.0)]) == HOUR / 2, "it was spent before the price fell"
    assert spent_at(1.0, []) == math.inf


@pytest.mark.parametrize(
    ("hourly", "text"), [(0.0, "has no prices"), (math.inf, "is not known"), (3600.0, "that lasts 1 s")]
)
def test_a_budget_that_nothing_could_keep_to_is_refused(hourly: float, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        check_price(1.0, hourly, "Nimbus")


def test_bodies_are_told_two_minutes_before_or_a_quarter_of_a_short_time() -> None:
    assert draining(10 * HOUR) == 120.0
    assert draining(100.0) == 25.0


class Watched:
    """A watch in a time of its own."""

    def __init__(self, budget: float, hourly: float) -> None:
        self.now, self.told, self.closed = 1000.0, list[tuple[int, float, float]](), list[str]()
        self.seen: list[Any] = []
        self.context = pool_context(emit=self.seen.append, budget=budget, prices=[(1000.0, hourly)])
        self.watch = BudgetWatch(
            self.context, lambda *word: self.told.append(word), self.closed.append, lambda: self.now
        )

    def look(self, after: float) -> bool:
        self.now += after
        return self.watch.look()


def test_nodes_are_told_again_when_prices_change_and_now_and_then() -> None:
    watched = Watched(budget=2.0, hourly=1.0)
    assert watched.look(0.0)
    assert watched.look(1.0)
    assert watched.told == [(1, 2 * HOUR, 120.0)]
    watched.look(30.0)
    assert watched.told[1:] == [(2, 2 * HOUR - 31.0, 120.0)]
    watched.context.prices.append((watched.now, 2.0))
    watched.look(0.0)
    assert watched.told[2][0] == 3
    assert watched.told[2][1] == pytest.approx((2 * HOUR - 31.0) / 2)


def test_a_pool_is_warned_then_closed_before_its_nodes_end() -> None:
    watched = Watched(budget=1.0, hourly=1.0)
    assert watched.look(HOUR - 121.0)
    assert not watched.seen
    assert watched.look(2.0)
    assert "is spent in 119 s" in watched.seen[0].text
    assert not watched.look(114.0)
    assert watched.closed == ["its budget of $1.00 is spent"]


@dataclass(frozen=True)
class Priced(sky.Local):
    """This computer at a price, so that a few dollars are a few seconds."""

    hourly: float = 3600.0

    def offers(self, spec: sky.Spec, count: int) -> Iterable[Offer]:
        return [Offer("dear", self.hourly)]

    def acquire(self, spec: sky.Spec, *rest: Any) -> Lease:
        found = super().acquire(spec, *rest)
        return Lease(self, found.pool, found.machines, hourly_cost=self.hourly * len(found.machines))


@sky.compute
def waits_for_the_end() -> float:
    while sky.preempted() is None:
        time.sleep(0.02)
    return time.time()


@sky.compute
def forever() -> None:
    while True:
        time.sleep(0.05)


def test_bodies_are_told_and_the_pool_closes_when_the_budget_is_spent() -> None:
    seen: list[Any] = []
    pool = sky.ComputePool(provider=Priced(hourly=1800.0), budget=40.0, console=False, grace=1.0)  # 80 seconds
    pool.on_event(seen.append)
    with pool:
        told, endless = waits_for_the_end() > pool, forever() > pool
        told.result(timeout=300)
        with pytest.raises(PoolClosed):
            endless.result(timeout=300)
        until(lambda: not pool.is_active)
    assert any("the budget of $40.00 is spent in" in e.text for e in seen if isinstance(e, events.Notice))
    assert [e.budget for e in seen if isinstance(e, events.PoolCost)] == [40.0]


def test_a_budget_without_prices_is_refused_before_anything_is_started() -> None:
    with pytest.raises(InvalidArgument, match="Local has no prices"), sky.ComputePool(budget=5.0, console=False):
        pass
