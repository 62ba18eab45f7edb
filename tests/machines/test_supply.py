"""More machines for an open pool, and none once it closes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from skyward.api.provider import Lease, Machine, Offer, Provider, Report
from skyward.api.spec import Spec
from skyward.errors import NoCapacity, PoolClosed
from skyward.machines import replacement
from skyward.machines.replacement import Supply
from tests.support.contexts import pool_context
from tests.support.waiting import until


@dataclass(frozen=True)
class Passing(Machine):
    """A machine that may be taken away, or has been."""

    why: str = ""

    @property
    def preemptible(self) -> bool:
        return True

    @property
    def gone(self) -> str:
        return self.why


@dataclass(frozen=True)
class Slow(Provider):
    """A provider that takes its time until it is allowed to go on."""

    waiting: threading.Event = field(default_factory=threading.Event)
    allowed: threading.Event = field(default_factory=threading.Event)
    ended: list[str] = field(default_factory=list[str])
    deaf: bool = False
    """Whether it does not report, and so cannot be told to stop."""

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Lease:
        raise AssertionError("the pool is open already")

    def more(self, count: int, report: Report) -> list[Passing]:
        while not self.allowed.wait(0.01):
            if not self.deaf:
                report("waiting")
            self.waiting.set()
        return [Passing("m-2", "10.0.0.2")]

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        return []


class Held(Lease):
    def more(self, spec: Spec, count: int, timeout: float, report: Report) -> list[Passing]:
        assert isinstance(self.provider, Slow)
        return self.provider.more(count, report)

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        return [Passing(m.id, m.private_ip, why="taken back" if m.id == "m-1" else "") for m in machines]

    def terminate(self, machines: Sequence[Machine]) -> None:
        assert isinstance(self.provider, Slow)
        self.provider.ended.extend(machine.id for machine in machines)


def supply(provider: Slow, replace: bool | None = None) -> Supply:
    return Supply(pool_context(provider=provider, provision_timeout=10, replace=replace), Held(provider, "train-1"))


def test_machines_that_may_be_taken_are_replaced_unless_said_otherwise() -> None:
    mine, theirs = Machine("host"), Passing("m-1")
    assert [supply(Slow()).replaces(machine) for machine in (mine, theirs)] == [False, True]
    assert [supply(Slow(), True).replaces(machine) for machine in (mine, theirs)] == [True, True]
    assert [supply(Slow(), False).replaces(machine) for machine in (mine, theirs)] == [False, False]


def test_another_machine_joins_the_pool_and_what_happens_is_told_once() -> None:
    provider, told = Slow(), list[str]()
    threading.Thread(target=lambda: (provider.waiting.wait(60), provider.allowed.set())).start()
    assert supply(provider).another(0, told.append).id == "m-2"
    assert told == ["waiting"]


def test_closing_ends_the_wait_for_a_machine() -> None:
    provider = Slow()
    more = supply(provider)
    threading.Thread(target=lambda: (provider.waiting.wait(60), more.close(10))).start()
    with pytest.raises(PoolClosed):
        more.another(0, lambda text: None)
    more.discard(Machine("m-1"))
    assert provider.ended == []


def test_closing_waits_for_what_has_been_asked() -> None:
    """What a provider is about to create must be known before everything is given back."""
    provider, order = Slow(deaf=True), list[str]()
    more = supply(provider)
    asking = threading.Thread(target=lambda: order.append(more.another(0, lambda text: None).id))
    closing = threading.Thread(target=lambda: (more.close(10), order.append("closed")))
    asking.start()
    assert provider.waiting.wait(60)
    closing.start()
    closing.join(0.2)  # time enough to close too early
    provider.allowed.set()
    asking.join(60)
    closing.join(60)
    assert order == ["m-2", "closed"]


def test_the_provider_knows_which_machines_are_gone() -> None:
    machines = [Machine(id) for id in ("m-1", "m-2")]
    assert supply(Slow()).ended(machines) == ["taken back", ""]


@dataclass(frozen=True)
class Queue(Slow):
    """A provider that is asked for lost machines together, and has `most` at once."""

    most: int = 9
    asked: list[int] = field(default_factory=list[int])

    @property
    def replaces_together(self) -> bool:
        return True

    def more(self, count: int, report: Report) -> list[Passing]:
        self.asked.append(count)
        if count > self.most:
            raise NoCapacity("machines", [f"{self.most} are free"])
        return [Passing(f"m-{len(self.asked)}.{number}") for number in range(count)]


@pytest.mark.parametrize(("most", "asked"), [(9, [3]), (2, [3, 1, 1, 1])])
def test_machines_that_are_lost_together_are_asked_for_together_if_there_are_so_many(
    monkeypatch: pytest.MonkeyPatch, most: int, asked: list[int]
) -> None:
    provider = Queue(most=most)
    source = supply(provider)
    all_ask = threading.Barrier(3)
    monkeypatch.setattr(replacement, "time", SimpleNamespace(sleep=lambda _: until(lambda: source._batch.count == 3)))
    with ThreadPoolExecutor(3) as threads:
        made = [threads.submit(lambda: (all_ask.wait(60), source.another(0, print, lost=True))[1]) for _ in range(3)]
        assert len({one.result(60).id for one in made}) == 3
    assert provider.asked == asked
    source.another(0, print)
    assert provider.asked == [*asked, 1], "nodes that were missing from the beginning are asked for one by one"
