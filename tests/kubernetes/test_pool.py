"""Real pools of pods: opening, calls, and how they end."""

from __future__ import annotations

import getpass
import os
import socket
import sys

import skyward as sky
from tests.kubernetes.conftest import USER
from tests.support.kubernetes.cluster import Cluster


@sky.compute
def where() -> tuple[int, str]:
    return sky.instance_info().node, socket.gethostname()


@sky.compute
def double(x: int) -> int:
    return 2 * x


@sky.compute
def size(data: bytes) -> int:
    return len(data)


def test_a_pool_of_pods_takes_calls_of_all_kinds_and_leaves_nothing(cluster: Cluster, provider: sky.Kubernetes) -> None:
    with sky.ComputePool(provider=provider, nodes=2, console=False) as pool:
        assert [node for node, _ in where() @ pool] == [0, 1]
        assert double(21) >> pool == 42
        assert list(pool.map(double, range(50))) == [2 * x for x in range(50)]
        assert size(os.urandom(20 << 20)) >> pool == 20 << 20
        (job,) = cluster.items("jobs")
        assert job["spec"]["activeDeadlineSeconds"] <= 7 * 24 * 3600
        (secret,) = cluster.items("secrets")
        assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert "is deleted" in str(pool.receipt)
    assert not cluster.items("jobs")


@sky.compute
def places(data: bytes) -> tuple[str, list[str], str]:
    """Where environments lie, what large arguments lie beside in memory, and who this is."""
    return sys.prefix, [name for name in os.listdir("/dev/shm") if name.startswith("skyward-")], getpass.getuser()


def test_what_a_cluster_gives_is_enough_for_environments_and_large_arguments(cluster: Cluster) -> None:
    """Its empty directories are root's, and open to all: nobody else is in a pod."""
    cache = {"name": "SKYWARD_CACHE", "value": "/home/skyward/.cache/skyward"}  # as where no test shares one
    spec = {**USER["spec"], "containers": [{"name": "skyward", "env": [cache]}]}
    with sky.ComputePool(provider=sky.Kubernetes(template={"spec": spec}), nodes=1, console=False) as pool:
        prefix, in_memory, user = places(os.urandom(20 << 20)) >> pool
    assert prefix.startswith(cache["value"])
    assert in_memory
    assert user == "skyward"


@sky.compute
def rank() -> tuple[int, int]:
    info = sky.instance_info()
    return info.rank, info.world_size


def test_each_pod_may_run_several_processes(cluster: Cluster, provider: sky.Kubernetes) -> None:
    with sky.ComputePool(provider=provider, nodes=2, processes_per_node=2, vcpus=1, memory_gb=1, console=False) as pool:
        assert rank() @ pool == [(0, 4), (1, 4), (2, 4), (3, 4)]
        (job,) = cluster.items("jobs")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"cpu": "1", "memory": "954Mi"}
