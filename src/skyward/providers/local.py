"""This computer as a provider: as many nodes as are asked for, each a set of processes, at no cost."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyward.api.provider import Machine, Offer, Provider
from skyward.api.shell import Access
from skyward.api.spec import Spec
from skyward.errors import InvalidArgument

__all__ = ["Local"]

_MOST = 500


@dataclass(frozen=True)
class Local(Provider):
    """Nodes on this computer; what a pool uses when no provider is given."""

    @property
    def access(self) -> Access:
        return Access(local=True)

    def offers(self, spec: Spec) -> Iterable[Offer]:
        if isinstance(spec.nodes, int) and spec.nodes > _MOST:
            raise InvalidArgument(f"nodes={spec.nodes}: this computer can play {_MOST} nodes at the most.")
        return [Offer("this computer", vcpus=os.cpu_count())]

    def launch(self, offer: Offer, count: int, label: str) -> list[Machine]:
        return [Machine(f"{label}-{i}", "local", "127.0.0.1") for i in range(count)]

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        return list(machines)

    def terminate(self, machines: Sequence[Machine]) -> None:
        """Nothing to give back: the pool has ended its own processes."""

    def find(self, label: str) -> list[Machine]:
        return []
