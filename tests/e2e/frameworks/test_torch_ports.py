"""Two pools with torch groups on one computer do not take each other's ports."""

from __future__ import annotations

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import skyward as sky

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

TIMES = 10 if os.environ.get("SKYWARD_SOAK") else 1


@sky.compute
def summed() -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item()


def opened_and_closed(_: int) -> list[float]:
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.torch(backend="gloo")], console=False) as pool:
        return summed() @ pool


@pytest.mark.timeout(1200)
def test_two_torch_pools_open_at_the_same_time_again_and_again() -> None:
    """Row 39: each finds its own ports free, whatever the other has been given."""
    with ThreadPoolExecutor(2) as threads:
        for _ in range(TIMES):
            assert list(threads.map(opened_and_closed, range(2))) == [[3.0, 3.0]] * 2
