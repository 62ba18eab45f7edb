"""Where machines and a client meet that cannot reach each other: a program on a host that both reach.

    machine ──── TCP ───► relay ◄─── a socket file ─── sshd ◄═══ ssh ═══ client

It passes on bytes that it cannot read. Settings come on standard input; when that ends, the client is away, and
machines are told to retry. It ends by SIGTERM, or with the lease. One file, standard library, any Python from 3.8 on.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from typing import Any

__all__ = ["main"]

_PIECE = 1 << 18
_NUMBER = 8
_UNCLAIMED, _PER_NETWORK, _CLAIM = 1024, 256, 15.0
_UNTOLD, _HIGHEST = 1 << 14, 99_999_999
_SIOCGIFADDR = 0x8915


class _End:
    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock, self.address, self.since = sock, address, time.monotonic()
        self.network = _network(address)
        self.other: _End | None = None
        self.waiting, self.heard, self.ended = b"", b"", False
        sock.setblocking(False)


class Relay:
    def __init__(self, port: int, lease: float) -> None:
        self._lease, self._away = lease, 0.0
        self._directory = tempfile.mkdtemp(prefix="skyward-relay-")
        self._selector = selectors.DefaultSelector()
        self._machines = _listening(port)
        self._client = socket.socket(socket.AF_UNIX)
        self._client.bind(os.path.join(self._directory, "s"))
        self._client.listen(256)
        self._numbers = 0
        self._untold = bytearray()
        self._unclaimed: dict[int, _End] = {}
        for listening in (self._machines, self._client):
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)

    def serve(self) -> None:
        port = self._machines.getsockname()[1]
        names = [*_addresses(), socket.gethostname()]
        _say({"port": port, "socket": os.path.join(self._directory, "s"), "addresses": names, "pid": os.getpid()})
        os.set_blocking(1, False)  # a client that does not listen must not stop us
        while not self._away or time.monotonic() - self._away < self._lease:
            for key, _ in self._selector.select(1.0):
                if key.fileobj == 0:
                    self._hear()
                elif key.fileobj == 1:
                    self._tell()
                elif key.fileobj is self._machines:
                    self._accept_machine()
                elif key.fileobj is self._client:
                    self._accept(self._client, "")
                elif key.data.sock.fileno() >= 0:
                    self._attend(key.data)
            for number, end in list(self._unclaimed.items()):
                if time.monotonic() - end.since > _CLAIM:
                    self._close(self._unclaimed.pop(number))

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _hear(self) -> None:
        if not os.read(0, 1 << 12):
            self._away = time.monotonic()
            self._selector.unregister(0)

    def _accept(self, listening: socket.socket, address: str) -> _End | None:
        try:
            sock, peer = listening.accept()
        except OSError:
            time.sleep(0.01)  # gone, or no more files
            return None
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            address = peer[0]
        end = _End(sock, address)
        if listening is self._client:
            self._selector.register(sock, selectors.EVENT_READ, end)
        return end

    def _accept_machine(self) -> None:
        end = self._accept(self._machines, "")
        if end is None:
            return
        if self._away or len(self._untold) > _UNTOLD:
            end.sock.close()  # it tries again
            return
        counts, near = Counter(known.network for known in self._unclaimed.values()), end.network
        if counts[near] >= _PER_NETWORK or len(self._unclaimed) >= _UNCLAIMED:
            crowded = near if counts[near] >= _PER_NETWORK else counts.most_common(1)[0][0]
            oldest = next(number for number, known in self._unclaimed.items() if known.network == crowded)
            self._close(self._unclaimed.pop(oldest))
        self._numbers = self._numbers % _HIGHEST + 1
        self._unclaimed[self._numbers] = end
        self._untold += json.dumps({"new": self._numbers, "from": end.address}).encode() + b"\n"
        self._tell()

    def _tell(self) -> None:
        try:
            while self._untold:
                del self._untold[: os.write(1, self._untold)]
        except BlockingIOError:
            pass
        except OSError:  # the client is away
            self._untold.clear()
        known = self._selector.get_map().get(1)
        if self._untold and known is None:
            self._selector.register(1, selectors.EVENT_WRITE)
        elif not self._untold and known is not None:
            self._selector.unregister(1)

    def _attend(self, end: _End) -> None:
        try:
            if end.waiting:
                end.waiting = end.waiting[end.sock.send(end.waiting) :]
            if end.other is None:
                self._claim(end)
            elif not end.other.waiting and not end.ended:
                piece = end.sock.recv(_PIECE)
                if piece:
                    end.other.waiting = piece[_sent(end.other.sock, piece) :]
                else:
                    end.ended = True
                    end.other.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._close(end)
            return
        if end.other is not None:
            if end.ended and end.other.ended and not end.waiting and not end.other.waiting:
                self._close(end)
            else:
                self._watch(end)
                self._watch(end.other)

    def _claim(self, end: _End) -> None:
        piece = end.sock.recv(_NUMBER - len(end.heard))
        end.heard += piece
        if not piece:
            raise ConnectionError("it has ended")
        if len(end.heard) < _NUMBER:
            return
        number = int(end.heard) if end.heard.isdigit() else -1
        if number == 0:
            end.sock.send(b"here")
            raise ConnectionError("that was all")
        other = self._unclaimed.pop(number, None)
        if other is None:
            raise ConnectionError("the machine has left")
        end.other, other.other = other, end
        self._selector.register(other.sock, selectors.EVENT_READ, other)

    def _watch(self, end: _End) -> None:
        assert end.other is not None
        reads = not end.ended and not end.other.waiting
        events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if end.waiting else 0)
        known = self._selector.get_map().get(end.sock)
        if known is None and events:
            self._selector.register(end.sock, events, end)
        elif known is not None and not events:
            self._selector.unregister(end.sock)
        elif known is not None and known.events != events:
            self._selector.modify(end.sock, events, end)

    def _close(self, end: _End) -> None:
        for one in (end, end.other):
            if one is not None and one.sock.fileno() >= 0:
                if self._selector.get_map().get(one.sock) is not None:
                    self._selector.unregister(one.sock)
                one.sock.close()


def _sent(sock: socket.socket, data: bytes) -> int:
    try:
        return sock.send(data)
    except BlockingIOError:
        return 0


def _listening(port: int) -> socket.socket:
    for wanted in (port, 0):
        try:
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", wanted), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
            return socket.create_server(("", wanted), backlog=1024)
        except OSError:
            if not wanted:
                raise
    raise AssertionError


def _network(address: str) -> str:
    """IPv4 address, or /64 of an IPv6 one. Copied from node/peers.py: this file stands alone."""
    address = (address[7:] if address.startswith("::ffff:") and "." in address else address).partition("%")[0]
    try:
        return socket.inet_pton(socket.AF_INET6, address)[:8].hex() if ":" in address else address
    except OSError:
        return address


def _addresses() -> list[str]:
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def _say(message: dict[str, Any]) -> None:
    try:
        os.write(1, json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # the client is away


def _end(number: int, frame: Any) -> None:
    raise SystemExit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = json.loads(sys.stdin.buffer.readline())
    relay = Relay(int(settings["port"]), float(settings["lease"]))
    try:
        relay.serve()
    finally:
        relay.close()


if __name__ == "__main__":
    main()
