"""This computer as a provider: each node is a set of processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyward.api.provider import Availability, Lease, Machine, Offer, Provider, Report
from skyward.api.shell import Access
from skyward.api.spec import Spec
from skyward.api.usage_errors import corrects
from skyward.errors import InvalidArgument

__all__ = ["Local"]

_MOST = 500


@corrects(
    {"nodes": "`sky.ComputePool(nodes=4)`: how many there are is the pool's"},
    "sky.ComputePool(nodes=4)",
)
@dataclass(frozen=True)
class Local(Provider):
    """Nodes on this computer; the default provider."""

    @property
    def access(self) -> Access:
        return Access(local=True, stays=True)

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        self._check(count)
        if spec.accelerator is not None:
            from skyward.api.matching import compare
            from skyward.machines.offers import Plan, RuledOut, wish
            from skyward.node.gpus import look

            if refusal := compare(spec.accelerator, look()).refusal:
                return Plan("this computer", wish(spec), count, (), (RuledOut("this computer", refusal),))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        return [Offer("this computer", vcpus=os.cpu_count(), memory_gb=round(memory, 1))]

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        text = "here" if count == 1 else f"here; {count} nodes share it"
        return [Availability(text, possible=True) for _ in offers]

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Lease:
        self._check(count)
        return Lease(self, pool, [Machine(f"{pool}-{i}", "127.0.0.1") for i in range(count)])

    def _check(self, count: int) -> None:
        if not sys.platform.startswith("linux"):
            raise InvalidArgument(
                f"nodes on this computer need Linux, and this is {sys.platform}. Say where the nodes are: "
                "provider=sky.SSH(hosts=[...]) or provider=sky.AWS(). On Windows, Skyward runs inside WSL."
            )
        if count > _MOST:
            raise InvalidArgument(f"nodes={count}: this computer can run {_MOST} nodes at most.")
