"""Nodes beside the workers of a dask cluster that exists: a pool is a guest there.

    workers that the scheduler knows -> places -> an actor on each -> its program joins the pool -> machines

The actor has the program's standard input: when it is dropped, or its worker ends in whatever way, the program and all
that it started end too. A task beside it, which waits, keeps adaptive clusters from taking the worker away.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from skyward.api.image import check_number, check_one_of
from skyward.api.provider import Availability, Machine, Offer, Provider, Report
from skyward.api.shell import Access
from skyward.api.spec import Spec
from skyward.api.usage_errors import corrects
from skyward.errors import InvalidArgument, NoPlace
from skyward.providers.dask_places import (
    Guest,
    Per,
    Place,
    Worker,
    connect,
    free_places,
    more_tasks,
    no_more_will_come,
    release,
)
from skyward.setup.joined.arrivals import Arrivals, JoinedLease, open_arrivals
from skyward.setup.joined.program import join_program

__all__ = ["Dask"]

_POLL = 0.2


@dataclass(frozen=True)
class DaskMachine(Machine):
    """A place on a worker, which whoever has the cluster may take away."""

    place: int = 0
    reason: str = ""

    @property
    def preemptible(self) -> bool:
        return True

    @property
    def gone(self) -> str:
        return self.reason


@corrects(
    {"address": 'the address first: `sky.Dask("tcp://...:8786")`'}, 'sky.Dask(cluster), or sky.Dask("tcp://...:8786")'
)
@dataclass(frozen=True, repr=False)
class Dask(Provider):
    """A dask cluster that you have: nodes run beside its workers, in an environment of their own.

    A pool is a guest there: it shares the machines with everything that dask runs on them.

    Args:
        cluster: a dask cluster, a `Client` (which stays open), or the address of a scheduler.
        per: "machine": one node for each machine that has workers; "worker": one for each worker. Default: "machine".
        security: dask's `Security` for an address with TLS; a cluster or a client brings its own. Default: none.
        lease: seconds for which nodes continue when they hear nothing from you; then they end everything. Default: 900.
    """

    cluster: Any
    per: Per = "machine"
    security: Any = field(default=None, repr=False)
    lease: float = 900.0

    def __post_init__(self) -> None:
        check_one_of("per", self.per, get_args(Per))
        check_number("lease", self.lease, whole=False)
        if not self.cluster or isinstance(self.cluster, int | float | list | tuple | dict):
            raise InvalidArgument(
                f"cluster={self.cluster!r}: give a dask cluster, a Client, or the scheduler's address."
            )
        if self.security is not None and not isinstance(self.cluster, str):
            raise InvalidArgument("security= goes with an address; a cluster or a Client brings its own.")

    def __repr__(self) -> str:
        shown = repr(self.cluster) if isinstance(self.cluster, str) else f"<{type(self.cluster).__name__}>"
        settings = [(item.name, getattr(self, item.name), item.default) for item in fields(self) if item.repr][1:]
        return (
            f"Dask({', '.join([shown, *(f'{name}={value!r}' for name, value, usual in settings if value != usual)])})"
        )

    @property
    def access(self) -> Access:
        return Access(self.lease)

    @property
    def elastic(self) -> bool:
        return True

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        place = "a machine with dask workers" if self.per == "machine" else "beside a dask worker"
        return [Offer(f"{place} ({self!r})")]

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        return [Availability("not asked; dask says so when a pool opens") for _ in offers]

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> DaskLease:
        """Places on `count` workers; an adaptive cluster is made to start them. Waits for them until `timeout`."""
        guest = Guest(*connect(self.cluster, self.security, timeout), pool)
        try:
            lease = DaskLease(self, guest, open_arrivals(pool, ttl=spec.ttl, lease=self.lease))
        except BaseException:
            guest.close()
            raise
        try:
            guest.check_versions()
            lease.machines = lease.more(spec, count, timeout, report)
            return lease
        except BaseException:
            lease.close(report)
            raise


class DaskLease(JoinedLease):
    """A pool's places on workers."""

    def __init__(self, provider: Dask, guest: Guest, arrivals: Arrivals) -> None:
        super().__init__(provider, arrivals)
        self._dask = provider
        self._guest = guest

    def more(self, spec: Spec, count: int, timeout: float, report: Report) -> tuple[DaskMachine, ...]:
        guest, arrivals, per = self._guest, self.arrivals, self._dask.per
        deadline = time.monotonic() + timeout
        taken: list[Place] = []
        tasks: list[Any] = []
        try:
            while len(taken) < count:
                if why := _first_lost(guest, taken):
                    raise NoPlace(why, ["open the pool again"])
                with guest.lock:  # others may look for places at the same time
                    workers = guest.workers()
                    for worker in free_places(workers, per, guest.taken())[: count - len(taken)]:
                        arrivals.expect([number := guest.next_number()])
                        taken.append(guest.start(number, worker, join_program(), arrivals.text))
                if len(taken) < count:
                    self._wait_for_workers(workers, tasks, len(taken), count, deadline, report)
            release(tasks)  # actors need a thread to start on
            tasks.clear()
            numbers = [place.number for place in taken]
            machines = arrivals.wait(numbers, deadline, report, lambda: _first_lost(guest, taken))
        except BaseException:
            guest.drop(taken)
            raise
        finally:
            release(tasks)
        return tuple(
            DaskMachine(p.worker.address, m.private_ip, m.public_ip, joined=m.joined, place=p.number)
            for m, p in zip(machines, taken, strict=True)
        )

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        return [replace(item, reason=self._gone(item)) if isinstance(item, DaskMachine) else item for item in machines]

    def terminate(self, machines: Sequence[Machine]) -> None:
        numbers = [machine.place for machine in machines if isinstance(machine, DaskMachine)]
        self._guest.drop([place for place in list(self._guest.places.values()) if place.number in numbers])

    def close(self, report: Report) -> object:
        """Drops the pool's actors, with which everything ends that they hold."""
        self._guest.close()
        return super().close(report)

    def _wait_for_workers(
        self, workers: Sequence[Worker], tasks: list[Any], found: int, count: int, deadline: float, report: Report
    ) -> None:
        have = f"{found} of {count} nodes have a place on dask's {len(workers)} workers"
        why = no_more_will_come(self._dask.cluster, self._dask.per)
        if why or time.monotonic() > deadline:
            raise NoPlace(have, [why or "no others came in time; start more workers, or raise provision_timeout"])
        report(f"{have}; waiting for more workers")
        tasks += self._guest.wait_for(more_tasks(workers, count - found, len(tasks)))
        time.sleep(_POLL)

    def _gone(self, machine: DaskMachine) -> str:
        place = self._guest.places.get(machine.place)
        if place is None:
            return f"its place on {machine.id} was given back"
        return self._guest.lost(place) or self.arrivals.gone(place.number)


def _first_lost(guest: Guest, taken: Sequence[Place]) -> str | None:
    return next((why for place in taken if (why := guest.lost(place))), None)
