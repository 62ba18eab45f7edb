"""What pods wait for and how they ended, read from what Kubernetes says."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.accelerators import Accelerator
from skyward.errors import NoOffer
from skyward.providers.kubernetes.states import PodState, counted, fitting, last_event, node_kinds, parse


def pod(status: dict[str, Any], **metadata: Any) -> PodState:
    labels = {"skyward/pool": "p", "batch.kubernetes.io/job-completion-index": "3"}
    item = {"kind": "Pod", "metadata": {"name": "skyward-p-3-abcde", "labels": labels, **metadata}, "spec": {}}
    _, (found,) = parse([{**item, "status": status}])
    return found


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    container = {"name": "skyward", "image": "img", "state": {"waiting": {"reason": reason, "message": message}}}
    return {"phase": "Pending", "containerStatuses": [container]}


def ended(**terminated: Any) -> dict[str, Any]:
    return {"phase": "Failed", "containerStatuses": [{"name": "skyward", "state": {"terminated": terminated}}]}


def test_a_pod_runs_once_its_container_does_and_nobody_ends_it() -> None:
    runs = {
        "phase": "Running",
        "podIP": "10.0.0.3",
        "containerStatuses": [{"name": "skyward", "state": {"running": {}}}],
    }
    assert pod(runs).runs
    assert (pod(runs).index, pod(runs).address) == (3, "10.0.0.3")
    assert not pod(runs, deletionTimestamp="now").runs
    assert not pod({"phase": "Running", "containerStatuses": [{"name": "sidecar", "state": {"running": {}}}]}).runs


def test_the_scheduler_is_quoted() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    assert pod({"phase": "Pending", "conditions": [condition]}).waits == "no node has room: 0/3 nodes"


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff"])
def test_an_image_that_is_not_pulled_may_still_come(reason: str) -> None:
    found = pod(waiting(reason, "denied"))
    assert "img cannot be pulled: denied" in found.waits
    assert found.unpulled
    assert not found.hopeless


@pytest.mark.parametrize("reason", ["InvalidImageName", "CreateContainerConfigError"])
def test_what_will_never_run_is_known(reason: str) -> None:
    assert pod(waiting(reason)).hopeless


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (ended(exitCode=137, reason="OOMKilled"), "ran out of memory"),
        (ended(exitCode=1, reason="Error"), "ended with code 1"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "Evicted, low on memory"),
        ({"phase": "Succeeded"}, "has ended"),
        (
            {
                "phase": "Failed",
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "m"}
                ],
            },
            "taken away (EvictionByEvictionAPI: m)",
        ),
        ({"phase": "Running"}, ""),
    ],
)
def test_the_end_of_a_pod_has_its_reason(status: dict[str, Any], words: str) -> None:
    assert words in pod(status).ended
    assert bool(pod(status).ended) == bool(words)


def test_a_job_that_is_over_says_why() -> None:
    def job(**condition: str) -> str:
        status = {"conditions": [{"status": "True", **condition}]}
        metadata = {"name": "j", "uid": "u", "annotations": {"skyward/expires": "12"}}
        (found,), _ = parse([{"kind": "Job", "metadata": metadata, "spec": {"completions": 2}, "status": status}])
        assert (found.expires, found.count) == (12.0, 2)
        return found.over

    assert "ttl" in job(type="Failed", reason="DeadlineExceeded")
    assert "too often" in job(type="Failed", reason="FailedIndexes")
    assert job(type="Complete", reason="CompletionsReached")
    assert not job(type="Suspended", reason="JobSuspended")


def test_the_last_word_of_events_counts() -> None:
    events = [
        {"reason": "FailedCreate", "message": "exceeded quota", "lastTimestamp": "2026-01-02T00:00:00Z"},
        {"reason": "FailedCreate", "message": "older", "lastTimestamp": "2026-01-01T00:00:00Z"},
        {"reason": "SuccessfulCreate", "message": "later", "lastTimestamp": "2026-01-03T00:00:00Z"},
    ]
    assert last_event(events, "FailedCreate") == "exceeded quota"
    assert (
        last_event([{"type": "Warning", "reason": "FailedMount", "message": "no volume"}]) == "FailedMount: no volume"
    )


def node(gpus: str, type: str = "g5.xlarge", labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    named = {"nvidia.com/gpu.product": "NVIDIA-A10G"} if labels is None else labels
    room = {"cpu": "3920m", "memory": "16Gi", "nvidia.com/gpu": gpus}
    labels = {"node.kubernetes.io/instance-type": type, **named}
    return {"metadata": {"labels": labels}, "spec": spec, "status": {"allocatable": room}}


def test_nodes_are_counted_by_what_they_have() -> None:
    nodes = [node("1"), node("1"), node("0", "m5"), node("1", unschedulable=True), node("1", "none", {})]
    found = node_kinds(nodes, "nvidia.com/gpu", {})
    assert [counted(kind, count) for kind, count in found.items()] == [
        "2 nodes g5.xlarge with 1 NVIDIA-A10G",
        "1 node m5",
        "1 node none with 1 GPUs of an unknown model",
    ]
    assert {(kind.vcpus, kind.memory_gb) for kind in found} == {(3.92, 17.2)}
    assert node_kinds(nodes, "nvidia.com/gpu", {"node.kubernetes.io/instance-type": "m5"}).total() == 1


LABELS = {
    "NVIDIA-A100-SXM4-80GB": "nvidia.com/gpu.product",
    "AMD_Instinct_MI300X_OAM": "amd.com/gpu.product-name",
    "nvidia-h100-80gb": "cloud.google.com/gke-accelerator",
    "nvidia-tesla-v100": "k8s.amazonaws.com/accelerator",
    "l40s": "karpenter.k8s.aws/instance-gpu-name",
}


@pytest.mark.parametrize(("wanted", "product"), [*zip(("A100", "MI300X", "H100", "V100", "L40S"), LABELS, strict=True)])
def test_an_accelerator_is_found_by_the_labels_that_name_models(wanted: str, product: str) -> None:
    nodes = [node("8", labels={label: name}) for name, label in LABELS.items()]
    found, *rest = fitting(node_kinds(nodes, "nvidia.com/gpu", {}), Accelerator(wanted, count=8), "c")
    assert (found.label, found.product) == (LABELS[product], product)
    assert not rest


def test_of_several_variants_the_one_of_most_nodes_is_taken_and_the_memory_counts() -> None:
    names = ["NVIDIA-A100-SXM4-40GB", *["NVIDIA-A100-SXM4-80GB"] * 2]
    kinds = node_kinds([node("8", labels={"nvidia.com/gpu.product": name}) for name in names], "nvidia.com/gpu", {})
    assert fitting(kinds, Accelerator("A100"), "c")[0].product == names[1]
    assert [kind.product for kind in fitting(kinds, Accelerator("A100", "40GB"), "c")] == names[:1]


def test_an_accelerator_that_no_node_has_is_refused_with_what_they_have() -> None:
    kinds = node_kinds([node("1"), node("1"), node("0", "m5")], "nvidia.com/gpu", {})
    with pytest.raises(NoOffer) as caught:
        fitting(kinds, Accelerator("H100"), "test")
    assert "the cluster test has nothing for 1 x H100" in str(caught.value)
    assert "2 nodes g5.xlarge with 1 NVIDIA-A10G: has 1 x NVIDIA-A10G, and that is no H100" in str(caught.value)
    assert "node_selector=" in str(caught.value)
    with pytest.raises(NoOffer, match="has 1 x NVIDIA-A10G"):
        fitting(kinds, Accelerator("A10G", count=4), "test")


def test_nodes_that_do_not_say_what_they_have_may_have_it_and_so_may_those_that_come() -> None:
    unlabelled = node_kinds([node("1"), node("1", "none", {})], "nvidia.com/gpu", {})
    assert fitting(unlabelled, Accelerator("H100"), "c")[0].label == ""
    assert fitting(node_kinds([node("0", "m5")], "nvidia.com/gpu", {}), Accelerator("H100"), "c")[0].label == ""
    assert fitting(node_kinds([], "nvidia.com/gpu", {}), Accelerator("H100"), "c") == []
