"""By which addresses the machines of a pool reach each other: candidates in order of preference, and what was found."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Address", "Blocked", "Layout", "blocked_pairs", "candidates"]


@dataclass(frozen=True)
class Address:
    """One address of a machine, and the interface that owns it."""

    interface: str
    ip: str
    netmask: str

    @property
    def network(self) -> str:
        """The network that the address lies in."""
        return str(ipaddress.ip_interface(f"{self.ip}/{self.netmask}").network)

    @property
    def private(self) -> bool:
        """Whether the address means something inside one network only."""
        return ipaddress.ip_address(self.ip).is_private


@dataclass(frozen=True)
class Blocked:
    """A machine that cannot connect to another one."""

    source: int
    target: int
    reason: str


@dataclass(frozen=True)
class Layout:
    """An address for every node, and the pairs between which nothing passes."""

    addresses: tuple[Address, ...]
    blocked: tuple[Blocked, ...] = field(default=())

    @property
    def star(self) -> bool:
        """Whether nodes can be relied on to reach the client only, not each other."""
        return bool(self.blocked)

    def explain(self, names: Sequence[str]) -> str:
        """The blocked pairs, in words."""
        shown = [
            f"node {b.source} ({names[b.source]}) cannot connect to node {b.target} "
            f"({names[b.target]}, {self.addresses[b.target].ip}): {b.reason}"
            for b in self.blocked[:4]
        ]
        more = len(self.blocked) - len(shown)
        return "; ".join(shown) + (f"; and {more} more pairs" if more > 0 else "")


def candidates(machines: Sequence[Sequence[Address]]) -> list[tuple[Address, ...]]:
    """Ways to give every machine one of its addresses: networks that all share first, then the ones ssh came in on.

    The first address of each machine is the one by which the client reached it. Among shared networks one that the
    client does not use comes first: it was laid for the machines.
    """
    shared: list[tuple[Address, ...]] = []
    for address in machines[0]:
        chosen = [next((a for a in known if a.network == address.network), None) for known in machines]
        found = tuple(a for a in chosen if a is not None)
        if len(found) == len(machines) and len({a.ip for a in found}) == len(found):
            shared.append(found)
    fronts = {known[0].ip for known in machines if known}
    shared.sort(key=lambda found: (not found[0].private, any(a.ip in fronts for a in found)))
    if all(machines):
        front = tuple(known[0] for known in machines)
        if front not in shared:
            shared.append(front)
    return shared


def blocked_pairs(answers: Mapping[int, Mapping[int, str]]) -> tuple[Blocked, ...]:
    """The pairs that did not answer, from what each node found."""
    return tuple(
        Blocked(source, target, reason)
        for source, found in sorted(answers.items())
        for target, reason in sorted(found.items())
        if reason
    )
