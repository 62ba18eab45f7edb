"""Frameworks on nodes of Slurm: their groups span the nodes, and the example of the guide runs where Slurm is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import skyward as sky
from tests.ssh.places import TORCH, torch_plugin
from tests.support.slurm import Cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "13_slurm.py"


@sky.compute
def trained(steps: int) -> tuple[int, int, float, list[float]]:
    """Rank, size of the group, a sum over all ranks, and the weights after some steps of DDP, each on its own data."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1)
    shared = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        shared(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    weights = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
    return dist.get_rank(), dist.get_world_size(), total.item(), weights


def test_ddp_over_two_nodes_keeps_one_model(cluster: Cluster) -> None:
    provider = sky.Slurm(options={"cpus-per-task": 2})
    with sky.ComputePool(provider=provider, nodes=2, image=TORCH, plugins=[torch_plugin()], console=False) as pool:
        first, second = trained(5) @ pool
    assert (first[:3], second[:3]) == ((0, 2, 3.0), (1, 2, 3.0))
    assert first[3] == second[3]


def test_joblib_runs_on_the_nodes(cluster: Cluster) -> None:
    from joblib import Parallel, delayed

    image = sky.Image(pip=["joblib"])
    with sky.ComputePool(provider=sky.Slurm(), nodes=2, image=image, plugins=[sky.plugins.joblib()], console=False):
        assert Parallel(n_jobs=-1)(delayed(pow)(number, 2) for number in range(8)) == [n * n for n in range(8)]


def test_the_example_of_the_guide_runs_where_slurm_is(cluster: Cluster) -> None:
    argv = [sys.executable, str(EXAMPLE), "--nodes", "2", "--time", "0:10:00", "--epochs", "15"]
    done = subprocess.run(argv, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert [line.split(":")[0] for line in lines] == ["rank 0 on h1", "rank 1 on h2"]
    assert lines[0].partition("sum of weights")[2] == lines[1].partition("sum of weights")[2]
