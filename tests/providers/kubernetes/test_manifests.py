"""The Job and the Secret of a pool: what Kubernetes takes from 1.27 on, what sites demand, what a template adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import skyward as sky
from skyward.api.spec import Spec
from skyward.errors import InvalidArgument
from skyward.providers.kubernetes.manifests import job, job_name, label, role, secret
from tests.support.kubernetes import VERSIONS, problems


def made(spec: Spec | None = None, minor: int = 37, joins: bool = False, **settings: Any) -> dict[str, Any]:
    site = sky.Kubernetes(image="python:3.11-slim", **settings)
    return job(site, spec or Spec(ttl=1000), "train-1a2b", 4, joins, minor, {"skyward/owner": "me"})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("joins", [False, True])
def test_everything_fits_the_schemas_that_kubernetes_publishes(version: str, joins: bool) -> None:
    spec = Spec(vcpus=4, memory_gb=16, accelerator="A100:2", architecture="x86_64")
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    minor = int(version.partition(".")[2])
    whole = made(spec, minor, joins=joins, queue="team", node_selector={"disk": "ssd"}, tolerations=tolerations)
    assert problems(whole, version) == []
    assert problems(secret("train-1a2b", "uid", "pod.py", "text"), version) == []


def test_a_job_ends_by_itself_and_pods_that_were_taken_away_do_not_count() -> None:
    spec = made()["spec"]
    assert spec["suspend"] is True
    assert spec["activeDeadlineSeconds"] == 1000
    assert spec["ttlSecondsAfterFinished"] > 0
    assert spec["completions"] == spec["parallelism"] == 4
    assert spec["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert spec["backoffLimitPerIndex"] > 0
    assert "backoffLimitPerIndex" not in made(minor=28)["spec"], "older ones do not know it"


def test_pods_start_where_pod_security_is_restricted() -> None:
    pod = made()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["automountServiceAccountToken"] is False
    assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}


def test_what_was_not_asked_for_is_not_limited() -> None:
    (container,) = made()["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {}}
    (container,) = made(Spec(vcpus=4, accelerator="A100:2"))["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"cpu": "4", "nvidia.com/gpu": "2"}}


def test_a_template_adds_to_what_is_there() -> None:
    template = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "serviceAccountName": "trainer",
            "securityContext": {"runAsUser": 5000},
            "containers": [
                {
                    "env": [{"name": "HF_HOME", "value": "/data"}],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
                {"name": "sidecar", "image": "proxy"},
            ],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        },
    }
    whole = made(template=template)
    pod = whole["spec"]["template"]
    assert problems(whole) == []
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["metadata"]["labels"]["skyward/pool"] == "train-1a2b"
    assert pod["spec"]["securityContext"]["runAsUser"] == 5000
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert [container["name"] for container in pod["spec"]["containers"]] == ["skyward", "sidecar"]
    assert {entry["name"] for entry in pod["spec"]["containers"][0]["env"]} == {
        "HOME",
        "USER",
        "SKYWARD_OWN",
        "SKYWARD_NOTICE",
        "SKYWARD_NAME",
        "HF_HOME",
    }
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["program", "home", "shm", "data"]


def test_a_template_of_a_job_is_one_of_a_job_and_of_another_kind_none() -> None:
    whole = made(template={"kind": "Job", "metadata": {"annotations": {"a": "b"}}, "spec": {"backoffLimit": 3}})
    assert whole["metadata"]["annotations"]["a"] == "b"
    assert whole["spec"]["backoffLimit"] == 3
    with pytest.raises(InvalidArgument, match="Deployment"):
        made(template={"kind": "Deployment"})


def test_the_name_of_a_template_is_not_the_pools() -> None:
    """kubectl wants a file to have one."""
    whole = made(template={"kind": "Job", "metadata": {"name": "mine", "namespace": "other"}, "spec": {}})
    assert whole["metadata"]["name"] == "skyward-train-1a2b"
    assert "namespace" not in whole["metadata"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"kind": "Job", "spec": {"activeDeadlineSeconds": None}}, r"activeDeadlineSeconds to None.*ttl="),
        ({"kind": "Job", "spec": {"completions": 9}}, r"completions to 9.*nodes="),
        ({"kind": "Job", "spec": {"suspend": False}}, "suspend to False; the pool decides that"),
        ({"kind": "Job", "metadata": {"labels": {"skyward/pool": "other"}}}, "skyward/pool"),
        ({"kind": "Pod", "metadata": {"labels": {"skyward/pool": "other"}}}, "skyward/pool"),
        ({"spec": {"restartPolicy": "OnFailure"}}, "restartPolicy"),
        ({"spec": {"containers": [{"name": "main", "command": ["sleep", "1"]}]}}, "command for the first container"),
    ],
)
def test_a_template_cannot_change_what_ends_a_job_or_finds_it(template: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        made(template=template)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"volumes": []}, "has volumes. A Job or a Pod has metadata and spec"),
        ({"spec": None}, "spec=None. A mapping"),
        ({"metadata": {"labels": ["a"]}}, r"labels=\['a'\]. A mapping"),
        ({"spec": {"containers": ["a"]}}, "A list of mappings"),
        ({"spec": {"containers": None}}, "A list of mappings"),
        ({"kind": "Job", "spec": {"template": "x"}}, "template='x'. A mapping"),
    ],
)
def test_a_template_that_is_no_pod_is_refused_in_words(template: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        made(template=template)


def test_bodies_are_told_the_grace_that_a_template_gives_them() -> None:
    pod = made(template={"spec": {"terminationGracePeriodSeconds": 120}})["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"][-1] == "120"


@pytest.mark.parametrize(
    "settings",
    [
        {"node_selector": {"gpu": True}},
        {"node_selector": "disk=ssd"},
        {"node_selector": ["disk"]},
        {"tolerations": {"key": "gpu"}},
        {"template": 5},
        {"template": []},
    ],
)
def test_settings_of_another_type_are_refused_with_an_example(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(InvalidArgument, match=f"{name}=.*like {name}="):
        sky.Kubernetes(**settings)


@pytest.mark.parametrize("pool", ["train-1a2b", "Train_1.A", "x" * 120, "-", "ü", "a" * 30, "a" * 45])
def test_names_fit_whatever_the_pool_is_called(pool: str) -> None:
    import re

    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?", job_name(pool))
    assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", label(pool))


def test_pools_that_look_alike_have_names_of_their_own() -> None:
    pools = ["train", "Train", "train_", "t" * 60, "t" * 61]
    assert len({job_name(pool) for pool in pools}) == len({label(pool) for pool in pools}) == len(pools)


def test_the_role_is_what_is_asked_for_and_not_more() -> None:
    text = role("research")
    assert "namespace: research" in text
    assert "pods/exec" in text
    assert "watch" not in text
    assert "*" not in text


def test_the_role_of_the_guide_is_the_same() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "kubernetes.md").read_text()
    (shown,) = [block for block in guide.split("```yaml\n") if block.startswith("apiVersion: rbac")]
    assert yaml.safe_load(shown.partition("```")[0]) == yaml.safe_load(role("NAMESPACE"))


def test_a_provider_is_a_value_whatever_it_is_given(tmp_path: Path) -> None:
    one = sky.Kubernetes(node_selector={"a": "b"}, tolerations=[{"operator": "Exists"}], template={"spec": {}})
    assert one == sky.Kubernetes(node_selector={"a": "b"}, tolerations=[{"operator": "Exists"}], template={"spec": {}})
    assert hash(one) == hash(sky.Kubernetes(**{name: getattr(one, name) for name in ("node_selector", "template")},
                                            tolerations=json.loads(str(one.tolerations))))  # fmt: skip
    assert sky.Kubernetes(template=tmp_path / "pod.yaml").template == str(tmp_path / "pod.yaml")
    with pytest.raises(InvalidArgument, match="node_selector"):
        sky.Kubernetes(node_selector={"a": object()})  # type: ignore[dict-item]  # pyright: ignore
    with pytest.raises(InvalidArgument, match="no namespace"):
        sky.Kubernetes(namespace="Not A Namespace")
