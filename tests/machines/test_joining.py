"""Nodes that were missing: tried again with growing pauses, taken in one at a time; and machines that are too few."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

from skyward.api.provider import Lease, Machine, Offer, Provider
from skyward.api.spec import Spec
from skyward.errors import BootstrapError, NoCapacity, NotGivenBack
from skyward.machines.acquire import acquire
from skyward.machines.replacement import Joining, Missing
from tests.support.contexts import pool_context


class Source:
    """Machines that come after some attempts, or never."""

    def __init__(self, **failures: int) -> None:
        self.failures, self.placed, self.back = failures, dict[int, str](), list[str]()

    def bring(self, missing: Missing) -> str:
        if self.failures[missing.name]:
            self.failures[missing.name] -= 1
            raise BootstrapError("connecting", f"{missing.name} does not answer")
        return missing.name

    def place(self, newcomer: str, node: int) -> None:
        self.placed[node] = newcomer

    def turn_back(self, newcomer: str, node: int) -> None:
        self.back.append(newcomer)
        del self.placed[node]


class Engine:
    """The engine's part: two nodes are there."""

    def __init__(self, source: Source, pauses: int = 30) -> None:
        self.source, self.pauses, self.left = source, list[float](), pauses
        self.told: list[tuple[int, str]] = []
        self.refuse = ""
        self._lock = threading.Lock()

    def vacancy(self) -> int:
        return 2 + len(self.source.placed)

    def admit(self, node: int) -> bool:
        return True

    def connect(self, node: int) -> None:
        if self.refuse == self.source.placed[node]:
            self.refuse = ""
            raise BootstrapError("connecting", "no answer")

    def pause_for(self, seconds: float) -> bool:
        with self._lock:
            self.pauses.append(seconds)
            self.left -= 1
            return self.left > 0

    def tell(self, node: int, text: str) -> None:
        self.told.append((node, text))


def joined(source: Source, engine: Engine, *names: str) -> dict[int, str]:
    missing = [Missing(name, "it was off", None) for name in names]
    Joining(source, engine, missing).close(30)
    return source.placed


def test_what_comes_is_numbered_without_gaps() -> None:
    source = Source(a=3, b=0, c=1)
    assert sorted(joined(source, Engine(source), "a", "b", "c")) == [2, 3, 4]
    assert set(source.placed.values()) == {"a", "b", "c"}


def test_what_does_not_come_is_tried_with_growing_pauses_until_the_pool_is_closed() -> None:
    source = Source(a=100)
    engine = Engine(source, pauses=8)
    assert joined(source, engine, "a") == {}
    assert engine.pauses == [5, 10, 20, 40, 80, 120, 120, 120]
    assert [node for node, _ in engine.told] == [2], "the same is not told again"
    assert "a does not answer" in engine.told[0][1]


def test_what_cannot_be_connected_to_is_turned_back_and_tried_again() -> None:
    source = Source(a=0)
    engine = Engine(source)
    engine.refuse = "a"
    assert joined(source, engine, "a") == {2: "a"}
    assert source.back == ["a"]


class Cloud(Provider):
    """Has two machines."""

    elastic = True

    def __init__(self) -> None:
        self.asked: list[int] = []

    def offers(self, spec: Spec, count: int) -> list[Offer]:
        return []

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Any) -> Lease:
        self.asked.append(count)
        if count > 2:
            raise NoCapacity("machines", ["only 2 are free"])
        return Lease(self, pool, tuple(Machine(f"m{n}") for n in range(count)))


def test_where_there_are_too_few_machines_min_nodes_are_taken() -> None:
    cloud = Cloud()
    with ExitStack() as steps:
        context = pool_context(provider=cloud, spec=Spec(nodes=4, min_nodes=2), nodes=4)
        holding = acquire(context, _NoWatchdog(), steps, lambda receipt: None)  # type: ignore[arg-type]
        steps.pop_all()
    assert (len(holding.machines), cloud.asked) == (2, [4, 2])


def test_without_min_nodes_too_few_machines_are_an_error() -> None:
    cloud = Cloud()
    with ExitStack() as steps, pytest.raises(NoCapacity):
        acquire(pool_context(provider=cloud, spec=Spec(nodes=4), nodes=4), _NoWatchdog(), steps, lambda receipt: None)  # type: ignore[arg-type]
    assert cloud.asked == [4]


class _NoWatchdog:
    def __init__(self) -> None:
        self.dropped: list[str] = []

    def drop(self, key: str) -> None:
        self.dropped.append(key)


class Silent(Cloud):
    """Cannot be asked when machines are given back."""

    def __init__(self, price: float) -> None:
        super().__init__()
        self.price = price

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Any) -> Lease:
        return Lease(self, pool, [Machine("m0")], hourly_cost=self.price)

    def give_back(self, pool: str, report: Any) -> object:
        raise NotGivenBack(pool, "the queue", ["job 1"], self.price, "Nobody answers.")


def test_a_program_does_not_fail_for_what_costs_nothing_and_the_watchdog_gives_it_back() -> None:
    watchdog, said = _NoWatchdog(), list[str]()
    with ExitStack() as steps:
        context = pool_context(provider=Silent(0.0), emit=lambda event: said.append(str(event)))
        acquire(context, watchdog, steps, lambda receipt: None)  # type: ignore[arg-type]
    assert any("job 1 in the queue may still exist. Nobody answers." in text for text in said), said
    assert watchdog.dropped == []


def test_what_costs_money_and_cannot_be_given_back_is_an_error() -> None:
    watchdog = _NoWatchdog()
    with pytest.raises(NotGivenBack, match=r"\$2.00 an hour"), ExitStack() as steps:
        acquire(pool_context(provider=Silent(2.0)), watchdog, steps, lambda receipt: None)  # type: ignore[arg-type]
    assert watchdog.dropped == ["machines"]
