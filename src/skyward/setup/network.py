"""Chooses the addresses by which a pool's machines reach each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skyward.errors import BootstrapError
from skyward.machines.parallel import each
from skyward.node.orders import ClientToKeeper
from skyward.setup.hosts import Host

__all__ = [
    "Address",
    "Blocked",
    "Layout",
    "blocked_pairs",
    "candidates",
    "find_layout",
    "newcomer_blocked",
    "replacement_address",
]


@dataclass(frozen=True)
class Address:
    interface: str
    ip: str
    netmask: str

    @property
    def network(self) -> str:
        return str(ipaddress.ip_interface(f"{self.ip}/{self.netmask}").network)

    @property
    def private(self) -> bool:
        return ipaddress.ip_address(self.ip).is_private


@dataclass(frozen=True)
class Blocked:
    source: int
    target: int
    reason: str


@dataclass(frozen=True)
class Layout:
    addresses: tuple[Address, ...]
    blocked: tuple[Blocked, ...] = field(default=())

    @property
    def star(self) -> bool:
        return bool(self.blocked)

    def explain(self, names: Sequence[str]) -> str:
        shown = [
            f"node {b.source} ({names[b.source]}) cannot connect to node {b.target} "
            f"({names[b.target]}, {self.addresses[b.target].ip}): {b.reason}"
            for b in self.blocked[:4]
        ]
        more = len(self.blocked) - len(shown)
        return "; ".join(shown) + (f"; and {more} more pairs" if more > 0 else "")


def candidates(machines: Sequence[Sequence[Address]]) -> list[tuple[Address, ...]]:
    """Ways to give every machine an address: shared networks first, then ssh's addresses.

    A machine's first address is the one by which the client reached it. A shared network unused by the client comes
    first: it was built for the machines.
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
    return tuple(
        Blocked(source, target, reason)
        for source, found in sorted(answers.items())
        for target, reason in sorted(found.items())
        if reason
    )


_LOOPBACK = Address("lo", "127.0.0.1", "255.0.0.0")
_PROBE_TIMEOUT = 3.0


def find_layout(
    hosts: Sequence[Host], names: Sequence[str], network: str, deadline: float, alone: bool = True
) -> Layout:
    """Leaves a listener on each address, and tests every pair. A single host uses loopback if it stays `alone`."""
    if len(hosts) == 1 and alone:
        return Layout((_LOOPBACK,) * len(hosts[0].nodes))
    if network == "star":
        return Layout((_LOOPBACK,) * len(hosts))
    known = each(lambda host: _addresses(host, deadline), hosts)
    for node, found in enumerate(known):
        if not found:
            raise BootstrapError("network", f"{names[node]} has no address except loopback.", node)
    if len(hosts) == 1:
        return Layout((known[0][0],))
    best: Layout | None = None
    for addresses in candidates(known):
        layout = Layout(addresses, _blocked(hosts, addresses, deadline))
        if not layout.blocked:
            return layout
        if best is None or len(layout.blocked) < len(best.blocked):
            best = layout
    assert best is not None
    if network == "mesh":
        raise BootstrapError("network", f"{best.explain(names)}. Open the hosts' firewalls to each other.")
    return best


def replacement_address(host: Host, ip: str, old: Address, deadline: float) -> Address:
    """In the same network as `old`, if possible."""
    if old == _LOOPBACK:
        return old
    found = _addresses(host, deadline)
    if not found:
        raise BootstrapError("network", f"{host.keeper.shell.name} has no address except loopback.")
    return next((address for address in found if address.ip == ip or address.network == old.network), found[0])


def newcomer_blocked(
    host: Host, node: int, present: Mapping[int, tuple[str, int]], addresses: Sequence[Address], deadline: float
) -> Layout:
    peers = {str(other): end for other, end in present.items()}
    answer: dict[str, str] = host.keeper.ask(ClientToKeeper.Probe(peers, _PROBE_TIMEOUT), deadline)
    return Layout(tuple(addresses), blocked_pairs({node: {int(name): reason for name, reason in answer.items()}}))


def _addresses(host: Host, deadline: float) -> list[Address]:
    return [Address(*entry) for entry in host.keeper.ask(ClientToKeeper.Look(), deadline)]


def _blocked(hosts: Sequence[Host], addresses: Sequence[Address], deadline: float) -> tuple[Blocked, ...]:
    nodes = range(len(hosts))
    listening: dict[str, tuple[str, int]] = {}

    def listen(node: int) -> None:
        port = hosts[node].keeper.ask(ClientToKeeper.Listen(addresses[node].ip), deadline)
        if port is not None:
            listening[str(node)] = (addresses[node].ip, port)

    def probe(node: int) -> dict[int, str]:
        peers = {name: end for name, end in listening.items() if name != str(node)}
        answer: dict[str, str] = hosts[node].keeper.ask(ClientToKeeper.Probe(peers, _PROBE_TIMEOUT), deadline)
        silent = {other: "it cannot listen there" for other in nodes if str(other) not in listening and other != node}
        return silent | {int(name): reason for name, reason in answer.items()}

    each(listen, nodes)
    return blocked_pairs(dict(enumerate(each(probe, nodes))))
