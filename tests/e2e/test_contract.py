"""Nodes on this computer keep the contract of all pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyward as sky
from tests.contracts.pool import PoolContract


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sky.ComputePool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))  # where local nodes work, too
        with sky.ComputePool(nodes=2, console=False) as opened:
            yield opened


class TestLocal(PoolContract): ...
