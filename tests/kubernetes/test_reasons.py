"""Whoever waits for pods, or may not have any, is told why."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import skyward as sky
from skyward.api.spec import Spec
from skyward.cli import main
from skyward.errors import BootstrapError, NoOffer, NoPlace, PermissionDenied, SkywardError
from skyward.machines.ledger import read
from skyward.providers.kubernetes.manifests import rights
from tests.kubernetes.conftest import USER
from tests.support.kubernetes.cluster import Cluster


class Failed(Exception):
    """What was reported, and the error that came."""

    def __init__(self, error: BaseException, reports: list[str]) -> None:
        super().__init__(str(error))
        self.error, self.said = error, "\n".join([*reports, str(error)])


def fails(provider: sky.Kubernetes, spec: Spec | None = None, timeout: float = 10) -> Failed:
    reports: list[str] = []
    with pytest.raises(SkywardError) as caught:
        provider.acquire(spec or Spec(), "reasons", 1, timeout, reports.append)
    assert read("reasons") is None, "the ledger is gone"
    return Failed(caught.value, reports)


def test_a_pod_without_room_says_what_the_scheduler_says(cluster: Cluster) -> None:
    found = fails(sky.Kubernetes(template=USER), Spec(vcpus=100))
    assert isinstance(found.error, NoPlace)
    assert "Insufficient cpu" in found.said
    assert "provision_timeout" in found.said


def test_an_accelerator_names_the_nodes_and_one_that_none_has_is_refused_before_anything_is_made(
    cluster: Cluster,
) -> None:
    lease = sky.Kubernetes(template=USER).acquire(Spec(accelerator="A100-80GB:2"), "reasons", 1, 120, print)
    (job,) = cluster.items("jobs")
    pod = job["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    lease.close(print)
    for accelerator in ("H100", "A100:8"):
        found = fails(sky.Kubernetes(template=USER), Spec(accelerator=accelerator))
        assert isinstance(found.error, NoOffer)
        assert "3 nodes test.large with 2 NVIDIA-A100-SXM4-80GB: has 2 x" in found.said


def test_an_image_that_cannot_be_pulled_is_named(cluster: Cluster) -> None:
    found = fails(sky.Kubernetes(template=USER, image="missing.example.org/none:1"))
    assert "missing.example.org/none:1 cannot be pulled" in found.said


def test_a_quota_says_what_it_leaves(cluster: Cluster) -> None:
    cluster.kubectl("create", "namespace", "small", check=False)
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q", "namespace": "small"},
        "spec": {"hard": {"limits.cpu": "1"}},
    }
    cluster.kubectl("apply", "-f", "-", data=json.dumps(quota))
    found = fails(sky.Kubernetes(namespace="small", template=USER), Spec(vcpus=4))
    assert "exceeded quota: q" in found.said


def test_pods_start_where_pod_security_is_restricted_and_what_breaks_it_is_told(cluster: Cluster) -> None:
    cluster.kubectl("create", "namespace", "strict", check=False)
    cluster.kubectl("label", "--overwrite", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
    provider = sky.Kubernetes(namespace="strict", template=USER)
    lease = provider.acquire(Spec(), "reasons", 1, 120, print)
    lease.close(print)
    found = fails(sky.Kubernetes(namespace="strict", template={"spec": {"hostNetwork": True}}))
    assert isinstance(found.error, BootstrapError)
    assert "hostNetwork" in str(found.error)
    assert "template=" in str(found.error)


def test_missing_rights_are_named_with_the_role_to_paste(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.kubectl("create", "namespace", "closed", check=False)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]
    monkeypatch.setenv("KUBECONFIG", str(cluster.user("alice", "closed", rules)))
    error = fails(sky.Kubernetes()).error
    assert isinstance(error, PermissionDenied)
    assert "create jobs" in str(error)
    assert "create secrets" in str(error)
    assert "get pods" not in str(error).partition("Whoever")[0]
    assert "kind: Role" in str(error)


def test_the_role_of_the_message_is_enough(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.kubectl("create", "namespace", "open", check=False)
    rules = [{"apiGroups": [group], "resources": [resource], "verbs": [verb]} for verb, group, resource in rights()]
    monkeypatch.setenv("KUBECONFIG", str(cluster.user("bob", "open", rules)))
    provider = sky.Kubernetes(template=USER)
    assert [offer.name for offer in provider.offers(Spec(), 1)] == [
        "pods in the namespace open (its nodes may not be listed)"
    ]
    lease = provider.acquire(Spec(), "reasons", 1, 120, print)
    assert [item.pool for item in provider.find()] == ["reasons"]
    lease.close(print)


def test_sky_doctor_looks_at_the_namespace_that_it_is_given(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    before = cluster.items("jobs")
    assert main(["doctor", "--kubernetes", "--context", "test", "--namespace", "default"]) == 0
    assert "would take a pool's Job" in capsys.readouterr().out
    assert main(["doctor", "--kubernetes", "--namespace", "nowhere"]) == 1
    assert "there is no namespace nowhere" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["doctor", "--namespace", "default"])
    assert cluster.items("jobs") == before


def test_an_expired_login_says_so(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(re.sub("token: .*", "token: expired", cluster.config().read_text()))
    monkeypatch.setenv("KUBECONFIG", str(config))
    assert "Log in again" in str(fails(sky.Kubernetes()).error)


def test_a_context_that_does_not_exist_is_answered_with_those_that_do(cluster: Cluster) -> None:
    error = fails(sky.Kubernetes(context="nowhere", namespace="default")).error
    assert "nowhere" in str(error)
    assert "These exist: test" in str(error)


def test_offers_are_the_nodes_with_their_gpus(cluster: Cluster) -> None:
    (offer,) = sky.Kubernetes().offers(Spec(), 1)
    assert offer.name == "3 nodes test.large with 2 NVIDIA-A100-SXM4-80GB"
    assert offer.vcpus == 8
