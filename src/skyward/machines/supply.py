"""More machines for a pool that is open: one in place of another, and none once the pool has begun to close."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from skyward.api.provider import Machine, Provider, Report
from skyward.api.spec import Spec
from skyward.errors import PoolClosed

__all__ = ["Supply"]


class Supply:
    """Asks a provider for machines that join those of the pool `name`, from any thread, until it is closed."""

    def __init__(self, provider: Provider, spec: Spec, name: str, timeout: float, replace: bool | None) -> None:
        self._provider, self._spec, self._name, self._timeout = provider, spec, name, timeout
        self._replace = replace
        self._changed = threading.Condition()
        self._busy = 0
        self._closed = False

    def replaces(self, machine: Machine) -> bool:
        """Whether another machine stands in for this one when it is lost; if not said, for those that may be taken."""
        return machine.preemptible if self._replace is None else self._replace

    def another(self, spent: float, report: Report) -> Machine:
        """One more machine, beside others that cost `spent` an hour; PoolClosed if the pool is closed meanwhile."""
        last, spec = "", self._spec
        if spec.max_hourly_cost is not None:
            spec = replace(spec, max_hourly_cost=max(spec.max_hourly_cost - spent, 1e-9))

        def tell(text: str) -> None:
            nonlocal last
            self._check_open()  # providers report while they wait
            if text != last:
                report(text)
            last = text

        with self._asking():
            holding = self._provider.acquire_more(spec, self._name, 1, self._timeout, tell)
        return holding.machines[0]

    def ended(self, machines: Sequence[Machine]) -> list[str]:
        """Why machines are gone, as their provider knows; empty for those that are there."""
        with self._asking():
            return [machine.gone for machine in self._provider.refresh(machines)]

    def discard(self, machine: Machine) -> None:
        """Gives one machine back."""
        with self._asking():
            self._provider.terminate([machine])

    def close(self, seconds: float) -> None:
        """Refuses what comes, and waits for what goes on: the pool gives back only what is known by then."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._busy, seconds)

    @contextmanager
    def _asking(self) -> Generator[None]:
        with self._changed:
            self._check_open()
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the pool was closed while another machine was asked for.")
