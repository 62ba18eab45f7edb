"""Ray keeps the contract of all pools; that of all providers is in test_pool.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyward as sky
from tests.contracts.pool import PoolContract
from tests.support.ray_cluster import RayCluster


@pytest.fixture(scope="module")
def pool(cluster: RayCluster) -> Iterator[sky.ComputePool]:
    provider = sky.Ray(cluster.url, token=cluster.token)
    with sky.ComputePool(provider=provider, nodes=2, image=sky.Image(pip=["numpy"]), console=False) as opened:
        yield opened


class TestPoolOnRay(PoolContract): ...
