"""The manifests for Kubernetes fit its schemas; tests/ssh/test_kubernetes_command.py has their command join a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes import VERSIONS, documents, problems

MANIFESTS = Path(__file__).parents[1] / "examples" / "kubernetes"


@pytest.fixture
def job() -> dict[str, Any]:
    (found,) = documents(MANIFESTS / "job.yaml")
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_fit_the_schemas_that_kubernetes_publishes(path: Path, version: str) -> None:
    assert [problem for item in documents(path) for problem in problems(item, version)] == []


def test_a_field_that_kubernetes_does_not_know_would_be_noticed(job: dict[str, Any]) -> None:
    job["spec"]["completion"] = 2
    job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] = 4
    assert len(problems(job)) == 2


def test_a_job_leaves_nothing_and_has_room_for_torch(job: dict[str, Any]) -> None:
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed"
    assert min(spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) > 0
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] >= 30
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/etc/skyward"]]["secret"]["defaultMode"] == 0o440


def test_pods_start_in_a_namespace_that_is_restricted_and_on_machines_without_gpus(job: dict[str, Any]) -> None:
    """The rules of the Pod Security Standard "restricted"; no pod of a Job that breaks one of them is created."""
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    own, shared = container["securityContext"], pod["securityContext"]
    assert shared["runAsNonRoot"] is True
    assert shared["runAsUser"] > 0
    assert shared["seccompProfile"]["type"] == "RuntimeDefault"
    assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}
    assert {kind for volume in pod["volumes"] for kind in volume} == {"name", "secret", "emptyDir"}
    assert shared["fsGroup"] == shared["runAsGroup"], "it may read the Secret's file, which is root's"
    assert container["resources"]["limits"].keys() == {"cpu", "memory", "ephemeral-storage"}
