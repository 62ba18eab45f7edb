"""Machines that meet the client at a login host: the client dies, or sshd does not let both meet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import skyward as sky
from skyward import errors
from tests.ssh.joining import join, joiners, login
from tests.ssh.places import left, ours
from tests.support.hosts import Host, Network
from tests.support.waiting import until

CLIENT = """
import sys, time
import skyward as sky
from skyward.api.shell import SshTarget

host, key, known = sys.argv[2:]
login = SshTarget(host, "sky", key=key, known_hosts=known, config=False)
with sky.ComputePool(provider=sky.Join(file=sys.argv[1], login=login, lease=3600), console=False) as pool:
    print("open", flush=True)
    time.sleep(1000)
"""


def relays(host: Host) -> list[str]:
    """What runs on a login host for a client."""
    found = [" ".join(process.argv) for process in host.processes(user="sky")]
    return [line for line in found if "python3" in line or line.startswith("sshd")]


@contextmanager
def without_socket_forwarding(host: Host) -> Generator[None]:
    """sshd of a host forwards ports, and no sockets."""
    path, pid = "/etc/ssh/sshd_config", "$(cat /run/sshd.pid)"

    def write(said: str) -> None:
        line = f"s/^AllowStreamLocalForwarding .*/AllowStreamLocalForwarding {said}/"
        host.run(["sh", "-c", f"sed -i '{line}' {path} && kill -HUP {pid}"], user="root")
        scan = ["ssh-keyscan", "-T", "2", "-t", "ed25519", "127.0.0.1"]
        until(lambda: "ed25519" in host.run(scan, user="root", check=False).stdout, 60)

    write("no")
    try:
        yield
    finally:
        write("yes")


@pytest.fixture
def apart(net: Network) -> Iterator[Network]:
    """The client reaches the first host, and does not reach the second, nor is it reached from there."""
    net[1].cut_client()
    yield net
    net[1].heal_client()


def test_relay_and_machines_end_when_the_client_was_killed(apart: Network, tmp_path: Path) -> None:
    entrance, host, path = apart[0], apart[1], tmp_path / "join.py"
    argv = [sys.executable, "-c", CLIENT, str(path), entrance.address, str(apart.key), str(apart.known_hosts)]
    client = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(os.environ))
    assert client.stdout is not None
    with client:
        until(lambda: path.exists() and path.read_text().endswith("main())\n"), 60)
        process = join(host, path.read_text(), stderr=subprocess.DEVNULL)
        assert client.stdout.readline() == b"open\n"
        assert relays(entrance)
        client.kill()
    until(lambda: not relays(entrance), 90)  # the lease would be an hour
    assert process.wait(90) == 1
    until(lambda: not ours(host) and not joiners(host) and not left(host), 60)
    assert not left(entrance)


def test_a_login_host_that_forwards_no_sockets_is_named_with_what_to_do(apart: Network, tmp_path: Path) -> None:
    entrance = apart[0]
    provider = sky.Join(file=tmp_path / "join.py", login=login(apart, entrance))
    with without_socket_forwarding(entrance):
        with pytest.raises(errors.BootstrapError) as caught, sky.ComputePool(provider=provider, console=False):
            pass
        text = str(caught.value)
        assert entrance.address in text
        assert "Set AllowStreamLocalForwarding yes" in text
        assert "or open the pool on a computer that the machines can connect to" in text
        until(lambda: not relays(entrance), 60)
    assert not left(entrance)
