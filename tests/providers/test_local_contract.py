"""This computer keeps the contract of all providers."""

from __future__ import annotations

import pytest

import skyward as sky
from skyward.testing import ProviderContract


class TestLocal(ProviderContract):
    @pytest.fixture
    def provider(self) -> sky.Local:
        return sky.Local()
