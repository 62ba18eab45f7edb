"""Jobs and pods as Kubernetes describes them, read into records: what they wait for and how they ended. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from skyward.accelerators import Accelerator
from skyward.api.hardware import Found, Gpu
from skyward.api.matching import compare
from skyward.errors import NoOffer
from skyward.providers.kubernetes.manifests import EXPIRES, OWNER, POOL
from skyward.setup.pods import CONTAINER

__all__ = ["JobState", "PodState", "counted", "fitting", "last_event", "node_kinds", "parse"]

_INDEX = "batch.kubernetes.io/job-completion-index"
_HOPELESS = (  # what will not change by waiting
    *("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError"),
    "RunContainerError",
)
_NOT_PULLED = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
_NO_START = "its container could not be started: the image needs python3"
_OVER = {
    "DeadlineExceeded": "its time is over: it is as long as the pool's ttl",
    **dict.fromkeys(("BackoffLimitExceeded", "FailedIndexes", "MaxFailedIndexesExceeded"), "its pods fail too often"),
}
_OTHERWISE = {"Failed": "{reason}: {message}", "Complete": "all of its pods have ended"}
_SAID = {"reason": "failed", "message": ""}
_ENDED = {
    "OOMKilled": "it ran out of memory; ask for more with memory_gb=",
    **dict.fromkeys(("StartError", "ContainerCannotRun"), _NO_START),
}


@dataclass(frozen=True)
class PodState:
    name: str
    pool: str
    index: int
    phase: str
    node: str = ""
    address: str = ""
    runs: bool = False  # its container does, and nobody has told it to end
    over: bool = False
    leaves: bool = False  # it is over, or told to end
    waits: str = ""  # what it waits for, as far as it says
    hopeless: bool = False  # that will not change by waiting
    unpulled: bool = False  # it waits for its image, which may pass
    ended: str = ""  # what became of it


@dataclass(frozen=True)
class JobState:
    name: str
    pool: str
    owner: str
    expires: float | None
    count: int
    succeeded: int
    over: str = ""  # why it is


def parse(items: Iterable[Mapping[str, Any]]) -> tuple[list[JobState], list[PodState]]:
    """The Jobs and the pods among objects; pods in the order of their numbers."""
    items = list(items)
    pods = [_pod(item) for item in items if item.get("kind") == "Pod"]
    return [_job(i) for i in items if i.get("kind") == "Job"], sorted(pods, key=lambda pod: (pod.index, pod.name))


def _job(item: Mapping[str, Any]) -> JobState:
    metadata, status = item["metadata"], item.get("status", {})
    notes: Mapping[str, str] = metadata.get("annotations", {})
    over = next((c for c in status.get("conditions", []) if c["type"] in ("Failed", "Complete") and _holds(c)), None)
    expires = notes.get(EXPIRES, "")
    return JobState(
        metadata["name"],
        notes.get(POOL) or metadata.get("labels", {}).get(POOL, ""),
        notes.get(OWNER, ""),
        float(expires) if expires.isdigit() else None,
        int(item["spec"].get("completions", 0)),
        int(status.get("succeeded", 0)),
        "" if over is None else _OVER.get(str(over.get("reason", "")), _OTHERWISE[over["type"]].format(**_SAID | over)),
    )


def _pod(item: Mapping[str, Any]) -> PodState:
    metadata, spec, status = item["metadata"], item["spec"], item.get("status", {})
    labels: Mapping[str, str] = metadata.get("labels", {})
    number = str(metadata.get("annotations", {}).get(_INDEX) or labels.get(_INDEX, ""))
    phase, ending, nothing = status.get("phase", "Pending"), "deletionTimestamp" in metadata, dict[str, Any]()
    over = phase in ("Succeeded", "Failed")
    own = next((c for c in status.get("containerStatuses", []) if c["name"] == CONTAINER), nothing)
    waits, reason = _waiting(spec, status) if phase == "Pending" else ("", "")
    return PodState(
        metadata["name"],
        labels.get(POOL, ""),
        int(number) if number.isdigit() else 0,
        phase,
        spec.get("nodeName", ""),
        status.get("podIP", ""),
        phase == "Running" and "running" in own.get("state", {}) and not ending,
        over,
        over or ending,
        waits,
        reason in _HOPELESS,
        reason in _NOT_PULLED,
        _why_ended(f"pod {metadata['name']}", status, own, ending) if over or ending else "",
    )


def _waiting(spec: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str, str]:
    """What a pending pod waits for, in words; the reason of its container, if that is it."""
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and not _holds(condition):
            if condition.get("reason") == "SchedulingGated":
                return "a scheduling gate of the cluster holds it", ""
            return f"no node has room: {condition.get('message', 'the scheduler does not say why')}", ""
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting: Mapping[str, str] = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        message = waiting.get("message") or reason
        if reason in _NOT_PULLED:
            return f"the image {container.get('image', '')} cannot be pulled: {message}", reason
        if reason in _HOPELESS:
            return f"{reason}: {message}", reason
    if spec.get("nodeName"):
        return f"node {spec['nodeName']} pulls its image and prepares its volumes", ""
    return "the scheduler has not looked at it yet", ""


def _why_ended(pod: str, status: Mapping[str, Any], container: Mapping[str, Any], ending: bool) -> str:
    for condition in status.get("conditions", []):
        if condition["type"] == "DisruptionTarget" and _holds(condition):
            return f"{pod} was taken away ({condition.get('reason', '')}: {condition.get('message', '')})"
    if status.get("reason"):
        return f"{pod} ended: {status['reason']}, {status.get('message', '')}".rstrip(", ")
    over: Mapping[str, Any] = container.get("state", {}).get("terminated", {})
    if (reason := str(over.get("reason", ""))) in _ENDED:
        return f"{pod} ended: {_ENDED[reason]}"
    if over and over.get("exitCode") not in (0, 143):
        return f"the first process of {pod} ended with code {over.get('exitCode')}"
    return f"{pod} was deleted" if ending else f"{pod} has ended"


def last_event(events: Iterable[Mapping[str, Any]], *reasons: str) -> str:
    """The newest for one of these reasons; without any, the last warning with its reason."""

    def when(event: Mapping[str, Any]) -> str:
        return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")

    found = [e for e in events if (e.get("reason") in reasons if reasons else e.get("type") == "Warning")]
    last = max(found, key=when, default=None)
    return "" if last is None else f"{'' if reasons else last.get('reason', '') + ': '}{last.get('message', '')}"


def _holds(condition: Mapping[str, Any]) -> bool:
    return condition.get("status") == "True"


# Labels that name the model of a node's GPUs: by GPU feature discovery, AMD's labeller, GKE, EKS and Karpenter.
_PRODUCTS = (
    *("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator"),
    *("k8s.amazonaws.com/accelerator", "karpenter.k8s.aws/instance-gpu-name"),
)
_LATER = "nodes that the cluster only adds when pods wait: name them by sky.Kubernetes(node_selector=...)"


@dataclass(frozen=True)
class NodeKind:
    """Alike: `gpus` of one `product`, by the `label`."""

    type: str
    vcpus: float
    memory_gb: float
    gpus: int = 0
    product: str = ""
    label: str = ""
    gpu_memory: int = 0

    def __str__(self) -> str:
        having = f" with {self.gpus} {self.product or 'GPUs of an unknown model'}" if self.gpus else ""
        return f"{self.type or 'of an unknown type'}{having}"


def node_kinds(nodes: Iterable[Mapping[str, Any]], gpus: str, selector: Mapping[str, str]) -> Counter[NodeKind]:
    """Those that take pods and have these labels, and how many of each."""
    kinds: Counter[NodeKind] = Counter()
    for node in nodes:
        labels: Mapping[str, str] = node["metadata"].get("labels", {})
        if node.get("spec", {}).get("unschedulable") or not selector.items() <= labels.items():
            continue
        room: Mapping[str, str] = node.get("status", {}).get("allocatable", {})
        size = _quantity(room.get("cpu", "0")), round(_quantity(room.get("memory", "0")) / 1e9, 1)
        count = int(_quantity(room.get(gpus, "0")))
        label = next((name for name in _PRODUCTS if name in labels and count), "")
        product, memory = labels.get(label, ""), labels.get("nvidia.com/gpu.memory", "")
        named = re.search(r"(\d+)gb", product.lower())
        mebibytes = int(memory) if memory.isdigit() else int(named[1]) << 10 if named else 0
        having = count, product, label, mebibytes << 20
        kinds[NodeKind(labels.get("node.kubernetes.io/instance-type", ""), *size, *having)] += 1
    return kinds


def fitting(kinds: Counter[NodeKind], accelerator: Accelerator, where: str) -> list[NodeKind]:
    """Those that have it, the most frequent first; else those that do not say."""
    known = {kind: compare(accelerator, _found(kind)) for kind in kinds if kind.gpus}
    found = [kind for kind, verdict in known.items() if not verdict.refusal]
    if known and not found and all(kind.product for kind in known):
        has = [f"{counted(kind, kinds[kind])}: {verdict.refusal}" for kind, verdict in known.items()]
        raise NoOffer(accelerator.described(), f"the cluster {where}", [*has, _LATER])
    unsaid = [kind for kind in kinds if not kind.label]
    return sorted(found, key=lambda kind: (bool(known[kind].doubt), -kinds[kind])) or unsaid


def _found(kind: NodeKind) -> Found:
    return Found(tuple(Gpu(index, "", kind.product, kind.gpu_memory) for index in range(kind.gpus)))


def counted(kind: NodeKind, count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'} {kind}"


_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _quantity(text: str) -> float:
    """As Kubernetes writes it: "3920m", "16Gi"."""
    digits = text.rstrip("mkMGTPEi")
    return float(digits) * _UNITS.get(text[len(digits) :], 1.0) if digits.replace(".", "").isdigit() else 0.0
