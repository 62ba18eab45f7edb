"""Frameworks on nodes of Slurm: their groups span the nodes, and the example of the guide runs where Slurm is."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import skyward as sky
from tests.ssh.places import TORCH, torch_plugin
from tests.support.groups import check_ddp, check_jax_and_keras
from tests.support.slurm import Cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "13_slurm.py"


def test_ddp_over_two_nodes_keeps_one_model(cluster: Cluster) -> None:
    check_ddp(sky.Slurm(options={"cpus-per-task": 2}))


@sky.compute
def launched() -> tuple[bool, int, int, float]:
    """Whether Lightning takes this for a step of Slurm's; its rank, how many there are, and a sum over all of them."""
    import torch
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import SLURMEnvironment

    fabric = Fabric(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp")
    fabric.launch()
    total = fabric.all_reduce(torch.tensor(fabric.global_rank + 1.0), reduce_op="sum")
    return SLURMEnvironment.detect(), fabric.global_rank, fabric.world_size, float(total)


def test_lightning_fabric_takes_the_ranks_of_the_pool_and_not_those_of_slurm_s_steps(cluster: Cluster) -> None:
    image = replace(TORCH, pip=[*TORCH.pip, "lightning-fabric==2.6.6"])
    provider = sky.Slurm(options={"cpus-per-task": 2})
    with sky.ComputePool(provider=provider, nodes=2, image=image, plugins=[torch_plugin()], console=False) as pool:
        assert launched() @ pool == [(False, 0, 2, 3.0), (False, 1, 2, 3.0)]


def test_jax_and_keras_span_two_nodes(cluster: Cluster) -> None:
    check_jax_and_keras(sky.Slurm(options={"cpus-per-task": 2}))


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
