"""Pools on real dask clusters: on three test hosts with TLS, and LocalClusters of this computer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.dask_cluster import DaskCluster, shown
from tests.support.hosts import Network, lacks_python, unavailable


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What pools keep lies in directories of this run: the client's, and that of nodes on this computer."""
    before = os.environ.get("SKYWARD_CACHE")
    os.environ["SKYWARD_CACHE"] = str(tmp_path_factory.mktemp("dask-cache"))
    yield
    shutil.rmtree(os.environ["SKYWARD_CACHE"], ignore_errors=True)
    if before is None:
        del os.environ["SKYWARD_CACHE"]
    else:
        os.environ["SKYWARD_CACHE"] = before


@pytest.fixture(scope="session")
def on_hosts(hosts_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    """A cluster with TLS: a worker on h0 and on h1, two on h2. A test that breaks it puts it right again."""
    if reason := unavailable() or lacks_python():
        pytest.skip(reason)
    shutil.rmtree(hosts_cache / "pools", ignore_errors=True)  # what other hosts have left by dying
    certificates = tmp_path_factory.mktemp("dask-tls")
    certificates.chmod(0o755)
    with Network(shown(hosts_cache, certificates), internet=True) as network:
        with DaskCluster(list(network), certificates, [0, 1, 2, 2]) as cluster:
            yield cluster
