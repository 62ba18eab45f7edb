"""Carries bytes between standard input and output and an address, as `aws ssm` and `open-tunnel` do for ssh."""

from __future__ import annotations

import os
import select
import socket
import sys

__all__: list[str] = []

if __name__ == "__main__":
    link = socket.create_connection((sys.argv[1], 22), 60)
    link.settimeout(None)
    while True:
        ready, _, _ = select.select([0, link], [], [])
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                break
            link.sendall(data)
        if link in ready:
            data = link.recv(65536)
            if not data:
                break
            while data:
                data = data[os.write(1, data) :]
