"""Takes over the machines of a detached run: what was set up at submission is the pool of its program."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from skyward.api.context import PoolContext
from skyward.api.provider import Lease, Machine
from skyward.errors import PoolClosed
from skyward.node.run_folder import RUN
from skyward.setup.hosts import Host
from skyward.setup.keeper_client import PlacedKeeper
from skyward.setup.network import Address
from skyward.transport import local_sockets
from skyward.transport.roles import node_role

if TYPE_CHECKING:
    import ssl

__all__ = ["AdoptedLease", "Adoption", "adopt", "described", "wanted"]

_ANSWER = 30.0
_REACH = 10.0


class AdoptedLease(Lease):
    def __init__(self, context: PoolContext, adoption: Adoption) -> None:
        hourly = adoption.prices[-1][1] if adoption.prices else 0.0
        super().__init__(context.provider, context.name, adoption.machines, hourly_cost=hourly)
        self.adoption = adoption

    def close(self, report: Callable[[str], None]) -> object:
        return None


class Adoption:
    """The machines of this process's run while its pool is open, as the connection shows."""

    def __init__(self, sock: socket.socket, epoch: int, placed: dict[str, Any]) -> None:
        self._sock, self.epoch, self.session = sock, epoch, str(placed["session"])
        self.blocked: str | None = placed["blocked"]
        self.addresses = [Address(**address) for address in placed["addresses"]]
        self.hosts = [_host(each) for each in placed["hosts"]]
        self.prices = [(float(since), float(hourly)) for since, hourly in placed["prices"]]
        self._tls: ssl.SSLContext | None = None
        if placed["identity"] is not None:
            from skyward.transport.certificates import Identity, context

            self._tls = context(Identity(**placed["identity"]), server=False)

    @property
    def machines(self) -> tuple[Machine, ...]:
        nodes = {node: host.machine for host in self.hosts for node in host.nodes}
        return tuple(machine for _, machine in sorted(nodes.items()) if machine is not None)

    def reach(self, node: int, host: Host) -> socket.socket:
        if self._tls is None:
            return local_sockets.connect(host.keeper.sockets[node], _REACH)
        from skyward.transport.certificates import secure

        place = host.keeper.ports[node]
        return secure(socket.create_connection(place, timeout=_REACH), self._tls, _REACH, node_role(node))

    def release(self) -> None:
        with contextlib.suppress(OSError), self._sock:
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.recv(1)  # nothing: the steward has closed it


def adopt(context: PoolContext) -> AdoptedLease:
    """PoolClosed if they are not available."""
    path = os.environ[RUN]
    try:
        sock = local_sockets.connect(path, _ANSWER)
    except OSError as exc:
        raise PoolClosed(
            f"this program belongs to a detached run whose steward does not answer ({exc}), so there are no machines "
            f"for its pool. Started by hand, it should not have the variable {RUN}."
        ) from exc
    try:
        sock.sendall(json.dumps({"do": "adopt", "wanted": wanted(context)}).encode() + b"\n")
        answer = _answer(sock)
        if "refused" in answer:
            raise PoolClosed(f"this run's machines cannot be used here: {answer['refused']}")
        adoption = Adoption(sock, answer["epoch"], answer["placed"])
    except BaseException:
        sock.close()
        raise
    context.prices[:] = adoption.prices
    return AdoptedLease(context, adoption)


def wanted(context: PoolContext) -> dict[str, Any]:
    accelerator = context.spec.accelerator
    return {
        "nodes": context.nodes,
        "provider": context.provider.name,
        "accelerator": None if accelerator is None else accelerator.described(),
        "processes_per_node": context.spec.processes_per_node,
        "environment": context.image.environment_hash[:12],
        "plugins": [plugin.name for plugin in context.plugins],
    }


def described(
    hosts: Sequence[Host],
    addresses: Sequence[Address],
    blocked: str | None,
    session: str,
    prices: Sequence[tuple[float, float]],
    machines: Mapping[int, Machine],
) -> dict[str, Any]:
    return {
        "session": session,
        "blocked": blocked,
        "addresses": [asdict(address) for address in addresses],
        "prices": [list(price) for price in prices],
        "hosts": [
            {
                "nodes": list(host.nodes),
                "env": dict(host.env),
                "paths": list(host.paths),
                "cwd": host.cwd,
                "directory": host.keeper.directory,
                "scratch": host.keeper.scratch,
                "sockets": [[node, path] for node, path in host.keeper.sockets.items()],
                "ports": [[node, list(place)] for node, place in host.keeper.ports.items()],
                "machine": _machine(machines[host.nodes[0]]),
            }
            for host in hosts
        ],
    }


def _machine(machine: Machine) -> dict[str, Any]:
    return {
        "id": machine.id,
        "private_ip": machine.private_ip,
        "public_ip": machine.public_ip,
        "hourly_cost": machine.hourly_cost,
    }


def _host(described: Mapping[str, Any]) -> Host:
    sockets = {int(node): str(path) for node, path in described["sockets"]}
    ports = {int(node): (str(host), int(port)) for node, (host, port) in described["ports"]}
    keeper = PlacedKeeper(described["directory"], described["scratch"], sockets, ports)
    paths, machine = tuple(described["paths"]), Machine(**described["machine"])
    return Host(keeper, tuple(described["nodes"]), described["env"], paths, described["cwd"], machine)


def _answer(sock: socket.socket) -> dict[str, Any]:
    sock.settimeout(_ANSWER)
    deadline, received = time.monotonic() + _ANSWER, b""
    while not received.endswith(b"\n"):
        piece = sock.recv(1 << 16)
        if not piece or time.monotonic() > deadline:
            raise PoolClosed("the steward of this run has ended, and its machines end with it.")
        received += piece
    answer: dict[str, Any] = json.loads(received)
    return answer
