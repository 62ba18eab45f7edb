"""The nodes of a pool find each other before a framework forms its group.

A framework that waits for a node in vain ends its process or hangs; here the wait ends with the names of those missing.

    node 1 .. n-1   --- pool and number --->   node 0, until all are there or the time is up
    node 1 .. n-1   <-- who is missing -----   node 0
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from skyward.api.info import InstanceInfo, require_peers
from skyward.errors import SkywardError

__all__ = ["meet"]

_NOTICE = 10.0
_ADVICE = (
    "A group needs the call on every node: send it with `call() @ pool`; `>>` sends it to one. "
    "If it was, look what keeps the others from starting it, or from reaching the head."
)


def meet(what: str, info: InstanceInfo, port: int, seconds: float) -> None:
    """Returns on every node when all of them are here; otherwise the error says on each which ones are not."""
    require_peers(info)
    missing = _host(what, info, port, seconds) if info.node == 0 else _visit(what, info, port, seconds)
    if missing:
        raise SkywardError(
            f"{what} needs all {info.total_nodes} nodes at {info.head_addr} port {port}, but {_named(missing)} did not "
            f"come within {seconds:g} s. {_ADVICE}"
        )


def _host(what: str, info: InstanceInfo, port: int, seconds: float) -> list[int]:
    absent = set(range(1, info.total_nodes))
    clock = _Clock(what, seconds)
    with ExitStack() as stack:
        guests: list[socket.socket] = []
        with _listener(what, info.head_addr, port) as listener:
            while absent and clock.goes_on(_named(sorted(absent))):
                listener.settimeout(0.5)
                try:
                    guest = stack.enter_context(listener.accept()[0])
                    guest.settimeout(2)
                    pool, node = _read(guest)
                except (OSError, ValueError, TypeError):
                    continue  # nobody yet, or a stranger
                if pool == info.job_id and node in range(1, info.total_nodes):
                    absent.discard(node)
                    guests.append(guest)
        missing = sorted(absent)
        for guest in guests:
            try:
                guest.sendall(json.dumps(missing).encode() + b"\n")
            except OSError:
                continue  # it is gone again, as the pool will find
    return missing


def _visit(what: str, info: InstanceInfo, port: int, seconds: float) -> list[int]:
    clock = _Clock(what, seconds)
    while clock.goes_on("node 0"):
        try:
            with socket.create_connection((info.head_addr, port), timeout=5) as head:
                head.sendall(json.dumps([info.job_id, info.node]).encode() + b"\n")
                head.settimeout(seconds + 5)
                return _read(head)
        except (OSError, ValueError):
            time.sleep(0.05)  # the head is not there yet
    return [0]


class _Clock:
    """Time that is left, with one word to the user when the wait becomes long."""

    def __init__(self, what: str, seconds: float) -> None:
        self.what, self.seconds = what, seconds
        self.began, self.told = time.monotonic(), False

    def goes_on(self, missing: str) -> bool:
        """Whether there is time to wait for those that are missing."""
        waited = time.monotonic() - self.began
        if waited > _NOTICE and not self.told:
            self.told = True
            text = f"{self.what} waits for {missing} since {waited:.0f} s, at most {self.seconds:g} s. {_ADVICE}"
            print(text, file=sys.stderr, flush=True)
        return waited < self.seconds


def _listener(what: str, address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        raise SkywardError(
            f"{what} cannot be formed, since port {port} of {address} is not free any more ({error.strerror}). A group "
            'has one process a node: with executor="process" several of them want it. Use threads, or one slot a node.'
        ) from error


def _read(sock: socket.socket) -> Any:
    with sock.makefile("rb") as file:
        return json.loads(file.readline(65_536))


def _named(nodes: Iterable[int]) -> str:
    names = [str(node) for node in nodes]
    return f"node {names[0]}" if len(names) == 1 else f"nodes {', '.join(names[:-1])} and {names[-1]}"
