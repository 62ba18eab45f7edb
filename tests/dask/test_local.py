"""Pools on LocalClusters: a node beside each worker, adaptive clusters, clusters that are scaled down or closed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Adaptive, Client, LocalCluster

import skyward as sky
from skyward.errors import NodeLost, NoPlace
from tests.support.waiting import until


@sky.compute
def process() -> tuple[int, str | None]:
    return os.getpid(), os.environ.get("OMP_NUM_THREADS")


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as made:
        yield made
    until(lambda: not joiners(), 30, joiners)


def joiners() -> list[str]:
    """Programs on this computer that have joined pools of this test run, and keepers that they have started."""
    found: list[str] = []
    mark = f"SKYWARD_TEST_RUN={os.environ['SKYWARD_TEST_RUN']}".encode()
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\\0", b" ").decode() if entry.name.isdigit() else ""
            if ("--place" in command or "skyward.node" in command) and mark in (entry / "environ").read_bytes():
                found.append(f"{entry.name} {command[-200:]}")
        except OSError:
            continue
    return found


def opened(cluster: Any, nodes: int = 2, **options: Any) -> sky.ComputePool:
    return sky.ComputePool(
        provider=sky.Dask(cluster, per="worker"), nodes=nodes, console=False, provision_timeout=120, **options
    )


def test_a_cluster_a_client_and_an_address_all_lead_to_nodes(cluster: LocalCluster) -> None:
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as other, Client(other):
        # the user's default client belongs to another cluster
        with Client(cluster, set_as_default=False) as client:
            for given in (cluster, client, cluster.scheduler_address):
                with opened(given) as pool:
                    found = process() @ pool
                    workers = client.run(os.getpid)
                    assert len({pid for pid, _ in found} - set(workers.values())) == 2
                    assert client.run(lambda: os.environ["OMP_NUM_THREADS"]).values().__iter__().__next__() == "1"
                    assert all(threads != "1" or os.cpu_count() == 1 for _, threads in found)
            assert client.status == "running", "a pool leaves the user's client open"


def test_workers_of_one_machine_are_one_place_unless_asked_for(cluster: LocalCluster) -> None:
    with pytest.raises(NoPlace, match='per="worker"'):
        sky.ComputePool(provider=sky.Dask(cluster), nodes=2, console=False).__enter__()


def test_a_cluster_that_is_full_and_stays_so_is_told_at_once(cluster: LocalCluster) -> None:
    with pytest.raises(NoPlace, match=r"2 of 3 nodes .* scale\(\) or adapt\(\)"):
        opened(cluster, nodes=3).__enter__()


def test_an_adaptive_cluster_starts_workers_and_leaves_them_while_the_pool_is_open() -> None:
    decisions = 0

    class Counting(Adaptive):
        async def recommendations(self, target: int) -> dict[str, Any]:
            nonlocal decisions
            decisions += 1
            return await super().recommendations(target)

    with LocalCluster(n_workers=0, threads_per_worker=2, dashboard_address="127.0.0.1:0") as cluster:
        cluster.adapt(Adaptive=Counting, minimum=0, maximum=4, interval="50ms", wait_count=1)
        with opened(cluster) as pool:
            before = {pid for pid, _ in process() @ pool}, decisions
            with Client(cluster, set_as_default=False) as client:  # dask's own work makes it start others, and end them
                client.gather(client.map(lambda n: time.sleep(0.2), range(40), pure=False))
            until(lambda: decisions > before[1] + 50 and len(cluster.scheduler.workers) == 2, 60)
            assert {pid for pid, _ in process() @ pool} == before[0]
        until(lambda: not cluster.scheduler.workers, 60, "a cluster without workers")
    until(lambda: not joiners(), 30, joiners)


def test_nodes_end_at_once_when_the_cluster_is_scaled_down(cluster: LocalCluster) -> None:
    with opened(cluster, replace=False) as pool:
        process() @ pool
        cluster.scale(0)
        until(lambda: not joiners(), 30, joiners)
        with pytest.raises(NodeLost, match=r"the dask worker tcp://127\.0\.0\.1:"):
            until(lambda: not process() @ pool, 60)


def test_a_pool_that_outlives_its_cluster_closes_and_leaves_nothing(cluster: LocalCluster) -> None:
    with opened(cluster, replace=False) as pool:
        process() @ pool
        cluster.close()
        until(lambda: not joiners(), 30, joiners)
