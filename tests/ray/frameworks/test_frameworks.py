"""Frameworks on nodes of Ray: their groups span the nodes, and the example of the guide runs where Ray is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import skyward as sky
from tests.support.groups import check_ddp, check_jax_and_keras
from tests.support.ray_cluster import RayCluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "14_ray.py"


def test_ddp_over_two_nodes_keeps_one_model(provider: sky.Ray) -> None:
    check_ddp(provider)


def test_jax_and_keras_span_two_nodes(provider: sky.Ray) -> None:
    check_jax_and_keras(provider)


def test_joblib_runs_on_the_nodes(provider: sky.Ray) -> None:
    from joblib import Parallel, delayed

    image = sky.Image(pip=["joblib"])
    with sky.ComputePool(provider=provider, nodes=2, image=image, plugins=[sky.plugins.joblib()], console=False):
        assert Parallel(n_jobs=-1)(delayed(pow)(number, 2) for number in range(8)) == [n * n for n in range(8)]


def test_the_example_of_the_guide_runs_where_ray_is(cluster: RayCluster) -> None:
    argv = [sys.executable, str(EXAMPLE), "--address", cluster.url, "--nodes", "2", "--epochs", "15"]
    env = {**os.environ, "RAY_AUTH_TOKEN": cluster.token or ""}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert [line.split()[1] for line in lines] == ["0", "1"]
    assert lines[0].partition("sum of weights")[2] == lines[1].partition("sum of weights")[2]
