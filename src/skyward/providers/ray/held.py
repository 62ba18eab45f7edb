"""What this process has of a pool on Ray: where its machines arrive, and the drivers that hold its places."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skyward.api.provider import Machine, Report
from skyward.errors import BootstrapError, SkywardError
from skyward.providers.ray.drivers import Driver
from skyward.providers.ray.reports import Busy, NothingFits, amounts
from skyward.setup.joined.arrivals import Arrivals
from skyward.setup.joined.members import JoinedMachine

__all__ = ["HeldPool", "RayMachine"]


@dataclass(frozen=True)
class RayMachine(JoinedMachine):
    """A node of a Ray cluster, as long as Ray lets us have it."""

    turn: int = 0
    """How many machines have had this place before."""

    @property
    def preemptible(self) -> bool:
        """Ray may lose it, or take it away; then another one may take its place."""
        return True


@dataclass
class _Place:
    """A place of the pool: whose it is, and which machine it has now."""

    driver: Driver
    bundle: int
    turn: int = 0
    losses: int = 0
    """Those that there were in its bundle before its machine came."""
    awaited: bool = False


class HeldPool:
    """A pool that this process has open. Usable from many threads."""

    def __init__(self, arrivals: Arrivals, where: str) -> None:
        self.arrivals, self._where = arrivals, where
        self.drivers: list[Driver] = []
        self._places: dict[int, _Place] = {}
        self._next = 0
        self._lock = threading.Lock()

    def get(
        self, count: int, demand: Mapping[str, float], timeout: float, report: Report, start: Callable[[int], Driver]
    ) -> list[RayMachine]:
        """So many more machines: for places that Ray fills again after a loss, else for new ones.

        New ones are what `start` gets, which is told the number of the first place.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            lost = [number for number, place in self._places.items() if not place.awaited and self._gone(number, place)]
            moved = len(lost) >= count
            numbers = lost[:count] if moved else list(range(self._next, self._next + count))
            self._next += 0 if moved else count
            for number in numbers if moved else ():
                self._places[number].awaited = True
                self._places[number].turn += 1
        self.arrivals.expect(numbers)
        try:
            if moved:
                driver = self._places[numbers[0]].driver
            else:
                report("asking Ray")
                driver = start(numbers[0])
                self.drivers.append(driver)
            watch = _Watch(driver, self._where, count, demand, deadline, report, moved)
            machines = self.arrivals.wait(numbers, deadline, _ignore, watch.look)
            with self._lock:
                for bundle, number in enumerate(numbers):
                    place = self._places.setdefault(number, _Place(driver, bundle))
                    place.losses = len(place.driver.glance().losses.get(place.bundle, ()))
            return [self._machine(machine, number) for machine, number in zip(machines, numbers, strict=True)]
        finally:
            with self._lock:
                for number in numbers if moved else ():
                    self._places[number].awaited = False

    def gone(self, machine: RayMachine) -> str:
        """Why a machine will not come back; empty while it may."""
        assert machine.joined is not None
        place = self._places.get(machine.joined.place)
        if place is None or place.turn != machine.turn:
            return "another machine has its place, or nobody"
        return self._gone(machine.joined.place, place)

    def dismiss(self, machine: RayMachine) -> None:
        """Sends a machine away; nobody takes its place. One that another has followed is gone already."""
        assert machine.joined is not None
        with self._lock:
            place = self._places.get(machine.joined.place)
            if place is None or place.turn != machine.turn:
                return
            del self._places[machine.joined.place]
        self.arrivals.dismiss(machine.joined.place)

    def expected(self) -> bool:
        """Whether machines are away, so that others may ask for their places."""
        with self._lock:
            numbers = list(self._places)
        return any(not self.arrivals.member(number).connected for number in numbers)

    def _gone(self, number: int, place: _Place) -> str:
        """Why it is gone, as it has said itself, or as Ray knows."""
        if why := self.arrivals.gone(number):
            return why
        seen = place.driver.glance()
        losses = seen.losses.get(place.bundle, ())
        return losses[-1] if len(losses) > place.losses else seen.ended

    def _machine(self, machine: Machine, number: int) -> RayMachine:
        turn = self._places[number].turn
        id = f"{machine.id}-{turn}" if turn else machine.id
        return RayMachine(id, machine.private_ip, joined=machine.joined, turn=turn)


class _Watch:
    """Looks at a driver while its machines are waited for: tells the user how far it is, and says when it is over."""

    def __init__(
        self,
        driver: Driver,
        where: str,
        count: int,
        demand: Mapping[str, float],
        deadline: float,
        report: Report,
        moved: bool,
    ) -> None:
        self._driver, self._where, self._report, self._moved = driver, where, report, moved
        self._wish = f"{count} x ({amounts(demand)})"
        self._count, self._deadline, self._told = count, deadline, ""

    def look(self) -> None:
        """Raises the error that says why nobody will come any more."""
        found = self._driver.report()
        if found.infeasible:
            raise NothingFits(self._wish, self._where, found.nodes)
        if ended := self._driver.ended():
            raise SkywardError(f"the nodes on Ray at {self._where} could not be had: {found.failed or ended}")
        if found.hopeless or (found.losses and not self._moved):
            raise BootstrapError("joining", _not_joined(found.hopeless or next(iter(found.losses.values()))[-1]))
        if time.monotonic() > self._deadline and found.waiting:
            raise Busy(self._wish, found.nodes)
        text = "waiting for Ray to give another machine" if self._moved else found.progress(self._count)
        if text != self._told:
            self._told = text
            self._report(text)


def _not_joined(why: str) -> str:
    if "cannot be reached" not in why:
        return f"Ray gave a place, and what was started there ended: {why}"
    return (
        f"Ray gave the places, but what runs there cannot connect to this computer: {why}. The nodes "
        "of the cluster must be able to open a connection to here. Run the program on a machine of the cluster or on "
        "one that its nodes reach, say which address and port they reach (host=, port=), or open the firewall."
    )


def _ignore(text: str) -> None:
    """The watch tells more."""
