"""Real pools on a real Slurm: a login node with the controller, and three nodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from tests.support.folder import shared_by
from tests.support.slurm import Cluster, unavailable_slurm
from tests.support.waiting import until

_shared, pytest_runtest_teardown = shared_by(Path(__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def _slurm_possible() -> None:
    """All of these tests need Slurm."""
    if reason := unavailable_slurm():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cache(hosts_cache: Path) -> Path:
    """What nodes keep between pools: a directory that all of them share, like the home on many clusters."""
    shutil.rmtree(hosts_cache / "pools", ignore_errors=True)
    return hosts_cache


@pytest.fixture(scope="session", autouse=True)
def _home(client_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The client's own cache and ledgers lie in directories of this run."""
    patch = _shared.enter_context(pytest.MonkeyPatch.context())
    patch.setenv("SKYWARD_CACHE", str(client_cache))
    patch.setenv("SKYWARD_STATE", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Cluster]:
    """A Slurm whose commands this process has on its path."""
    with Cluster(cache) as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environ.items():
            patch.setenv(name, value)
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no job and no process is left, unless a shared pool is open; then after its module."""
    if "cluster" not in request.fixturenames or "pool" in request.fixturenames:
        yield
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    before = [{process.pid for process in node.processes("sky")} for node in cluster.nodes]
    jobs = set(cluster.jobs())
    yield

    def left() -> list[str]:
        return [
            f"{node.name}: {process.pid} {' '.join(process.argv)}"
            for node, known in zip(cluster.nodes, before, strict=True)
            if node.alive
            for process in node.processes("sky")
            if process.pid not in known
        ]

    until(lambda: set(cluster.jobs()) <= jobs, 60, "jobs to be over")
    until(lambda: not left(), 60, left())
    cluster.resume()


@pytest.fixture(scope="module")
def pool(cluster: Cluster) -> Iterator[sky.ComputePool]:
    """A pool of two nodes for tests that leave it as they found it."""
    image = sky.Image(pip=["numpy"])
    with sky.ComputePool(provider=sky.Slurm(), nodes=2, image=image, console=False) as opened:
        yield opened
    until(lambda: not cluster.jobs(), 60, "jobs to be over")


@pytest.fixture
def environ(cluster: Cluster, tmp_path: Path) -> dict[str, str]:
    """Variables for a program of its own that opens a pool, with ledgers of its own."""
    return {**os.environ, "SKYWARD_STATE": str(tmp_path / "state")}
