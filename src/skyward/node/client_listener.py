"""Where an agent lets its client in: it proves who it is, then greets, and nothing is read before both.

A process of this computer connects to a unix socket, and the kernel says whose it is. A process of another machine has
a certificate of the pool.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyward.node.addresses import network
from skyward.transport.frames import encode
from skyward.transport.link import greet, tune
from skyward.transport.local_sockets import check_peer
from skyward.transport.roles import refusal

if TYPE_CHECKING:
    import ssl

__all__ = ["ClientListener"]

_GREETING = 10.0
_WAITING = 64  # who has not shown yet who it is
_SERVING = 1024  # blobs for other nodes, at a time


class ClientListener:
    """Admits connections, each in a thread of its own, so that a slow or hostile peer delays nobody.

    `host` is the node's address for frameworks. Without a `context` for TLS, peers are of this computer. `session` is
    how the names of this pool's sessions begin.
    """

    def __init__(
        self,
        listener: socket.socket,
        host: str,
        context: ssl.SSLContext | None,
        session: str,
        wake: Callable[[], None],
        serve: Callable[[socket.socket, str], None],
    ) -> None:
        self._listener, self._host, self._context, self._session = listener, host, context, session
        self._wake, self._serve = wake, serve
        self._held: list[socket.socket] = []
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, str] = {}  # in the order in which they came, with their addresses
        self._serving = 0
        self._admitted: queue.SimpleQueue[tuple[socket.socket, dict[str, Any]]] = queue.SimpleQueue()

    def open(self) -> None:
        """Begins to admit."""
        threading.Thread(target=self._accept, name="skyward-accept", daemon=True).start()

    def next(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """A connection that has been admitted, with its greeting."""
        try:
            return self._admitted.get_nowait()
        except queue.Empty:
            return None

    def free_ports(self, count: int) -> list[int]:
        """Ports of this node's address for frameworks to listen on later.

        Bound here and not listening, they stay reserved: the kernel gives them to nobody who asks for any port, and a
        framework that names one may listen on it (both sides set SO_REUSEADDR). Those of an earlier time are let go.
        """
        self.close()
        for _ in range(count):
            held = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((self._host, 0))
            self._held.append(held)
        return [held.getsockname()[1] for held in self._held]

    def close(self) -> None:
        """Lets go of the ports; the end of the process does so too."""
        for held in self._held:
            held.close()
        self._held.clear()

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                sock, address = self._listener.accept()
            except OSError:
                time.sleep(0.05)  # no room for one more at the moment; those who wait leave by themselves
                continue
            try:
                if self._context is not None:
                    sock = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                self._wait(sock, address[0] if self._context is not None else "")
                threading.Thread(target=self._admit, args=(sock,), daemon=True).start()
            except (OSError, RuntimeError):
                self._forget(sock)
                sock.close()
                time.sleep(0.05)

    def _admit(self, sock: Any) -> None:
        try:
            sock.settimeout(_GREETING)
            tune(sock)
            hello = self._greeted(sock)
        except (OSError, ValueError):
            sock.close()  # not one of this pool: another user, no certificate, or no greeting
            return
        finally:
            self._forget(sock)
        if "fetch" in hello:
            self._serve_peer(sock, hello["fetch"])
        else:
            self._admitted.put((sock, hello))
            self._wake()

    def _serve_peer(self, sock: socket.socket, blob: str) -> None:
        """Gives a blob to a node of the pool; one that finds no room asks somebody else."""
        with self._lock:
            room = self._serving < _SERVING
            self._serving += room
        if not room:
            sock.close()
            return
        try:
            self._serve(sock, blob)
        finally:
            with self._lock:
                self._serving -= 1

    def _greeted(self, sock: Any) -> dict[str, Any]:
        """The greeting of a peer that may say it; raises OSError or ValueError."""
        role = None
        if self._context is None:
            check_peer(sock)
        else:
            from skyward.transport.certificates import role_of

            sock.do_handshake()
            role = role_of(sock)
        hello = greet(sock, None, time.monotonic() + _GREETING)
        why = refusal(hello, role, self._session)
        if why is None:
            return hello
        for piece in encode({"refused": why}):
            sock.sendall(piece)
        raise PermissionError(why)

    def _wait(self, sock: socket.socket, address: str) -> None:
        """Puts a peer in line. When that is too long, who has waited longest is sent away, of the network with most."""
        with self._lock:
            self._waiting[sock] = network(address)
            if len(self._waiting) <= _WAITING:
                return
            crowded = Counter(self._waiting.values()).most_common(1)[0][0]
            longest = next(sock for sock, address in self._waiting.items() if address == crowded)
            del self._waiting[longest]
            try:
                socket.socket.shutdown(longest, socket.SHUT_RDWR)
            except OSError:
                pass  # it has just gone

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(sock, None)
