"""Machines that join by themselves do what hosts with ssh do, also when they meet the client at a login host."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.setup.joined import arrivals, places
from tests.ssh.joining import join, joiners, login, opened
from tests.ssh.places import left, ours
from tests.support.hosts import Network
from tests.support.waiting import until


@sky.compute
def hostname() -> str:
    return socket.gethostname()


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture
def apart(net: Network) -> Iterator[Network]:
    """The client reaches only the first host, which the others reach, too."""
    for host in (net[1], net[2]):
        host.cut_client()
    yield net
    for host in (net[1], net[2]):
        host.heal_client()


def test_machines_that_only_reach_the_login_host_are_nodes(apart: Network, tmp_path: Path) -> None:
    machines = [apart[1], apart[2]]
    with opened(machines, tmp_path / "join.py", login=login(apart, apart[0])) as pool:
        assert sorted(hostname() @ pool) == ["h1", "h2"]
        assert [add(i, 1) >> pool for i in range(20)] == list(range(1, 21))
        assert add(b"x" * 3_000_000, b"y") >> pool == b"x" * 3_000_000 + b"y"  # type: ignore[arg-type]
    until(lambda: not any(ours(host) or joiners(host) for host in apart), 30)
    assert not any(left(host) for host in machines)
    assert not [p for p in apart[0].processes() if p.user == "sky" and "python3" in p.argv[0]]


def test_machines_come_back_when_the_ssh_of_the_relay_breaks(apart: Network, tmp_path: Path) -> None:
    machines, entrance = [apart[1], apart[2]], apart[0]
    with opened(machines, tmp_path / "join.py", login=login(apart, entrance)) as pool:
        assert sorted(hostname() @ pool) == ["h1", "h2"]
        for process in entrance.processes(user="sky"):
            if process.argv[0].startswith("sshd"):
                entrance.signal(process.pid)
        assert sorted(hostname() @ pool) == ["h1", "h2"]
        for process in entrance.processes(user="sky"):
            if "python3" in process.argv[0]:
                entrance.signal(process.pid)
        assert sorted(hostname() @ pool) == ["h1", "h2"]
    until(lambda: not any(ours(host) or joiners(host) for host in apart), 30)


def test_a_lost_machine_is_replaced_when_the_command_runs_again(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_ABSENT", 2.0)
    path = tmp_path / "join.py"
    with opened([net[0], net[1]], path, addresses=[net.address]) as pool:
        assert sorted(hostname() @ pool) == ["h0", "h1"]
        pids = [line.split()[0] for line in joiners(net[1])]
        net[1].run(["kill", "-KILL", *pids], user="root", check=False)  # at once: one of them ends by itself, too
        process = join(net[2], path.read_text())
        until(lambda: _names(pool) == ["h0", "h2"], 120)
    assert process.wait(60) == 0
    until(lambda: not any(ours(host) or joiners(host) for host in net), 30)


def test_a_pool_opens_with_fewer_machines_and_takes_in_one_that_comes_late(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "_SETTLED", 1.0)
    path = tmp_path / "join.py"
    with opened([net[0]], path, addresses=[net.address], nodes=2, min_nodes=1) as pool:
        assert hostname() @ pool == ["h0"]
        assert (pool.nodes, pool.current_nodes()) == (2, 1)
        process = join(net[1], path.read_text(), "--place", "1")
        until(lambda: pool.current_nodes() == 2, 120)
        assert hostname() @ pool == ["h0", "h1"]
    assert process.wait(60) == 0
    until(lambda: not any(ours(host) or joiners(host) for host in net), 30)


def _names(pool: sky.ComputePool) -> list[str]:
    try:
        return sorted(hostname() @ pool)
    except sky.SkywardError:
        return []
