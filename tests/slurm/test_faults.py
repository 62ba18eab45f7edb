"""What dies in a Slurm pool, and what happens then: nodes are named and replaced, bodies are told in time."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.api.spec import Spec
from skyward.providers.slurm import jobs
from tests.support.hosts import Host
from tests.support.slurm import Cluster
from tests.support.waiting import until


@sky.compute
def hostname() -> str:
    return socket.gethostname()


@sky.compute
def until_told() -> tuple[float, list[int]]:
    """Waits for the notice and for SIGTERM; how many seconds are left then, and which signals came."""
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    while not (notice := sky.preempted()) or not came:
        time.sleep(0.05)
    return notice.seconds_left, came


@sky.compute
def nap() -> None:
    time.sleep(600)


@contextmanager
def opened(nodes: int, **settings: Any) -> Generator[tuple[sky.ComputePool, list[str]]]:
    """A pool, and what becomes of its nodes, in words."""
    said: list[str] = []
    provider = sky.Slurm(**settings)
    pool = sky.ComputePool(provider=provider, nodes=nodes, console=False)
    pool.on_event(lambda event: said.append(str(event)) if isinstance(event, events.Event) else None)
    with pool:
        yield pool, said


def joiner(node: Host) -> int:
    """The program on a node that has joined the pool."""
    found = [p.pid for p in node.processes("sky") if "--place" in p.argv and "python3" in p.argv[0]]
    return min(found)


def stop_slurmd(node: Host) -> None:
    """Kills the daemon of a node; what it has started goes on."""
    for process in node.processes():
        if process.argv[0].endswith("slurmd"):
            node.signal(process.pid)


def test_a_failed_node_is_named_and_replaced_by_another_job(cluster: Cluster) -> None:
    with opened(2) as (pool, said):
        assert sorted(hostname() @ pool) == ["h1", "h2"]
        cluster.fail(cluster.nodes[1])
        until(lambda: any("node h2 is down (killed by a test" in text for text in said), 60, said)
        until(lambda: len(cluster.jobs()) == 2, 60, "another job")
        assert sorted(hostname() @ pool) == ["h1", "h3"]


@pytest.mark.parametrize("victim", ["joiner", "slurmstepd", "keeper"])
def test_a_node_whose_first_process_is_killed_is_replaced(cluster: Cluster, victim: str) -> None:
    with opened(1) as (pool, said):
        first = hostname() >> pool
        node = next(node for node in cluster.nodes if node.name == first)
        if victim == "joiner":
            node.signal(joiner(node))
        elif victim == "keeper":
            keepers = [p.pid for p in node.processes("sky") if "skyward.node.keeper" in p.argv]
            node.signal(min(keepers))
        else:
            steps = [p.pid for p in node.processes() if "slurmstepd" in p.argv[0] and ".0" in p.argv[0]]
            node.signal(steps[0])
        until(lambda: any("NodeDown" in text for text in said), 60, said)
        assert hostname() >> pool


def test_a_job_that_somebody_cancels_is_not_submitted_again(cluster: Cluster) -> None:
    with opened(2) as (pool, said):
        running = pool.submit(nap())
        until(lambda: any("CallStarted" in text for text in said))
        (job,) = cluster.jobs()
        cluster.admin("scancel", job.split()[0])
        until(lambda: not cluster.jobs(), 90, "the job to be over")
        for call in (running, pool.submit(hostname())):
            with pytest.raises(sky.errors.NodeLost):
                call.result(120)
        why = f"could not be replaced: job {job.split()[0]} was cancelled, so the pool gets no other nodes"
        until(lambda: any(why in text for text in said), 60, said)
        assert sum("submitting a job" in text for text in said) == 1


def test_nodes_of_a_job_that_is_put_back_into_the_queue_are_replaced_and_the_job_is_cancelled(
    cluster: Cluster,
) -> None:
    with opened(2) as (pool, said):
        assert sorted(hostname() @ pool) == ["h1", "h2"]
        (job,) = cluster.jobs()
        number = job.split()[0]
        cluster.admin("scontrol", "update", f"jobid={number}", "requeue=1")  # the pool asks for no-requeue
        cluster.admin("scontrol", "requeue", number)
        until(lambda: any(f"job {number} was put back into the queue" in text for text in said), 60, said)
        until(lambda: not any(each.startswith(f"{number} ") for each in cluster.jobs()), 60, cluster.jobs)
        assert len(set(hostname() @ pool)) == 2


def test_a_pool_is_closed_soon_when_only_slurm_has_to_clean_up_on_a_node_that_it_does_not_reach(
    cluster: Cluster,
) -> None:
    node = cluster.nodes[1]
    try:
        with opened(2) as (pool, _):
            assert sorted(hostname() @ pool) == ["h1", "h2"]
            stop_slurmd(node)
            began = time.monotonic()
        assert time.monotonic() - began < 90  # Slurm takes ten seconds to notice; it would go on for minutes
        assert not node.processes("sky")
        assert "Slurm has ended job" in str(pool.receipt)
        assert "that waits: node h2 does not answer Slurm" in str(pool.receipt)
    finally:
        cluster.resume()


def test_a_job_is_not_called_ended_while_a_step_of_it_may_run_where_slurm_does_not_reach(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_ENDING", 15.0)
    node, provider = cluster.nodes[0], sky.Slurm(nodelist="h1")
    held = provider.acquire(Spec(), "stuck", 1, 60, lambda text: None)
    try:
        stop_slurmd(node)
        for process in node.processes("sky"):
            node.signal(process.pid, "STOP")
        with pytest.raises(sky.SkywardError, match=r"job \d+ \(completing\) in Slurm"):
            held.close(lambda text: None)
        assert node.processes("sky")
    finally:
        monkeypatch.undo()
        for process in node.processes("sky"):
            node.signal(process.pid, "CONT")
        cluster.resume()
    assert "Slurm has ended job" in str(provider.give_back("stuck", lambda text: None))


def test_bodies_are_told_before_their_job_is_preempted(cluster: Cluster) -> None:
    more = ["sbatch", "-p", "high", "-w", "h1", "--exclusive", "--time=1", "--output=/dev/null", "--wrap", "sleep 1"]
    with opened(1, partition="low", nodelist="h1") as (pool, said):
        told = pool.submit(until_told())
        until(lambda: any("CallStarted" in text for text in said))
        cluster.run(*more)
        left, came = told.result(90)
        assert set(came) == {signal.SIGTERM}  # of Slurm itself, too, where it signals every process
        assert 0 < left <= 30


def test_bodies_are_told_before_the_time_limit_is_reached(cluster: Cluster) -> None:
    with opened(1, time="1") as (pool, _):
        left, came = until_told() >> pool
        assert set(came) == {signal.SIGTERM}  # of Slurm itself, too, where it signals every process
        assert 5 < left <= 20
