"""What this process has of a pool on Ray: where its machines arrive, and the drivers that hold its places."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from skyward.api.provider import Machine, Report
from skyward.errors import BootstrapError, SkywardError
from skyward.node.check_network import addresses
from skyward.providers.ray.jobs import Busy, Driver, NothingFits, amounts
from skyward.setup.joined.arrivals import Arrivals
from skyward.setup.joined.members import JoinedMachine

__all__ = ["HeldPool", "RayMachine"]

_HEADLESS = 20.0
"""Seconds for which the head refuses connections, and no node is connected, before all nodes are given up."""


@dataclass(frozen=True)
class RayMachine(JoinedMachine):
    turn: int = 0

    @property
    def preemptible(self) -> bool:
        return True


@dataclass
class _Place:
    driver: Driver
    bundle: int
    turn: int = 0
    losses: int = 0
    awaited: bool = False


class HeldPool:
    def __init__(self, arrivals: Arrivals, where: str) -> None:
        self.arrivals, self._where = arrivals, where
        self.drivers: list[Driver] = []
        self._places: dict[int, _Place] = {}
        self._next = 0
        self._head = ""
        self._refused: float | None = None
        self.headless = ""
        self._lock = threading.RLock()

    def get(
        self, count: int, demand: Mapping[str, float], timeout: float, report: Report, start: Callable[[int], Driver]
    ) -> list[RayMachine]:
        """So many more machines: for places that Ray fills again after a loss, else for new ones.

        New ones are what `start` gets, which is told the number of the first place.
        """
        deadline = time.monotonic() + timeout
        if self.headless:
            raise SkywardError("the Ray cluster has no head any more")
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
                    seen = place.driver.glance()
                    place.losses, self._head = len(seen.losses.get(place.bundle, ())), seen.head or self._head
            return [self._machine(machine, number) for machine, number in zip(machines, numbers, strict=True)]
        finally:
            with self._lock:
                for number in numbers if moved else ():
                    self._places[number].awaited = False

    def gone(self, machine: RayMachine) -> str:
        assert machine.joined is not None
        place = self._places.get(machine.joined.place)
        if place is None or place.turn != machine.turn:
            return "another machine has its place, or nobody"
        return self._gone(machine.joined.place, place)

    def dismiss(self, machine: RayMachine) -> None:
        assert machine.joined is not None
        with self._lock:
            place = self._places.get(machine.joined.place)
            if place is None or place.turn != machine.turn:
                return
            del self._places[machine.joined.place]
        self.arrivals.dismiss(machine.joined.place)

    def expected(self) -> bool:
        with self._lock:
            numbers = list(self._places)
        return not all(map(self.arrivals.is_connected, numbers))

    def _gone(self, number: int, place: _Place) -> str:
        if why := self.arrivals.gone(number):
            return why
        seen = place.driver.glance()
        losses = seen.losses.get(place.bundle, ())
        if self._without_head(seen.refused):
            return self.headless
        return losses[-1] if len(losses) > place.losses else seen.ended

    def _without_head(self, refused: bool) -> bool:
        """Whether the head is gone: the network is there, as its machine refuses us, and yet no node is connected."""
        if self.headless:
            return True
        if not refused or self._forwarded() or any(map(self.arrivals.is_connected, list(self._places))):
            self._refused = None
            return False
        now = time.monotonic()
        if self._refused is None:
            self._refused = now
            self.arrivals.tell(
                f"the head of the Ray cluster seems to have ended: {self._where} refuses connections, and no node is "
                f"connected. If that lasts for {_HEADLESS:.0f} s, calls on these nodes end with an error."
            )
        if now - self._refused >= _HEADLESS:
            self.headless = (
                f"the head of the Ray cluster has ended, and with it all nodes ({self._where} refuses connections)"
            )
            for number in list(self._places):
                self.arrivals.dismiss(number, self.headless)
        return bool(self.headless)

    def _forwarded(self) -> bool:
        local = urlsplit(self._where).hostname in ("localhost", "127.0.0.1", "::1")
        return local and not self._head.startswith("127.") and self._head not in [entry[1] for entry in addresses()]

    def _machine(self, machine: Machine, number: int) -> RayMachine:
        turn = self._places[number].turn
        id = f"{machine.id}-{turn}" if turn else machine.id
        return RayMachine(id, machine.private_ip, joined=machine.joined, turn=turn)


class _Watch:
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
        found = self._driver.report()
        if found.infeasible:
            raise NothingFits(self._wish, self._where, found.nodes)
        if ended := self._driver.ended():
            raise SkywardError(f"the nodes on Ray at {self._where} could not be had: {found.failed or ended}")
        if found.hopeless or (found.losses and not self._moved):
            raise BootstrapError("joining", _not_joined(found.hopeless or next(iter(found.losses.values()))[-1]))
        text = "waiting for Ray to give another machine" if self._moved else found.progress(self._count, self._wish)
        over = time.monotonic() > self._deadline
        if text != self._told:
            self._told = text
            self._report(text)
        if over and found.waiting:
            raise Busy(self._wish, found.free or found.nodes)
        if over:
            raise BootstrapError("joining", f"the time for it is over (provision_timeout=). Last seen: {text}.")


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
