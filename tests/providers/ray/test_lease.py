"""What a pool on Ray makes of what its driver says, and of a driver that cannot be asked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import NotGivenBack, SkywardError
from skyward.machines.ledger import Ledger
from skyward.providers.ray import provider as providers
from skyward.providers.ray.jobs import REFUSED, Busy, DriverReport, Jobs, RayRefused
from skyward.providers.ray.provider import RayLease, RayMachine
from skyward.setup.joined.arrivals import open_arrivals
from tests.support.leases import quiet, unreached

URL = "http://10.0.0.1:8265"


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = staticmethod(time.time)


class Machines:
    """Where machines arrive: all of them do at once, and later they may be silent."""

    pool = "p"

    def __init__(self) -> None:
        self.connected = True
        self.left: dict[int, str] = {}
        self.told: list[str] = []

    def expect(self, places: list[int]) -> None: ...

    def wait(self, places: list[int], *rest: object) -> list[RayMachine]:
        return [RayMachine(f"p-{place}", joined=sky_target(place)) for place in places]

    def is_connected(self, place: int) -> bool:
        return self.connected

    def gone(self, place: int) -> str:
        return self.left.get(place, "")

    def dismiss(self, place: int, why: str = "") -> None:
        self.left[place] = why

    def tell(self, text: str) -> None:
        self.told.append(text)

    def close(self) -> None: ...


class FakeDriver:
    """A driver whose report a test makes."""

    def __init__(self, head: str = "10.0.0.1") -> None:
        self.seen = DriverReport(head=head)

    def report(self) -> DriverReport:
        return self.seen

    glance = report

    def ended(self) -> str:
        return self.seen.ended

    def stop(self, seconds: float) -> None: ...


def sky_target(place: int) -> Any:
    from skyward.api.shell import JoinTarget

    return JoinTarget("p", place, f"h{place}", unreached)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(providers, "time", made)
    return made


class Opened:
    """A pool of two nodes, and what a test does to it."""

    def __init__(self, where: str = URL, head: str = "10.0.0.1", ledger: Ledger | None = None) -> None:
        self.machines, self.driver = Machines(), FakeDriver(head)
        self.held = RayLease(sky.Ray(where, token=""), self.machines, ledger)  # type: ignore[arg-type] - as far as it is needed
        self.nodes = self.held.get(2, {"CPU": 1}, 60, self.machines.tell, lambda first: self.driver)
        self.machines.told.clear()

    def head_dies(self) -> None:
        self.machines.connected = False
        self.driver.seen = DriverReport(refused=True)

    def gone(self) -> list[str]:
        return [self.held.gone(node) for node in self.nodes]


def test_a_head_that_ends_is_told_at_once_and_its_nodes_are_given_up_soon(clock: Clock) -> None:
    pool = Opened()
    assert pool.gone() == ["", ""]
    pool.head_dies()
    assert pool.gone() == ["", ""]
    (told,) = pool.machines.told
    assert f"{URL} refuses connections" in told
    clock.now += 30
    first, second = pool.gone()
    assert first == second
    assert "the head of the Ray cluster has ended" in first
    with pytest.raises(SkywardError, match="no longer has a head"):
        pool.held.get(1, {"CPU": 1}, 60, pool.machines.tell, lambda first: pool.driver)


def test_nodes_that_speak_are_not_given_up_because_the_dashboard_has_ended(clock: Clock) -> None:
    pool = Opened()
    pool.head_dies()
    pool.machines.connected = True
    for _ in range(10):
        clock.now += 30
        assert pool.gone() == ["", ""]
    assert not pool.machines.told


def test_silent_nodes_are_waited_for_while_the_head_answers_or_nothing_is_known_of_it(clock: Clock) -> None:
    pool = Opened()
    pool.head_dies()
    for seen in (DriverReport(), DriverReport(refused=True), DriverReport(), DriverReport(refused=True)):
        pool.driver.seen = seen
        clock.now += 15
        assert pool.gone() == ["", ""]


@pytest.mark.parametrize(
    ("where", "head", "gone"),
    [
        ("http://localhost:8265", "10.200.0.1", False),  # as with `ssh -L`, which ends when our network does
        ("http://127.0.0.1:8265", "", False),
        ("http://127.0.0.1:8265", "127.0.0.1", True),
    ],
)
def test_a_forwarded_port_that_refuses_says_nothing_of_the_head(
    clock: Clock, where: str, head: str, gone: bool
) -> None:
    pool = Opened(where, head)
    pool.head_dies()
    pool.gone()
    clock.now += 60
    assert [bool(why) for why in pool.gone()] == [gone, gone]


def test_a_pool_for_which_ray_has_no_room_says_so_when_its_time_is_over() -> None:
    driver = FakeDriver()
    driver.seen = DriverReport(waiting="QUEUED", free=["10.0.0.1: 0 of 4 CPU"])
    arrivals = open_arrivals("full", ttl=600, lease=600, host="127.0.0.1")
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        time.sleep(
            text.startswith("Ray has no room")
        )  # so that the time is over when the driver has been looked at, and not before

    try:
        with pytest.raises(Busy, match=r"no room for 1 x \(2 CPU\) in time.*\n.*0 of 4 CPU"):
            RayLease(sky.Ray(URL), arrivals, None).get(1, {"CPU": 2}, 0.5, tell, lambda first: driver)
    finally:
        arrivals.close()
    assert told[-1] == "Ray has no room yet for 1 x (2 CPU); free: 10.0.0.1: 0 of 4 CPU"


@pytest.fixture
def unheard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The ledger of a pool that has a job, whose Jobs API refuses connections."""
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path))

    def refuse(self: Jobs) -> list[dict[str, Any]]:
        raise RayRefused("listing jobs", REFUSED, "[Errno 111] Connection refused.", URL, "server")

    monkeypatch.setattr(Jobs, "listed", refuse)
    ledger = providers._start_ledger(sky.Ray(URL, token=""), sky.Spec(), "p")  # pyright: ignore[reportPrivateUsage]
    ledger.answer(ledger.intent("job", address=URL), "job", "skyward-p-1")
    return ledger


def test_closing_after_the_head_has_ended_is_no_error_and_leaves_no_ledger(
    clock: Clock, unheard: Ledger, tmp_path: Path
) -> None:
    pool = Opened(ledger=unheard)
    pool.head_dies()
    pool.gone()
    clock.now += 60
    pool.gone()
    receipt = str(pool.held.close(quiet))
    assert "the head of the Ray cluster has ended" in receipt
    assert not list((tmp_path / "pools").glob("[!.]*"))


def test_the_receipt_names_the_job_that_ray_has_ended(unheard: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jobs, "listed", lambda self: [])
    monkeypatch.setattr(Jobs, "stop", lambda self, id: "")
    assert Opened(ledger=unheard).held.close(quiet) == "Ray has ended job skyward-p-1 of pool p."


def test_a_job_that_could_not_be_stopped_is_named_without_a_price(clock: Clock, unheard: Ledger) -> None:
    with pytest.raises(NotGivenBack) as failed:
        Opened(ledger=unheard).held.close(quiet)
    assert "skyward-p-1" in str(failed.value)
    assert "$" not in str(failed.value)
    assert "sky down p --yes" in str(failed.value)
