"""Slurm that tracks processes by cgroup, as most sites do: SIGTERM goes to the first process only, SIGKILL to all."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from tests.support.slurm import Cluster
from tests.support.waiting import until


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Cluster]:
    with Cluster(cache, 2, tracking="cgroup") as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environ.items():
            patch.setenv(name, value)
        yield made


@sky.compute
def groups() -> tuple[str, str]:
    with open("/proc/self/cgroup") as file:
        return socket.gethostname(), file.read()


def test_bodies_run_in_the_group_of_their_step_and_a_cancelled_job_ends_with_them(cluster: Cluster) -> None:
    with sky.ComputePool(provider=sky.Slurm(), nodes=2, console=False) as pool:
        found = groups() @ pool
        assert [name for name, _ in found] == ["h1", "h2"]
        assert all("/slurm_h" in text and "/step_" in text for _, text in found)
        (job,) = cluster.jobs()
        cluster.admin("scancel", job.split()[0])
        until(lambda: not cluster.jobs(), 90, "the job to be over")
        with pytest.raises(sky.errors.NodeLost):
            pool.submit(groups()).result(90)
        assert cluster.jobs() == []
