"""Machines that join by themselves: the pool prints a command, and waits for whoever runs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyward.api.provider import Holding, Machine, Offer, Provider, Report
from skyward.api.shell import Access
from skyward.api.spec import Spec
from skyward.setup.joined.arrivals import close_arrivals, open_arrivals

__all__ = ["Join"]


@dataclass(frozen=True)
class Join(Provider):
    """Machines on which somebody, or something, runs a command that the pool prints.

    Args:
        lease: seconds for which machines go on when they hear nothing of you. Default: 900.
        host: the address of this computer that is listened at. Default: all of them.
        port: the port that is listened at. Default: 0, a free one.
        advertise: the addresses that machines are told to try. Default: those of this computer.
    """

    lease: float = 900.0
    host: str = ""
    port: int = 0
    advertise: Sequence[str] = ()

    @property
    def access(self) -> Access:
        return Access(lease=self.lease)

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        return [Offer("machines that join")]

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Holding:
        import time

        arrivals = open_arrivals(
            pool, ttl=spec.ttl, lease=self.lease, host=self.host, port=self.port, advertise=self.advertise
        )
        try:
            return Holding(pool, tuple(arrivals.wait(range(count), time.monotonic() + timeout, report)))
        except BaseException:
            close_arrivals(pool)
            raise

    def give_back(self, pool: str, report: Report) -> object:
        close_arrivals(pool)
        return None

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        return list(machines)
