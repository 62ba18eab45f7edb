"""Real pools on a real Ray: three nodes on test hosts, started once for all of these tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import skyward as sky
from tests.support.folder import shared_by
from tests.support.hosts import lacks_python, unavailable
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import until

_shared, pytest_runtest_teardown = shared_by(Path(__file__).parent)


@pytest.fixture(scope="session")
def cluster(hosts_cache: Path, client_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> RayCluster:
    """Ray on three hosts; a test that breaks a node starts it again."""
    if reason := unavailable() or lacks_python() or ("" if find_spec("ray") else "ray is not installed"):
        pytest.skip(reason)
    _shared.enter_context(pytest.MonkeyPatch.context()).setenv("SKYWARD_CACHE", str(client_cache))
    shutil.rmtree(hosts_cache / "pools", ignore_errors=True)  # what other hosts have left by dying
    return _shared.enter_context(RayCluster(hosts_cache, tmp_path_factory.mktemp("stand-ins")))


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers of a test are its own, and no variable of Ray's says where a cluster is."""
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def provider(cluster: RayCluster) -> sky.Ray:
    """The cluster by its Jobs API."""
    return sky.Ray(cluster.url, token=cluster.token)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test nothing of ours is on any host, and Ray holds nothing for us, unless a shared pool is open."""
    yield
    if "cluster" in request.fixturenames and "pool" not in request.fixturenames:
        cluster: RayCluster = request.getfixturevalue("cluster")
        until(lambda: not cluster.left(), 60, cluster.left)
