"""Kubernetes keeps the contracts of all providers and of all pools, with real Jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.testing import ProviderContract
from tests.contracts.pool import PoolContract
from tests.kubernetes.conftest import USER
from tests.support.kubernetes.cluster import Cluster


class TestProvider(ProviderContract):
    timeout = 120.0

    @pytest.fixture
    def provider(self, provider: sky.Kubernetes) -> sky.Kubernetes:
        return provider


@pytest.fixture(scope="module")
def pool(cluster: Cluster) -> Iterator[sky.ComputePool]:
    provider = sky.Kubernetes(template=USER)
    with sky.ComputePool(provider=provider, nodes=2, image=sky.Image(pip=["numpy"]), console=False) as opened:
        yield opened


class TestPool(PoolContract): ...
