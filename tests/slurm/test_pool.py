"""A pool on Slurm does what other pools do; Slurm decides where and when."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.machines import reaper
from tests.support.slurm import Cluster
from tests.support.waiting import until


@sky.compute
def whereabouts() -> tuple[str, int, str | None]:
    return socket.gethostname(), os.getuid(), os.environ.get("SLURM_JOB_ID")


@sky.compute
def variables() -> dict[str, str]:
    return dict(os.environ)


@sky.compute
def rank() -> tuple[int, int]:
    info = sky.instance_info()
    return info.rank, info.world_size


def test_calls_run_on_the_nodes_that_slurm_has_given(pool: sky.ComputePool, cluster: Cluster) -> None:
    (job,) = cluster.jobs()
    assert job.endswith("RUNNING")
    found = whereabouts() @ pool
    assert {name for name, _, _ in found} == {"h1", "h2"}
    assert {user for _, user, _ in found} == {20001}
    assert {number for _, _, number in found} == {job.split()[0]}


def test_the_secret_is_in_no_argument_script_or_variable_of_a_body(pool: sky.ComputePool, cluster: Cluster) -> None:
    """SEC-10"""
    number = cluster.jobs()[0].split()[0]
    shown = cluster.run("scontrol", "show", "job", number)
    script = cluster.run("scontrol", "write", "batch_script", number, "-")
    arguments = [word for node in cluster.nodes for process in node.processes() for word in process.argv]
    bodies = variables() @ pool
    secret = _secret(cluster)
    assert len(secret) > 100
    for text in (shown, script, *arguments, *(value for body in bodies for value in body.values())):
        assert secret not in text
    assert not any(name in ("SKYWARD_JOIN", "SKYWARD_PROGRAM") for body in bodies for name in body)


def test_bodies_see_the_job_and_no_ranks_of_its_steps(pool: sky.ComputePool, cluster: Cluster) -> None:
    """Lightning takes the ranks of Slurm before those of anybody else, wherever it sees SLURM_NTASKS."""
    number = cluster.jobs()[0].split()[0]
    for body in variables() @ pool:
        ranks = r"SLURM_(?:JOB_NUM_NODES|NODELIST|N?TASKS?|NPROCS|NNODES|PROCID|LOCALID|NODEID|GTIDS|STEP).*"
        assert not [name for name in body if re.fullmatch(ranks, name)]
        assert body["SLURM_JOB_ID"] == number
        assert body["SLURM_JOB_NAME"].startswith("skyward-")


def _secret(cluster: Cluster) -> str:
    """What the job was told: root of its first node finds it in the variables of the script."""
    script = "for p in /proc/[0-9]*; do tr '\\0' '\\n' < $p/environ 2>/dev/null | sed -n 's/^SKYWARD_JOIN=//p'; done"
    return cluster.nodes[0].run(["sh", "-c", script], user="root").stdout.split()[0]


def test_sky_ps_lists_the_job_with_its_nodes(pool: sky.ComputePool) -> None:
    (found,) = reaper.pools([sky.Slurm()])
    assert found.condition == "in use"
    assert [item.id.partition("/")[2] for item in found.leftovers] == ["h1", "h2"]
    assert all("running" in item.detail for item in found.leftovers)


def test_several_processes_a_node_are_several_ranks(cluster: Cluster) -> None:
    with sky.ComputePool(provider=sky.Slurm(), nodes=2, processes_per_node=2, console=False) as pool:
        assert sorted(rank() @ pool) == [(number, 4) for number in range(4)]


def test_an_accelerator_is_asked_for_in_the_words_of_the_site(cluster: Cluster) -> None:
    provider = sky.Slurm(partition="main")
    spec = sky.Spec(accelerator="A100:2", vcpus=2, memory_gb=1, ttl=3600)
    told: list[str] = []
    state = provider.acquire(spec, "gpus", 1, 60, told.append)
    try:
        assert any(text.endswith(" with 2 CPUs and 1GB of memory each") for text in told), told
        shown = cluster.run("scontrol", "show", "job", state.machines[0].id.partition("/")[0])
        assert "gres/gpu" in shown or "gpu:a100:2" in shown
        assert "TimeLimit=01:00:00" in shown
        assert "NumCPUs=2" in shown
        assert "mem=1G" in shown
        assert "Comment=skyward pool=gpus expires=" in shown
    finally:
        state.close(lambda text: None)


def test_the_job_s_reason_to_wait_is_told_while_it_waits(cluster: Cluster) -> None:
    cluster.run("sbatch", "-w", "h3", "--exclusive", "--time=10", "--output=/dev/null", "--wrap", "sleep 600")
    until(lambda: any(job.endswith("wrap RUNNING") for job in cluster.jobs()))
    told: list[str] = []

    def hear(event: events.Event) -> None:
        if isinstance(event, events.NodePhase):
            told.append(event.phase)
            if "estimated start" in event.phase:
                cluster.admin("scancel", "--user=sky", "--name=wrap")

    pool = sky.ComputePool(provider=sky.Slurm(nodelist="h3"), nodes=1, console=False)
    pool.on_event(hear)
    with pool:
        assert (whereabouts() >> pool)[0] == "h3"
    waits = [text for text in told if "waiting: " in text]
    assert any("waiting: Resources" in text or "waiting: Priority" in text for text in waits)
    assert any(", estimated start " in text for text in waits)


@pytest.mark.parametrize(
    ("settings", "nodes", "expected"),
    [
        ({"partition": "small"}, 2, "PartitionNodeLimit"),
        ({"partition": "short", "time": "10:00"}, 1, "PartitionTimeLimit"),
        ({"options": {"cpus-per-task": 99}}, 1, "Slurm refused the job: no nodes|PartitionConfig"),
    ],
)
def test_a_job_that_would_never_start_ends_the_wait_with_a_sentence(
    cluster: Cluster, settings: dict[str, Any], nodes: int, expected: str
) -> None:
    began = time.monotonic()
    with (
        pytest.raises(sky.SkywardError, match=expected) as caught,
        sky.ComputePool(provider=sky.Slurm(**settings), nodes=nodes, console=False),
    ):
        pass
    assert time.monotonic() - began < 60
    assert "would never start" in str(caught.value) or "Slurm refused the job" in str(caught.value)
    assert len(cluster.jobs()) <= 1  # that of the shared pool
