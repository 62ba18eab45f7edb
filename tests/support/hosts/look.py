"""What runs and what listens on a test host, read from outside through its first process; as root."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys

__all__ = ["listeners", "processes"]


def processes(first: int) -> list[tuple[int, str, list[str]]]:
    """Number, user and command line of every process of the host but the first; those that have ended do not count."""
    proc = f"/proc/{first}/root/proc"
    names = _names(first)
    found: list[tuple[int, str, list[str]]] = []
    for entry in os.listdir(proc):
        if not entry.isdigit() or entry == "1":
            continue
        try:
            with open(f"{proc}/{entry}/cmdline", "rb") as file:
                argv = file.read().decode("utf-8", "replace").split("\0")[:-1]
            owner = os.stat(f"{proc}/{entry}").st_uid
        except OSError:
            continue
        if argv:
            found.append((int(entry), names.get(owner, str(owner)), argv))
    return sorted(found)


def listeners(first: int) -> list[tuple[str, int, str]]:
    """Address, port and user of every listening TCP socket of the host."""
    names = _names(first)
    found: list[tuple[str, int, str]] = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/{first}/net/{table}") as file:
            rows = [line.split() for line in file][1:]
        for row in rows:
            if row[3] != "0A":
                continue
            address, port = row[1].split(":")
            words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
            text = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
            found.append((text, int(port, 16), names.get(int(row[7]), row[7])))
    return sorted(found)


def _names(first: int) -> dict[int, str]:
    with open(f"/proc/{first}/root/etc/passwd") as file:
        return {int(row.split(":")[2]): row.split(":")[0] for row in file}


if __name__ == "__main__":
    print(json.dumps({"processes": processes, "listeners": listeners}[sys.argv[1]](int(sys.argv[2]))))
