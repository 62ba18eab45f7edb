"""AWS keeps the contract of all providers, on the test cloud."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.testing import ProviderContract
from tests.support.cloud import Cloud


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with Cloud() as cloud:
        yield cloud


class TestAWS(ProviderContract):
    spec = sky.Spec(accelerator="T4")

    @pytest.fixture
    def provider(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[sky.AWS]:
        cloud.forget()
        for name, value in cloud.environ.items():
            monkeypatch.setenv(name, value)
        yield cloud.aws()
        assert cloud.leftovers() == []
