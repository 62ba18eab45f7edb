"""Real pools on real hosts: three machines in namespaces of their own, each with an sshd."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from tests.ssh.places import ours, reached, specs
from tests.support.hosts import Network, lacks_python, unavailable
from tests.support.waiting import until


@pytest.fixture(scope="session", autouse=True)
def _hosts_possible() -> None:
    """All of these tests need hosts."""
    if reason := unavailable() or lacks_python():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cache(hosts_cache: Path) -> Path:
    """What hosts keep between pools, without what machines of the test cloud have left by dying."""
    shutil.rmtree(hosts_cache / "pools", ignore_errors=True)
    return hosts_cache


@pytest.fixture(scope="session", autouse=True)
def _home(client_cache: Path) -> Iterator[None]:
    """The client's own cache of resolved packages lies in a directory of this run."""
    before = os.environ.get("SKYWARD_CACHE")
    os.environ["SKYWARD_CACHE"] = str(client_cache)
    yield
    if before is None:
        del os.environ["SKYWARD_CACHE"]
    else:
        os.environ["SKYWARD_CACHE"] = before


@pytest.fixture(scope="module")
def net(cache: Path) -> Iterator[Network]:
    """Three hosts that reach each other."""
    with Network(specs(cache), internet=True) as network:
        yield network


@pytest.fixture
def whole(net: Network) -> Iterator[Network]:
    """The three hosts for a test that breaks things: afterwards they are as they were."""
    yield net
    net.heal_client()
    for host in net:
        if not host.alive:
            host.restart()
        host.heal()
        host.heal_client()
        host.slow(None)
        for other in net:
            if other is not host:
                host.heal_from(other)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no process of ours is left on any host, unless a shared pool is open; then after its module."""
    if "net" not in request.fixturenames or "pool" in request.fixturenames:
        yield
        return
    network: Network = request.getfixturevalue("net")
    before = [set(ours(host)) for host in network]
    yield
    until(lambda: all(set(ours(host)) <= known for host, known in zip(network, before, strict=True)), 60)


@pytest.fixture(scope="module")
def pool(net: Network) -> Iterator[sky.ComputePool]:
    """A pool of three nodes for tests that leave it as they found it."""
    with sky.ComputePool(provider=reached(net), image=sky.Image(pip=["numpy", "distributed"]), console=False) as opened:
        yield opened
    until(lambda: not any(ours(host) for host in net), 60)
