"""The examples that run where dask does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from distributed import LocalCluster

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pool_beside_the_workers_of_a_local_cluster() -> None:
    said = run(str(EXAMPLES / "15_dask.py"))
    assert "the largest prime below 100,000 is 99991" in said
    assert "2 nodes beside 2 workers, in processes of their own: True" in said
    assert "dask meanwhile: 285" in said


def test_one_program_runs_wherever_the_machines_are() -> None:
    program = str(EXAMPLES / "any_cluster.py")
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        for arguments in (["local"], ["dask", cluster.scheduler_address, "--nodes", "1"]):
            assert "5,133 primes below 50,000" in run(program, *arguments)
