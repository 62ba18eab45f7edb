"""Joined machines and their control connections, all served by one thread."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

from skyward.api.provider import Machine
from skyward.errors import HostUnreachable
from skyward.node.join import WAIT
from skyward.node.orders import ClientToJoiner, written
from skyward.node.peers import Waiting, WaitingPeers, accept_all
from skyward.transport.certificates import Identity, context
from skyward.transport.codec import Message, split
from skyward.transport.frames import Malformed
from skyward.transport.link import tune

__all__ = ["Control", "JoinedMachine", "Listener", "MachineLeft", "Member", "NotStarted"]


_PING = 5.0
_SILENT = 20.0
_ANSWER = 20.0
_RETURN = 2.0
_LONGEST_LINE = 1 << 16
_PIECE = 1 << 16  # more than a record of TLS, so that none is left where poll does not see it
_PIECES = 4  # from one machine, before others have their turn


class NotStarted(Exception):
    """The machine could not do what was ordered: no such program, or nobody listens there."""


class MachineLeft(HostUnreachable):
    """The machine will not come back, according to itself or its provider."""


@dataclass(frozen=True)
class JoinedMachine(Machine):
    left: str = ""

    @property
    def preemptible(self) -> bool:
        return True

    @property
    def gone(self) -> str:
        return self.left


class Member:
    def __init__(self, place: int, name: str, address: str, send: Callable[[Member, Message], None]) -> None:
        self.place, self.name, self.address = place, name, address
        self.gone = ""
        self.changed = threading.Condition()
        self.connected = False
        self.lost_at = time.monotonic()
        self._send = send
        self._streams: dict[str, tuple[Future[socket.socket], bool]] = {}

    def order(self, message: Message) -> None:
        self._send(self, message)

    def stream(self, order: Callable[[str], Message], secure: bool, timeout: float = _ANSWER) -> socket.socket:
        """The connection that the machine opens for an order. NotStarted if it refuses, OSError if not connected."""
        deadline = time.monotonic() + timeout
        with self.changed:
            # whoever closes a pool does not wait for each machine that was lost long ago
            patience = max(_RETURN, self.lost_at + timeout - time.monotonic())
            self.changed.wait_for(lambda: self.connected or self.gone, min(patience, timeout))
            if self.gone:
                raise ConnectionRefusedError(f"{self.name} has left: {self.gone}")
            if not self.connected:
                raise TimeoutError(f"{self.name} has not come back for {time.monotonic() - self.lost_at:.0f} s")
            id = secrets.token_hex(16)
            future: Future[socket.socket] = Future()
            self._streams[id] = (future, secure)
        self._send(self, order(id))
        try:
            return future.result(max(1.0, deadline - time.monotonic()))
        except TimeoutError:
            if future.cancel():
                raise TimeoutError(f"{self.name} did not connect again within {timeout:.0f} s") from None
            return future.result()  # it came just now
        finally:
            with self.changed:
                self._streams.pop(id, None)

    def arrived(self, id: str, sock: socket.socket) -> bool:
        with self.changed:
            expected = self._streams.get(id)
            if expected is None or expected[1] != isinstance(sock, ssl.SSLSocket):
                return False
            del self._streams[id]
        return _settle(expected[0], sock)

    def failed(self, id: str, why: str) -> None:
        with self.changed:
            expected = self._streams.pop(id, None)
        if expected is not None:
            _settle(expected[0], NotStarted(why))

    def set_connected(self, connected: bool) -> None:
        """On disconnect, pending orders fail."""
        with self.changed:
            self.connected, self.lost_at = connected, time.monotonic()
            dropped = [] if connected else list(self._streams.values())
            if not connected:
                self._streams.clear()
            self.changed.notify_all()
        for future, _ in dropped:
            _settle(future, ConnectionResetError(f"the connection of {self.name} was lost"))

    def away(self) -> float | None:
        return math.inf if self.gone else None if self.connected else time.monotonic() - self.lost_at

    def leave(self, why: str) -> None:
        with self.changed:
            self.gone = self.gone or why
            self.changed.notify_all()


def _settle(future: Future[socket.socket], outcome: socket.socket | Exception) -> bool:
    if not future.set_running_or_notify_cancel():
        return False  # whoever waited has given up
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return True


class _Line:
    def __init__(self, sock: ssl.SSLSocket, member: Member) -> None:
        self.sock, self.member = sock, member
        self.outgoing, self.received = bytearray(), b""
        self.heard = self.asked = time.monotonic()


class Control:
    def __init__(self, heard: Callable[[Member, list[Any]], None]) -> None:
        self._heard = heard
        self._lock = threading.Lock()
        self._lines: dict[Member, _Line] = {}
        self._replaced: list[_Line] = []
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="skyward-joined", daemon=True)
        self._thread.start()

    def add(self, sock: ssl.SSLSocket, member: Member) -> None:
        sock.setblocking(False)
        with self._lock:
            old = self._lines.get(member)
            self._lines[member] = _Line(sock, member)
            self._replaced += [old] if old is not None else []
        if old is not None:
            member.set_connected(False)
        member.set_connected(True)
        self._rouse()

    def send(self, member: Member, message: Message) -> None:
        """Ignored if the member is not connected."""
        with self._lock:
            line = self._lines.get(member)
            if line is not None:
                line.outgoing += written(message) + b"\n"
        self._rouse()

    def close(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(line.outgoing for line in list(self._lines.values())):
            time.sleep(0.01)
        self._closed = True
        self._rouse()
        self._thread.join(seconds + 1)

    def after_fork(self) -> None:
        for line in self._lines.values():
            socket.socket.close(line.sock)

    def _rouse(self) -> None:
        try:
            self._waker.send(b"x")
        except OSError:
            pass  # it is awake, or has ended

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                lines, replaced, self._replaced = list(self._lines.values()), self._replaced, []
            for line in replaced:
                line.sock.close()
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            for line in lines:
                poll.register(line.sock, select.POLLIN | (select.POLLOUT if line.outgoing else 0))
            ready = {fd for fd, _ in poll.poll(1000)}
            if self._wake.fileno() in ready:
                self._wake.recv(1 << 12)
            for line in lines:
                self._attend(line, line.sock.fileno() in ready, time.monotonic())
        for line in [*self._lines.values(), *self._replaced]:
            line.sock.close()
        self._wake.close()
        self._waker.close()

    def _attend(self, line: _Line, ready: bool, now: float) -> None:
        try:
            if now - line.asked > _PING:
                line.asked = now
                with self._lock:
                    line.outgoing += written(ClientToJoiner.Ping()) + b"\n"
            if line.outgoing:
                self._write(line)
            if ready:
                self._read(line, now)
            if now - line.heard > _SILENT:
                raise ConnectionError("it does not answer")
        except (OSError, ValueError, RecursionError, Malformed):
            self._drop(line)

    def _write(self, line: _Line) -> None:
        try:
            with self._lock:
                del line.outgoing[: line.sock.send(line.outgoing)]
        except WAIT:
            pass

    def _read(self, line: _Line, now: float) -> None:
        try:
            for _ in range(_PIECES):
                piece = line.sock.recv(_PIECE)
                if not piece:
                    raise ConnectionError("it has ended")
                line.heard = now
                *whole, line.received = (line.received + piece).split(b"\n")
                if len(line.received) > _LONGEST_LINE:
                    raise ValueError("a line without end")
                for text in whole:
                    for message, _ in split([json.loads(text)], []):
                        self._heard(line.member, message)
        except WAIT:
            return

    def _drop(self, line: _Line) -> None:
        with self._lock:
            current = self._lines.get(line.member) is line
            if current:
                del self._lines[line.member]
                line.sock.close()
        if current:
            line.member.set_connected(False)


# Where machines arrive: accepts connections, and hands over those that have said what they are.
#
# A connection begins with a TLS handshake and a line of JSON (`join` or `stream`), or without TLS with the one-time
# id of a stream that has TLS of its own inside. Nothing else is read from anybody before that.


ID_LENGTH = 32
_HANDSHAKE = 10.0
_LONGEST = 4096
_WAITING = 256  # connections that have not said yet what they are
_PER_NETWORK = 128
_TLS_HANDSHAKE = 0x16


class Listener:
    """Each connection has a thread until its greeting is read. `joins` and `streams` close what they refuse."""

    def __init__(
        self,
        identity: Identity,
        joins: Callable[[ssl.SSLSocket, dict[str, Any]], None],
        streams: Callable[[socket.socket, str], None],
    ) -> None:
        self.fingerprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(identity.cert)).hexdigest()
        """Checked by machines before they send anything."""
        self._tls = context(identity, server=True)
        self._tls.verify_mode = ssl.CERT_NONE  # who arrives has a token, and no certificate yet
        self._tls.num_tickets = 0
        self._joins, self._streams = joins, streams
        self._waiting = WaitingPeers(_WAITING, _PER_NETWORK)
        self._listening: socket.socket | None = None

    def listen(self, host: str, port: int) -> int:
        if not host and socket.has_dualstack_ipv6():
            made = socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = socket.create_server((host, port), family=family, backlog=1024)
        self._listening = made
        threading.Thread(target=accept_all, args=(made, self.take), name="skyward-arrivals", daemon=True).start()
        return made.getsockname()[1]

    def take(self, sock: socket.socket, address: str) -> None:
        peer = self._waiting.add(sock, address)
        try:
            threading.Thread(target=self._hear, args=(peer,), name="skyward-arrival", daemon=True).start()
        except RuntimeError:  # no more threads
            self._waiting.remove(peer)
            sock.close()

    def close(self) -> None:
        if self._listening is not None:
            try:
                self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            except OSError:
                pass
            self._listening.close()

    def after_fork(self) -> None:
        if self._listening is not None:
            self._listening.close()

    def _hear(self, peer: Waiting) -> None:
        sock = peer.sock
        try:
            sock.settimeout(_HANDSHAKE)
            deadline = time.monotonic() + _HANDSHAKE
            if sock.family != socket.AF_UNIX:
                tune(sock)
            first = sock.recv(1, socket.MSG_PEEK)
            if first and first[0] != _TLS_HANDSHAKE:
                id = _exactly(sock, ID_LENGTH, deadline).decode("ascii")
                self._waiting.remove(peer)
                self._streams(sock, id)
                return
            secured = self._waiting.secure(peer, self._tls)
            secured.do_handshake()
            kind, hello = _greeting(_line(secured, deadline))
            self._waiting.remove(peer)
            if kind == "join" and type(hello) is dict:
                self._joins(secured, cast("dict[str, Any]", hello))
            elif kind == "stream" and type(hello) is str:
                self._streams(secured, hello)
            else:
                raise ValueError("no greeting")
        except (OSError, ValueError, RecursionError):
            peer.sock.close()  # not one of ours, or too slow
        finally:
            self._waiting.remove(peer)


def _greeting(line: bytes) -> tuple[str, object]:
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
    got = bytearray()
    while not got.endswith(b"\n"):
        if len(got) >= _LONGEST:
            raise ValueError("the greeting is too long")
        got += _exactly(sock, 1, deadline)
    return bytes(got)
