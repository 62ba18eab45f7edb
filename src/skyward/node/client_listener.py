"""Where an agent lets its client in: certificate first, then a greeting, and nothing is read before both."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from skyward.transport.link import greet, tune

__all__ = ["ClientListener"]

_GREETING = 10.0
_WAITING = 64


class ClientListener:
    """Admits connections, each in a thread of its own, so that a slow or hostile peer delays nobody."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        wake: Callable[[], None],
        serve: Callable[[ssl.SSLSocket, str], None],
    ) -> None:
        self._listener, self._context, self._wake, self._serve = listener, context, wake, serve
        self._held: list[socket.socket] = []
        self._lock = threading.Lock()
        self._waiting: deque[ssl.SSLSocket] = deque()
        self._admitted: queue.SimpleQueue[tuple[ssl.SSLSocket, dict[str, Any]]] = queue.SimpleQueue()

    def open(self) -> None:
        """Begins to admit."""
        threading.Thread(target=self._accept, name="skyward-accept", daemon=True).start()

    def next(self) -> tuple[ssl.SSLSocket, dict[str, Any]] | None:
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
            held = socket.socket(self._listener.family)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((self._listener.getsockname()[0], 0))
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
                raw, _ = self._listener.accept()
                sock = self._context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
                threading.Thread(target=self._admit, args=(sock,), daemon=True).start()
            except (OSError, RuntimeError):
                time.sleep(0.05)  # no room for one more at the moment; those who wait leave by themselves

    def _admit(self, sock: ssl.SSLSocket) -> None:
        try:
            self._wait(sock)
            sock.settimeout(_GREETING)
            tune(sock)
            sock.do_handshake()
            hello = greet(sock, None, time.monotonic() + _GREETING)
        except (OSError, ValueError):
            sock.close()  # not one of this pool: no certificate, or no greeting
            return
        finally:
            with self._lock:
                if sock in self._waiting:
                    self._waiting.remove(sock)
        if "fetch" in hello:
            self._serve(sock, hello["fetch"])  # a peer of the pool
        else:
            self._admitted.put((sock, hello))
            self._wake()

    def _wait(self, sock: ssl.SSLSocket) -> None:
        """Puts a peer in line; when that is too long, whoever has said nothing for longest is sent away."""
        with self._lock:
            self._waiting.append(sock)
            if len(self._waiting) > _WAITING:
                try:
                    socket.socket.shutdown(self._waiting.popleft(), socket.SHUT_RDWR)
                except OSError:
                    pass  # it has just gone
