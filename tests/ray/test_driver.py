"""Pools on Ray from a machine of the cluster: from a program there, and from a task of the user's."""

from __future__ import annotations

import signal

from tests.ray.test_faults import CLIENT, processes
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import read_until, until

TASK = """
import ray
ray.init("auto", log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1, runtime_env={"env_vars": {"PYTHONPATH": "/run/skyward", "MARK": "1"}})
def work():
    import skyward as sky

    @sky.compute
    def where(x):
        import os, socket
        return socket.gethostname(), os.environ["CUDA_VISIBLE_DEVICES"], 2 * x, os.environ.get("MARK")

    with sky.ComputePool(provider=sky.Ray(), nodes=2, accelerator="A100", console=False) as pool:
        return sorted(where(21) @ pool)

print("made", ray.get(work.remote()), flush=True)
"""


def test_a_program_on_the_cluster_needs_no_jobs_api(cluster: RayCluster) -> None:
    with cluster.client(CLIENT) as client:
        assert "h" in read_until(client, "open")[-1]
        jobs = [job for job in cluster.get("/api/jobs/") if job["status"] == "RUNNING"]
        assert [job["type"] for job in jobs] == ["DRIVER"]
        client.communicate("\n", timeout=60)
        assert client.returncode == 0
    until(lambda: not cluster.left(), 30, cluster.left)


def test_a_killed_program_on_the_cluster_takes_its_nodes_along(cluster: RayCluster) -> None:
    with cluster.client(CLIENT) as client:
        read_until(client, "open")
        (pid,) = processes(cluster.head, "import skyward as sky")
        cluster.head.signal(pid)
        until(lambda: not cluster.left(), 30, cluster.left)
        assert client.wait(30) == 128 + signal.SIGKILL or client.returncode == -signal.SIGKILL


def test_a_killed_driver_beside_the_program_ends_its_nodes(cluster: RayCluster) -> None:
    with cluster.client(CLIENT) as client:
        read_until(client, "open")
        (driver,) = processes(cluster.head, "ray/driver.py")
        cluster.head.signal(driver)
        until(lambda: not any(processes(host, "/proc/self/fd/") for host in cluster.network), 60)
        client.communicate("\n", timeout=120)


def test_a_task_of_the_users_opens_a_pool_of_its_own_without_its_runtime_env(cluster: RayCluster) -> None:
    with cluster.client(TASK) as client:
        made = read_until(client, "made")[-1]
        client.communicate(timeout=60)
    assert "('h1', '0', 42, None), ('h2', '0', 42, None)" in made
