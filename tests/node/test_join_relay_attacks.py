"""The relay on a login host, whose port anybody can reach: the real program, and those who flood it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from skyward.node import join_relay
from tests.support.waiting import until

Relay = tuple["subprocess.Popen[bytes]", dict[str, Any]]


@pytest.fixture
def relay() -> Iterator[Relay]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", Path(join_relay.__file__).read_text()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b'{"port": 0, "lease": 60}\n')
    process.stdin.flush()
    yield process, json.loads(process.stdout.readline())
    process.terminate()
    assert process.wait(30) == 0
    process.stdin.close()
    process.stdout.close()


def _claim(about: dict[str, Any], number: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(about["socket"])
    sock.sendall(b"%08d" % number)
    return sock


def test_a_flood_while_the_client_does_not_listen_stops_no_connection_that_there_is(relay: Relay) -> None:
    """SEC-3, SEC-34."""
    process, about = relay
    assert process.stdout is not None
    address = "127.0.0.1", about["port"]
    with ExitStack() as ends:
        machine = ends.enter_context(socket.create_connection(address, 30))
        machine.settimeout(30)
        client = ends.enter_context(_claim(about, json.loads(process.stdout.readline())["new"]))
        client.sendall(b"before")
        assert machine.recv(6) == b"before"
        for _ in range(4000):  # more than a pipe has room for, if each is told
            socket.create_connection(address, 30).close()
        client.sendall(b"after")
        assert machine.recv(5) == b"after"
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 400
        # Once the client listens again, whoever comes then is told of.
        found: set[int] = set()
        late = ends.enter_context(socket.create_connection(address, 30))
        threading.Thread(target=lambda: _read_all(process, found), daemon=True).start()
        with ends.enter_context(socket.create_connection(address, 30)) as last:
            until(lambda: any(_reaches(about, number, last) for number in sorted(found)[-3:]), 30)
        late.close()
        process.terminate()
        process.wait(30)


def _read_all(process: subprocess.Popen[bytes], found: set[int]) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found.add(json.loads(line)["new"])
    except ValueError:
        pass  # closed


def _reaches(about: dict[str, Any], number: int, machine: socket.socket) -> bool:
    with _claim(about, number) as sock:
        try:
            sock.sendall(b"you")
            machine.settimeout(0.3)
            return machine.recv(3) == b"you"
        except OSError:
            return False


def test_nonsense_from_the_client_ends_its_own_connection(relay: Relay) -> None:
    """SEC-7."""
    _, about = relay
    for said in (b"nonsense", b"-0000001", b"99999999", b"\xff" * 8):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(about["socket"])
            sock.sendall(said)
            assert sock.recv(1) == b""
    with _claim(about, 0) as sock:
        assert sock.recv(4) == b"here"


def test_nobody_else_can_reach_the_end_of_the_client(relay: Relay) -> None:
    """SEC-25."""
    _, about = relay
    folder = Path(about["socket"]).parent
    assert folder.stat().st_mode & 0o077 == 0
