"""Connections that have not authenticated yet: limits per sender."""

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
    while listener.fileno() >= 0:
        try:
            sock, address = listener.accept()
        except OSError:
            time.sleep(0.05)  # closed, or no room for one more at the moment; those who wait leave by themselves
            continue
        take(sock, address[0] if address else "")


class Waiting:
    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock, self.network = sock, network(address)


class WaitingPeers:
    """Thread-safe. When full, drops the oldest of the network with most."""

    def __init__(self, most: int, per_network: int) -> None:
        self._most, self._per_network = most, per_network
        self._lock = threading.Lock()
        self._line: dict[Waiting, None] = {}

    def __len__(self) -> int:
        return len(self._line)

    def networks(self) -> Counter[str]:
        return Counter(peer.network for peer in list(self._line))

    def add(self, sock: socket.socket, address: str) -> Waiting:
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
        """The connection can also be dropped during the handshake."""
        with self._lock:  # the socket before is of no use from here on
            made = context.wrap_socket(peer.sock, server_side=True, do_handshake_on_connect=False)
            peer.sock = made
            if peer not in self._line:
                raise ConnectionError("it was sent away")
        return made

    def remove(self, peer: Waiting) -> None:
        with self._lock:
            self._line.pop(peer, None)


def plain(address: str) -> str:
    """IPv4-mapped IPv6 addresses as IPv4."""
    return address[7:] if address.startswith("::ffff:") and "." in address else address


def network(address: str) -> str:
    """The unit of rate limits: an IPv4 address, or an IPv6 /64, which one sender usually owns."""
    address = plain(address).partition("%")[0]
    try:
        return socket.inet_pton(socket.AF_INET6, address)[:8].hex() if ":" in address else address
    except OSError:
        return address
