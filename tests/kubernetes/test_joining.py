"""Where `kubectl exec` is not allowed, pods connect to the client."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import skyward as sky
from skyward.api.spec import Spec
from skyward.providers.kubernetes.manifests import rights
from tests.kubernetes.conftest import USER
from tests.support.kubernetes.cluster import CACHE, PYTHON, Cluster
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


PROGRAM = """
import os
import skyward as sky

@sky.compute
def name() -> str:
    return os.environ["SKYWARD_NAME"]

with sky.ComputePool(provider=sky.Kubernetes(template={user}, lease=20), nodes=2, console=False) as pool:
    print("pods", *name() @ pool, flush=True)
print("end", pool.receipt, flush=True)
"""


def test_a_client_that_is_a_pod_uses_its_service_account_and_its_pods_connect_to_it(
    cluster: Cluster, cache: Path
) -> None:
    cluster.kubectl("create", "namespace", "inside", check=False)
    rules = [{"apiGroups": [group], "resources": [resource], "verbs": [verb]} for verb, group, resource in rights()]
    cluster.user("dora", "inside", rules)
    program, python = PROGRAM.format(user=USER), f"{PYTHON}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    variables = {**cluster.client, "HOME": "/tmp", "SKYWARD_STATE": "/tmp/state", "SKYWARD_CACHE": "/tmp/cache"}
    container = {
        "name": "client",
        "image": "client",
        "command": ["sh", "-c", f'exec "$0" -c "$1" > {CACHE}/client.txt 2>&1', python, program],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": [{"name": "account", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "account", "secret": {"secretName": cluster.account("dora", "inside")}}],
    }
    metadata = {"name": "client", "namespace": "inside"}
    made = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    cluster.kubectl("apply", "-f", "-", data=json.dumps(made))

    def ended() -> bool:
        (pod,) = (pod for pod in cluster.items("pods", "inside") if pod["metadata"]["name"] == "client")
        return pod["status"]["phase"] in ("Succeeded", "Failed")

    try:
        until(ended, 180, lambda: (cache / "client.txt").read_text())
        said = (cache / "client.txt").read_text()
        assert re.search(r"^pods skyward-\S+-0-\S+ skyward-\S+-1-\S+$", said, re.MULTILINE), said
        assert "is deleted, with its Secret and its pods" in said
        assert not cluster.items("jobs", "inside")
    finally:
        cluster.kubectl("-n", "inside", "delete", "pod", "client", "--wait=true")
        (cache / "client.txt").unlink(missing_ok=True)
