"""dask keeps the contracts of all providers and of all pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import LocalCluster

import skyward as sky
from skyward.testing import ProviderContract
from tests.contracts.pool import PoolContract
from tests.support.dask_cluster import DaskCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address="127.0.0.1:0") as made:
        yield made


class TestDask(ProviderContract):
    @pytest.fixture
    def provider(self, cluster: LocalCluster) -> sky.Dask:
        return sky.Dask(cluster, per="worker")


@pytest.fixture(scope="module")
def pool(on_hosts: DaskCluster) -> Iterator[sky.ComputePool]:
    """Two of the hosts that have workers."""
    provider = sky.Dask(on_hosts.address, security=on_hosts.security)
    with sky.ComputePool(provider=provider, nodes=2, image=sky.Image(pip=["numpy"]), console=False) as opened:
        yield opened


class TestPoolOnDask(PoolContract): ...
