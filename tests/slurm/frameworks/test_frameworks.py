"""Frameworks on nodes of Slurm: their groups span the nodes, and the example of the guide runs where Slurm is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import skyward as sky
from tests.support.groups import check_ddp, check_jax_and_keras
from tests.support.slurm import Cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "13_slurm.py"


def test_ddp_over_two_nodes_keeps_one_model(cluster: Cluster) -> None:
    check_ddp(sky.Slurm(options={"cpus-per-task": 2}))


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
