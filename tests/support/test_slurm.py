"""The Slurm of the tests is a real one, and nothing of it is seen by another."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.slurm import Cluster, unavailable_slurm
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(bool(unavailable_slurm()), reason=str(unavailable_slurm()))


def test_jobs_run_on_three_nodes_as_a_user_and_two_clusters_do_not_meet(tmp_path: Path) -> None:
    caches = [tmp_path / "one", tmp_path / "two"]
    for cache in caches:
        cache.mkdir()
    with Cluster(caches[0]) as one, Cluster(caches[1], 1, tracking="cgroup") as two:
        said = one.run(
            "srun", "-N3", "--gres=gpu:a100:1", "sh", "-c", "echo $(hostname) $(id -un) $CUDA_VISIBLE_DEVICES"
        )
        assert sorted(said.splitlines()) == ["h1 sky 0", "h2 sky 0", "h3 sky 0"]
        env = {**os.environ, **one.environ}
        argv = ["sbatch", "--parsable", "-N3", "--output=/dev/null", "--wrap", "srun sleep 300"]
        number = subprocess.run(argv, env=env, check=True, capture_output=True, text=True).stdout.strip()
        until(lambda: one.jobs() == [f"{number} wrap RUNNING"])
        assert two.jobs() == []
        assert two.run("srun", "sh", "-c", "cat /proc/self/cgroup | grep -c slurm_").strip() != "0"
        one.cancel_all()
        one.fail(one.nodes[1])
        assert one.state(one.nodes[1]).startswith("down")
        one.resume()
        assert one.run("srun", "-w", "h2", "hostname").strip() == "h2"
    groups = Path("/sys/fs/cgroup")
    assert not list(groups.glob(f"**/slurm_{two.name(two.nodes[0])}"))
