"""Pools on real dask clusters: on three test hosts with TLS, and LocalClusters of this computer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.dask_cluster import DaskCluster, shown
from tests.support.folder import shared_by
from tests.support.hosts import Network, lacks_python, unavailable

_shared, pytest_runtest_teardown = shared_by(Path(__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What pools keep lies in directories of this run: the client's, and that of nodes on this computer."""
    cache = str(tmp_path_factory.mktemp("dask-cache"))
    _shared.enter_context(pytest.MonkeyPatch.context()).setenv("SKYWARD_CACHE", cache)
    _shared.callback(shutil.rmtree, cache, ignore_errors=True)


@pytest.fixture(scope="session")
def on_hosts(hosts_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> DaskCluster:
    """A cluster with TLS: a worker on h0 and on h1, two on h2. A test that breaks it puts it right again."""
    if reason := unavailable() or lacks_python():
        pytest.skip(reason)
    shutil.rmtree(hosts_cache / "pools", ignore_errors=True)  # what other hosts have left by dying
    certificates = tmp_path_factory.mktemp("dask-tls")
    certificates.chmod(0o755)
    network = _shared.enter_context(Network(shown(hosts_cache, certificates), internet=True))
    return _shared.enter_context(DaskCluster(list(network), certificates, [0, 1, 2, 2]))
