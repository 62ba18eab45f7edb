"""Which packages must have one version on both sides."""

from __future__ import annotations

from importlib import metadata

import pytest

from skyward.setup.env.requirements import pins


@pytest.mark.parametrize(
    "entry", ["distributed", "dask[distributed]", "Distributed >= 2026", "dask", "distributed;python_version>'3'"]
)
def test_dask_has_the_clients_version_where_the_image_asks_for_it(entry: str) -> None:
    version = pytest.importorskip("distributed").__version__
    assert f"distributed=={version}" in pins(["numpy", entry])
    assert f"dask=={metadata.version('dask')}" in pins([entry])


@pytest.mark.parametrize("entry", ["numpy", "dask-ml", "distributed_thing", "torch.distributed"])
def test_dask_is_not_installed_where_nobody_asks_for_it(entry: str) -> None:
    names = [pin.partition("==")[0] for pin in pins([entry])]
    assert "cloudpickle" in names
    assert not {"dask", "distributed"} & set(names)
