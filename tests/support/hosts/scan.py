"""Which TCP ports of an address accept a connection: asks all of them, many at a time. Run in the place that asks."""

from __future__ import annotations

import errno
import json
import select
import socket
import sys
import time

__all__ = ["scan"]

_AT_A_TIME = 500
_PATIENCE = 2.0


def scan(address: str) -> list[int]:
    """The open ports; one that does not answer within two seconds is not open."""
    waiting: dict[int, tuple[socket.socket, int, float]] = {}
    found: list[int] = []
    poll = select.epoll()
    ports = iter(range(1, 65536))
    port = next(ports, None)
    while port is not None or waiting:
        while port is not None and len(waiting) < _AT_A_TIME:
            asked = socket.socket()
            asked.setblocking(False)
            answer = asked.connect_ex((address, port))
            if answer == errno.EINPROGRESS:
                poll.register(asked, select.EPOLLOUT)
                waiting[asked.fileno()] = (asked, port, time.monotonic() + _PATIENCE)
            else:
                found += [port] if not answer else []
                asked.close()
            port = next(ports, None)
        for fd, _ in poll.poll(_PATIENCE):
            asked, number, _ = waiting.pop(fd)
            found += [number] if not asked.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) else []
            asked.close()
        now = time.monotonic()
        for fd in [fd for fd, (_, _, until) in waiting.items() if until < now]:
            waiting.pop(fd)[0].close()
    return sorted(found)


if __name__ == "__main__":
    print(json.dumps(scan(sys.argv[1])))
