"""Hosts of the user's keep the contract of all providers."""

from __future__ import annotations

import pytest

import skyward as sky
from skyward.testing import ProviderContract


class TestSSH(ProviderContract):
    @pytest.fixture
    def provider(self) -> sky.SSH:
        return sky.SSH(hosts=["gpu1", "gpu2"])
