"""The nodes of a call find each other before they form a torch group for it.

    node 1 .. n-1 --- pool and number --------> node 0, which listens on the pool's port for torch until all are there
    node 1 .. n-1 <-- where the store listens -- node 0

A node that comes while node 0 is still in the call before is refused and tries again, so groups never mix. All waiting
is in Python, where a call can be stopped; torch itself would wait deaf.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from skyward.api.info import InstanceInfo, require_peers
from skyward.errors import SkywardError

__all__ = ["await_listener", "gather", "taken"]

_NOTICE = 10.0
_PAUSE = 0.02
_LINE = 4096


def gather(info: InstanceInfo, port: int, timeout: float, offer: Callable[[], int]) -> int:
    """The number that `offer` gives on node 0, on every node, when all of them are here."""
    require_peers(info)
    return _host(info, port, timeout, offer) if info.node == 0 else _visit(info, port, timeout)


def await_listener(info: InstanceInfo, port: int, timeout: float) -> None:
    """Return when node 0 listens; torch, when refused, would try again only after half a second."""
    for _ in _patiently(lambda: _waiting_for_head(info, port), timeout):
        try:
            socket.create_connection((info.head_addr, port), timeout=5).close()
            break
        except OSError:
            continue


def taken(port: int, reason: str) -> SkywardError:
    """The error of a port that was free when the pool opened."""
    return SkywardError(
        f"port {port} of node 0, chosen for torch when the pool opened, cannot be used ({reason}): another program "
        'has taken it, or another runner of the node, if the pool has executor="process". A group has one process a '
        "node; open the pool again with one."
    )


def _host(info: InstanceInfo, port: int, timeout: float, offer: Callable[[], int]) -> int:
    guests: dict[int, socket.socket] = {}

    def missing() -> str:
        names = [str(node) for node in range(1, info.total_nodes) if node not in guests]
        return f"node 0 waits for node{'s' if len(names) > 1 else ''} {', '.join(names)} to join its torch group"

    with ExitStack() as stack:
        listener = stack.enter_context(_listener(info.head_addr, port))
        for _ in _patiently(missing, timeout, listener):
            while select.select([listener], [], [], 0)[0]:
                guest = stack.enter_context(listener.accept()[0])
                hello = _read(guest)
                if isinstance(hello, list) and hello[:1] == [info.job_id] and hello[1] in range(1, info.total_nodes):
                    guests[hello[1]] = guest
            for gone in select.select(guests.values(), [], [], 0)[0]:  # they say nothing more, so this is their end
                guests = {node: guest for node, guest in guests.items() if guest is not gone}
            if len(guests) == info.total_nodes - 1:
                break
        answer = offer()
        for guest in guests.values():
            guest.sendall(json.dumps(answer).encode() + b"\n")
    return answer


def _visit(info: InstanceInfo, port: int, timeout: float) -> int:
    with ExitStack() as stack:
        head: socket.socket | None = None
        for _ in _patiently(lambda: _waiting_for_head(info, port), timeout):
            try:
                if head is None:
                    head = stack.enter_context(socket.create_connection((info.head_addr, port), timeout=5))
                    head.sendall(json.dumps([info.job_id, info.node]).encode() + b"\n")
                if select.select([head], [], [], _PAUSE)[0]:
                    answer = _read(head)
                    if isinstance(answer, int):
                        return answer
                    head = None  # node 0 gave up, or its process ended
            except OSError:
                head = None  # node 0 is not there yet
    raise AssertionError("unreachable")


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as exc:
        raise taken(port, str(exc.strerror)) from exc


def _patiently(missing: Callable[[], str], timeout: float, arrival: socket.socket | None = None) -> Iterator[None]:
    """Turns of a loop that waits, with a word after a while, and an error at the end."""
    began, told = time.monotonic(), False
    while (waited := time.monotonic() - began) < timeout:
        yield
        if waited > _NOTICE and not told:
            told = True
            print(f"{missing()}, at most {timeout:g} s. {_ADVICE}", file=sys.stderr, flush=True)
        select.select([arrival] if arrival else [], [], [], _PAUSE)
    raise SkywardError(f"{missing()}, in vain for timeout={timeout:g} s. {_ADVICE}")


_ADVICE = (
    "A group needs the call on every node: send it with `call() @ pool`; `>>` sends it to one. "
    "If it was, look what keeps the others from starting it, or a firewall from reaching node 0."
)


def _waiting_for_head(info: InstanceInfo, port: int) -> str:
    return f"node {info.node} waits for node 0 at {info.head_addr}:{port} to form the torch group"


def _read(sock: socket.socket) -> Any:
    """The line that came; None where there is none, or one that is not ours."""
    sock.settimeout(5)
    try:
        with sock.makefile("rb") as file:
            return json.loads(file.readline(_LINE))
    except (OSError, ValueError):
        return None
