"""Machines that join by themselves keep the contract of all pools, though they and the client meet at a login host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyward as sky
from tests.contracts.pool import PoolContract
from tests.ssh.joining import login, opened
from tests.support.hosts import Network


@pytest.fixture(scope="module")
def pool(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sky.ComputePool]:
    """Two hosts that the client does not reach."""
    machines = [net[1], net[2]]
    for host in machines:
        host.cut_client()
    try:
        path = tmp_path_factory.mktemp("join") / "join.py"
        with opened(machines, path, login=login(net, net[0]), image=sky.Image(pip=["numpy"])) as found:
            yield found
    finally:
        for host in machines:
            host.heal_client()


class TestJoin(PoolContract): ...
