"""The manifests for Kubernetes fit its schemas; that their command joins a pool is in tests/ssh/test_kubernetes.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes import documents, problems

MANIFESTS = Path(__file__).parents[1] / "examples" / "kubernetes"


@pytest.fixture
def job() -> dict[str, Any]:
    (found,) = documents(MANIFESTS / "job.yaml")
    return found


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_fit_the_schemas_that_kubernetes_publishes(path: Path) -> None:
    assert [problem for item in documents(path) for problem in problems(item)] == []


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
    assert volumes[mounts["/etc/skyward"]]["secret"]["defaultMode"] == 0o400
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
