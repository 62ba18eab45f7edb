"""Slurm keeps the contracts of all providers and of all pools, with real jobs."""

from __future__ import annotations

import pytest

import skyward as sky
from skyward.testing import ProviderContract
from tests.contracts.pool import PoolContract
from tests.support.slurm import Cluster


class TestSlurm(ProviderContract):
    @pytest.fixture
    def provider(self, cluster: Cluster) -> sky.Slurm:
        return sky.Slurm()


class TestPoolOnSlurm(PoolContract): ...
