"""What a machine knows of its network: its own addresses, and which of its peers it can connect to."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time

__all__ = ["addresses", "network", "plain", "probe"]

Address = tuple[str, str, str]  # interface, address, netmask


def addresses() -> list[Address]:
    """Addresses of this machine that others may reach it by; the one that ssh came in on first."""
    import psutil

    found: list[Address] = [
        (interface, entry.address, entry.netmask)
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.") and entry.netmask
    ]
    arrived = os.environ.get("SSH_CONNECTION", "").split(" ")
    front = arrived[2] if len(arrived) == 4 else ""
    return sorted(found, key=lambda address: address[1] != front)


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


def probe(peers: dict[str, tuple[str, int]], timeout: float) -> dict[str, str]:
    """Tries to connect to every peer at once; gives an empty text for each that answers, else the reason."""
    selector = selectors.DefaultSelector()
    answers: dict[str, str] = {}
    for name, (host, port) in peers.items():
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setblocking(False)
        code = sock.connect_ex((host, port))
        if code in (0, errno.EINPROGRESS):
            selector.register(sock, selectors.EVENT_WRITE, name)
        else:
            answers[name] = os.strerror(code)
            sock.close()
    deadline = time.monotonic() + timeout
    while selector.get_map() and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            answers[key.data] = os.strerror(code) if code else ""
            selector.unregister(sock)
            sock.close()
    for key in list(selector.get_map().values()):
        answers[key.data] = f"no answer within {timeout:g} s"
        assert isinstance(key.fileobj, socket.socket)
        key.fileobj.close()
    selector.close()
    return answers
