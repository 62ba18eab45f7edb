"""An HTTP proxy by which test hosts reach the world: it listens on the test network and connects from this machine.

Arguments: a process in the namespace to listen in, the port, and the owner without whom it ends. As root.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from urllib.parse import urlsplit

from kernel import enter

__all__ = ["main"]


def main(place: int, port: int, owner: int) -> None:
    """Serves until the owner is gone or its pipe is closed."""
    gone = os.pidfd_open(owner)
    server = _listen_in(place, port, owner)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        ready, _, _ = select.select([server, gone, sys.stdin], [], [])
        if gone in ready or sys.stdin in ready:
            os._exit(0)
        threading.Thread(target=_serve, args=(server.accept()[0],), daemon=True).start()


def _listen_in(place: int, port: int, owner: int) -> socket.socket:
    """A socket stays in the namespace that it was made in; the thread that made it need not."""
    enter("net", f"/proc/{place}/ns/net")
    server = socket.create_server(("0.0.0.0", port), backlog=200)
    enter("net", f"/proc/{owner}/ns/net")
    return server


def _serve(client: socket.socket) -> None:
    """One request: a tunnel (CONNECT), or a plain one passed on with its path alone."""
    with client:
        head = b""
        while b"\r\n\r\n" not in head:
            read = client.recv(65536)
            if not read or len(head) > 1_000_000:
                return
            head += read
        method, url, rest = head.split(b" ", 2)
        tunnel = method == b"CONNECT"
        where = urlsplit(("//" if tunnel else "") + url.decode())
        try:
            far = socket.create_connection((where.hostname or "", where.port or (443 if tunnel else 80)), timeout=30)
        except OSError as exc:
            client.sendall(f"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nX-Reason: {exc}\r\n\r\n".encode())
            return
        far.settimeout(None)
        with far:
            if tunnel:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                path = (where.path or "/") + (f"?{where.query}" if where.query else "")
                fields = rest.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
                far.sendall(method + b" " + path.encode() + b" " + fields)
            back = threading.Thread(target=_copy, args=(far, client), daemon=True)
            back.start()
            _copy(client, far)
            back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 18):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # one side has gone; the other is told when both are closed


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
