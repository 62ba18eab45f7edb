"""The program by which `sky hosts check` tries the network: it answers to its own check, and to nobody else."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from skyward.node import check_network
from skyward.node.check_network import addresses, probe, send, serve


def port_of(token: str) -> int:
    port = serve(["127.0.0.1"], token)["127.0.0.1"]
    assert port is not None
    return port


def test_the_addresses_are_all_those_of_the_interfaces_without_the_loopback_s() -> None:
    known = {
        (name, entry.address, entry.netmask)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    }
    assert set(addresses()) == known


def test_the_address_that_ssh_came_in_on_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = addresses()
    for entry in found:
        monkeypatch.setenv("SSH_CONNECTION", f"192.0.2.1 50000 {entry[1]} 22")
        assert addresses()[0] == entry
        assert sorted(addresses()) == sorted(found)


def test_who_knows_the_token_is_answered_and_the_rate_is_measured() -> None:
    token = "0123456789abcdef"
    port = port_of(token)
    ((why, seconds),) = probe({"a": ("127.0.0.1", port)}, token).values()
    assert why == ""
    assert seconds is not None
    assert 0 < seconds < 60
    rate = send("127.0.0.1", port, token)
    assert rate is not None
    assert rate > 0


def test_who_does_not_know_the_token_hears_nothing() -> None:
    """SEC-35."""
    port = port_of("0123456789abcdef")
    for said in (b"fedcba9876543210", b"", b"x" * 100_000):
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            try:
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(10) == b""
            except OSError:
                pass  # it was reset: what was not read was thrown away
    assert probe({"a": ("127.0.0.1", port)}, "fedcba9876543210")["a"][0] != ""


def test_a_port_that_nobody_listens_on_has_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert probe({"a": ("127.0.0.1", port)}, "t")["a"] == ("Connection refused", None)
    assert send("127.0.0.1", port, "t") is None


def test_it_ends_with_its_standard_input_and_listens_on_no_other_address() -> None:
    """SEC-35."""
    text = Path(check_network.__file__).read_bytes()
    start = "import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))"
    orders = [{}, {"listen": ["127.0.0.1", "203.0.113.7"], "token": "t"}]
    data = text + b"".join(json.dumps(order).encode() + b"\n" for order in orders)
    done = subprocess.run(
        [sys.executable, "-I", "-c", start, str(len(text))], input=data, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found, listening = (json.loads(line) for line in done.stdout.splitlines())
    assert all(not ip.startswith("127.") for _, ip, _ in found["addresses"])
    assert listening["ports"]["203.0.113.7"] is None  # not an address of this machine
    assert listening["ports"]["127.0.0.1"] > 0
