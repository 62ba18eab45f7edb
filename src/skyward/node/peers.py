"""Peers that have connected and not said yet who they are: which of them count as one sender, and how many may wait."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

__all__ = ["Waiting", "WaitingPeers", "accept_all", "network", "plain"]


def accept_all(listener: socket.socket, take: Callable[[socket.socket, str], None]) -> None:
    """Accepts connections until the listener is closed; `take` gets each, with its address, empty for a local one."""
    while listener.fileno() >= 0:
        try:
            sock, address = listener.accept()
        except OSError:
            time.sleep(0.05)  # closed, or no room for one more at the moment; those who wait leave by themselves
            continue
        take(sock, address[0] if address else "")


class Waiting:
    """A connection that has not said yet what it is, and from where; TLS takes its place when it begins."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock, self.network = sock, network(address)


class WaitingPeers:
    """Those who wait, in the order in which they came. Usable from many threads.

    When there are too many, who has waited longest is sent away, of the network with most.
    """

    def __init__(self, most: int, per_network: int) -> None:
        self._most, self._per_network = most, per_network
        self._lock = threading.Lock()
        self._line: dict[Waiting, None] = {}

    def __len__(self) -> int:
        return len(self._line)

    def networks(self) -> Counter[str]:
        """How many wait of each network."""
        return Counter(peer.network for peer in list(self._line))

    def add(self, sock: socket.socket, address: str) -> Waiting:
        """Puts a connection in line."""
        added = Waiting(sock, address)
        with self._lock:
            self._line[added] = None
            counts = self.networks()
            crowd = counts[added.network] > self._per_network
            if crowd or len(self._line) > self._most:
                crowded = added.network if crowd else counts.most_common(1)[0][0]
                longest = next(peer for peer in self._line if peer.network == crowded)
                del self._line[longest]
                try:
                    socket.socket.shutdown(longest.sock, socket.SHUT_RDWR)
                except OSError:
                    pass  # it has just gone
        return added

    def secure(self, peer: Waiting, context: ssl.SSLContext) -> ssl.SSLSocket:
        """TLS over a connection, which can be sent away in the middle of the handshake as before it."""
        with self._lock:  # the socket before is of no use from here on
            made = context.wrap_socket(peer.sock, server_side=True, do_handshake_on_connect=False)
            peer.sock = made
            if peer not in self._line:
                raise ConnectionError("it was sent away")
        return made

    def remove(self, peer: Waiting) -> None:
        """Takes a connection out of the line: it has said who it is, or is gone."""
        with self._lock:
            self._line.pop(peer, None)


def plain(address: str) -> str:
    """An address as people write it: an IPv4 address, also where an IPv6 socket has it as `::ffff:192.0.2.1`."""
    return address[7:] if address.startswith("::ffff:") and "." in address else address


def network(address: str) -> str:
    """What counts as one sender where connections are limited: an IPv4 address, or the /64 of an IPv6 one.

    Whoever has one IPv6 address mostly has the other 2**64 of its network too.
    """
    address = plain(address).partition("%")[0]
    try:
        return socket.inet_pton(socket.AF_INET6, address)[:8].hex() if ":" in address else address
    except OSError:
        return address
