"""Where `kubectl exec` is not allowed, pods connect to the client."""

from __future__ import annotations

import json

import pytest

import skyward as sky
from skyward.api.spec import Spec
from skyward.providers.kubernetes.manifests import rights
from tests.kubernetes.conftest import USER
from tests.support.kubernetes.cluster import Cluster
from tests.support.waiting import until


@sky.compute
def name() -> str:
    import socket

    return socket.gethostname()


@pytest.fixture
def carol(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who may not use `kubectl exec`."""
    cluster.kubectl("create", "namespace", "noexec", check=False)
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": [verb]} for verb, group, resource in rights(False)
    ]
    monkeypatch.setenv("KUBECONFIG", str(cluster.user("carol", "noexec", rules)))


@pytest.mark.usefixtures("carol")
def test_machines_are_the_pods_that_have_connected_also_later_ones(cluster: Cluster) -> None:
    lease = sky.Kubernetes(template=USER, lease=20).acquire(Spec(), "joining", 2, 120, print)
    try:
        first, second = lease.machines
        assert {first.id, second.id} == _pods(cluster)
        cluster.kubectl("-n", "noexec", "delete", "pod", first.id)
        until(lambda: lease.refresh([first])[0].gone, 120, "the pod is gone")
        (third,) = lease.more(Spec(), 1, 120, print)
        assert {second.id, third.id} == _pods(cluster)
        assert [machine.gone for machine in lease.refresh([second, third])] == ["", ""]
    finally:
        lease.close(print)


def _pods(cluster: Cluster) -> set[str]:
    pods = cluster.items("pods", "noexec")
    return {pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


@pytest.mark.usefixtures("carol")
def test_pods_dial_home_and_are_replaced(cluster: Cluster) -> None:
    provider = sky.Kubernetes(template=USER, lease=20)
    with sky.ComputePool(provider=provider, nodes=2, console=False) as pool:
        assert len(name() @ pool) == 2
        (secret,) = cluster.items("secrets", "noexec")
        assert list(secret["data"]) == ["join.py"]
        (pod, _) = cluster.items("pods", "noexec")
        cluster.kubectl("-n", "noexec", "delete", "pod", pod["metadata"]["name"], "--wait=false")
        until(lambda: pod["metadata"]["name"] not in json.dumps(cluster.items("pods", "noexec")), 120, "its end")
        until(lambda: _count(pool) == 2, 120, "two nodes again")
    assert not cluster.items("jobs", "noexec")


def _count(pool: sky.ComputePool) -> int:
    try:
        return len(name() @ pool)
    except sky.SkywardError:
        return 0
