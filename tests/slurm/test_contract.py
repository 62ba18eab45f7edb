"""Slurm keeps the contract of all providers, with real jobs."""

from __future__ import annotations

import pytest

import skyward as sky
from skyward.testing import ProviderContract
from tests.support.slurm import Cluster


class TestSlurm(ProviderContract):
    @pytest.fixture
    def provider(self, cluster: Cluster) -> sky.Slurm:
        return sky.Slurm()
