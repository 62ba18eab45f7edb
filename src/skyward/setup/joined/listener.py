"""Where machines arrive: accepts connections, and hands over those that have said what they are.

A connection begins with a TLS handshake and a line of JSON (`join` or `stream`), or without TLS with the one-time id of
a stream that has TLS of its own inside. Nothing else is read from anybody before that.
"""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from skyward.node.addresses import network
from skyward.transport.certificates import Authority, context
from skyward.transport.link import tune

__all__ = ["ID_LENGTH", "Listener"]

ID_LENGTH = 32
_HANDSHAKE = 10.0
_LONGEST = 4096
_WAITING = 256  # connections that have not said yet what they are
_PER_NETWORK = 128
_TLS_HANDSHAKE = 0x16


class _Arrival:
    """A connection that has not said yet what it is, and from where; TLS takes its place when it begins."""

    def __init__(self, sock: socket.socket, network: str) -> None:
        self.sock, self.network = sock, network


class Listener:
    """Accepts connections on any number of sockets, each in a thread of its own until it has said what it is.

    `joins` and `streams` are called with it, in that thread; they close what they do not want.
    """

    def __init__(
        self,
        authority: Authority,
        joins: Callable[[ssl.SSLSocket, dict[str, Any]], None],
        streams: Callable[[socket.socket, str], None],
    ) -> None:
        identity = authority.issue("listener")
        self.fingerprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(identity.cert)).hexdigest()
        """What machines compare before they say anything: no name, and no other certificate, counts for them."""
        self._tls = context(identity, server=True)
        self._tls.verify_mode = ssl.CERT_NONE  # who arrives has a token, and no certificate yet
        self._tls.num_tickets = 0
        self._joins, self._streams = joins, streams
        self._lock = threading.Lock()
        self._waiting: dict[_Arrival, None] = {}  # in the order in which they came
        self._listening: socket.socket | None = None
        self._closed = False

    def listen(self, host: str, port: int) -> int:
        """Listens on an address of this computer, an empty one for all; gives the port."""
        if not host and socket.has_dualstack_ipv6():
            made = socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = socket.create_server((host, port), family=family, backlog=1024)
        self._listening = made
        threading.Thread(target=self._accept, args=(made,), name="skyward-arrivals", daemon=True).start()
        return made.getsockname()[1]

    def take(self, sock: socket.socket, address: str) -> None:
        """Hears what a new connection is, in a thread of its own."""
        arrival = _Arrival(sock, network(address))
        self._wait(arrival)
        try:
            threading.Thread(target=self._hear, args=(arrival,), name="skyward-arrival", daemon=True).start()
        except RuntimeError:  # no more threads
            self._forget(arrival)
            sock.close()

    def close(self) -> None:
        """Accepts nobody any more."""
        self._closed = True
        if self._listening is not None:
            try:
                self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            except OSError:
                pass
            self._listening.close()

    def after_fork(self) -> None:
        """Closes a forked child's copy."""
        if self._listening is not None:
            self._listening.close()

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed:
            try:
                sock, address = listening.accept()
            except OSError:
                time.sleep(0.05)  # closed, or no room for one more at the moment
                continue
            self.take(sock, address[0])

    def _hear(self, arrival: _Arrival) -> None:
        sock = arrival.sock
        try:
            sock.settimeout(_HANDSHAKE)
            deadline = time.monotonic() + _HANDSHAKE
            if sock.family != socket.AF_UNIX:
                tune(sock)
            first = sock.recv(1, socket.MSG_PEEK)
            if first and first[0] != _TLS_HANDSHAKE:
                id = _exactly(sock, ID_LENGTH, deadline).decode("ascii")
                self._forget(arrival)
                self._streams(sock, id)
                return
            secured = self._secured(arrival)
            kind, hello = _greeting(_line(secured, deadline))
            self._forget(arrival)
            if kind == "join" and type(hello) is dict:
                self._joins(secured, cast("dict[str, Any]", hello))
            elif kind == "stream" and type(hello) is str:
                self._streams(secured, hello)
            else:
                raise ValueError("no greeting")
        except (OSError, ValueError, RecursionError):
            arrival.sock.close()  # not one of ours, or too slow
        finally:
            self._forget(arrival)

    def _secured(self, arrival: _Arrival) -> ssl.SSLSocket:
        """TLS over a connection, which can be sent away in the middle of the handshake as before it."""
        with self._lock:  # the socket before is of no use from here on
            made = self._tls.wrap_socket(arrival.sock, server_side=True, do_handshake_on_connect=False)
            arrival.sock = made
            if arrival not in self._waiting:
                raise ConnectionError("it was sent away")
        made.do_handshake()
        return made

    def _wait(self, arrival: _Arrival) -> None:
        """Puts a connection in line. When that is too long, the oldest of the network with most is sent away."""
        near = arrival.network
        with self._lock:
            self._waiting[arrival] = None
            counts = Counter(known.network for known in self._waiting)
            if len(self._waiting) <= _WAITING and counts[near] <= _PER_NETWORK:
                return
            crowded = near if counts[near] > _PER_NETWORK else counts.most_common(1)[0][0]
            longest = next(known for known in self._waiting if known.network == crowded)
            del self._waiting[longest]
            try:
                socket.socket.shutdown(longest.sock, socket.SHUT_RDWR)
            except OSError:
                pass  # it has just gone

    def _forget(self, arrival: _Arrival) -> None:
        with self._lock:
            self._waiting.pop(arrival, None)


def _greeting(line: bytes) -> tuple[str, object]:
    """The only entry of a greeting."""
    said: Any = json.loads(line)
    if type(said) is not dict or len(cast("dict[str, Any]", said)) != 1:
        raise ValueError("no greeting")
    return next(iter(cast("dict[str, Any]", said).items()))


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    got = b""
    while len(got) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        piece = sock.recv(count - len(got))
        if not piece:
            raise ConnectionError("it has ended")
        got += piece
    return got


def _line(sock: socket.socket, deadline: float) -> bytes:
    """One line, and not a byte more of what follows it."""
    got = bytearray()
    while not got.endswith(b"\n"):
        if len(got) >= _LONGEST:
            raise ValueError("the greeting is too long")
        got += _exactly(sock, 1, deadline)
    return bytes(got)
