"""Machines of a cloud keep the contract of all pools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.machines.ledger import histories
from tests.cloud.machines import Hosts
from tests.contracts.pool import PoolContract
from tests.support.cloud import Cloud


@pytest.fixture(scope="module")
def pool(
    served: tuple[Cloud, Hosts], client_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sky.ComputePool]:
    cloud, _ = served
    variables = {
        "SKYWARD_STATE": str(tmp_path_factory.mktemp("state")),
        "SKYWARD_CACHE": str(client_cache),
        **cloud.environ,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        image = sky.Image(pip=["numpy"])
        with sky.ComputePool(provider=cloud.aws(username="sky"), nodes=2, image=image, console=False) as opened:
            yield opened
        assert (cloud.leftovers(), list(histories())) == ([], [])


class TestCloud(PoolContract): ...
