"""dask keeps the contract of all providers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import LocalCluster

import skyward as sky
from skyward.testing import ProviderContract


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address="127.0.0.1:0") as made:
        yield made


class TestDask(ProviderContract):
    @pytest.fixture
    def provider(self, cluster: LocalCluster) -> sky.Dask:
        return sky.Dask(cluster, per="worker")
