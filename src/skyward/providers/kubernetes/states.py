"""Jobs and pods as Kubernetes describes them, read into records: what they wait for and how they ended, in words.

A pure reading: no process, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyward.providers.kubernetes.manifests import EXPIRES, OWNER, POOL
from skyward.setup.pods import CONTAINER

__all__ = ["JobState", "PodState", "last_event", "node_offers", "parse"]

_INDEX = "batch.kubernetes.io/job-completion-index"
_HOPELESS = (  # what will not change by waiting
    *("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError"),
    "RunContainerError",
)
_NOT_PULLED = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
_NO_START = "its container could not be started: the image needs python3"
_ENDED = {
    "OOMKilled": "it ran out of memory; ask for more with memory_gb=",
    **dict.fromkeys(("StartError", "ContainerCannotRun"), _NO_START),
}


@dataclass(frozen=True)
class PodState:
    """A pod of a pool."""

    name: str
    pool: str
    index: int
    phase: str
    node: str = ""
    address: str = ""
    runs: bool = False  # its container does, and nobody has told it to end
    leaves: bool = False  # it is over, or told to end
    waits: str = ""  # what it waits for, as far as it says
    hopeless: bool = False  # that will not change by waiting
    unpulled: bool = False  # it waits for its image, which may pass
    ended: str = ""  # what became of it


@dataclass(frozen=True)
class JobState:
    """The Job of a pool."""

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
        "" if over is None else _why_over(over),
    )


def _why_over(condition: Mapping[str, Any]) -> str:
    match condition.get("reason", ""):
        case "DeadlineExceeded":
            return "its time is over: it is as long as the pool's ttl"
        case "BackoffLimitExceeded" | "FailedIndexes" | "MaxFailedIndexesExceeded":
            return "its pods have failed too often"
        case reason if condition["type"] == "Failed":
            return f"{reason}: {condition.get('message', '')}"
        case _:
            return "all of its pods have ended"


def _pod(item: Mapping[str, Any]) -> PodState:
    metadata, spec, status = item["metadata"], item["spec"], item.get("status", {})
    labels: Mapping[str, str] = metadata.get("labels", {})
    number = str(metadata.get("annotations", {}).get(_INDEX) or labels.get(_INDEX, ""))
    phase, ending, nothing = status.get("phase", "Pending"), "deletionTimestamp" in metadata, dict[str, Any]()
    own = next((c for c in status.get("containerStatuses", []) if c["name"] == CONTAINER), nothing)
    leaves = ending or phase in ("Succeeded", "Failed")
    waits, reason = _waiting(spec, status) if phase == "Pending" else ("", "")
    return PodState(
        metadata["name"],
        labels.get(POOL, ""),
        int(number) if number.isdigit() else 0,
        phase,
        spec.get("nodeName", ""),
        status.get("podIP", ""),
        phase == "Running" and "running" in own.get("state", {}) and not ending,
        leaves,
        waits,
        reason in _HOPELESS,
        reason in _NOT_PULLED,
        _why_ended(f"pod {metadata['name']}", status, own, ending) if leaves else "",
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
    """What was said last for one of these reasons; without any, the last warning with its reason."""

    def when(event: Mapping[str, Any]) -> str:
        return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")

    found = [e for e in events if (e.get("reason") in reasons if reasons else e.get("type") == "Warning")]
    last = max(found, key=when, default=None)
    return "" if last is None else f"{'' if reasons else last.get('reason', '') + ': '}{last.get('message', '')}"


def _holds(condition: Mapping[str, Any]) -> bool:
    return condition.get("status") == "True"


def node_offers(nodes: Sequence[Mapping[str, Any]], gpus: str) -> list[tuple[str, float, float]]:
    """Kinds of nodes that take pods, as "4 nodes g5.xlarge with 1 NVIDIA-A10G", with CPUs and GB of memory."""
    kinds: dict[tuple[str, str, float, float], int] = {}
    for node in nodes:
        if node.get("spec", {}).get("unschedulable"):
            continue
        labels: Mapping[str, str] = node["metadata"].get("labels", {})
        room: Mapping[str, str] = node.get("status", {}).get("allocatable", {})
        product = labels.get("nvidia.com/gpu.product") or labels.get("cloud.google.com/gke-accelerator") or gpus
        having = "" if (count := room.get(gpus, "0")) == "0" else f" with {count} {product}"
        type = labels.get("node.kubernetes.io/instance-type", "")
        key = (having, type, _quantity(room.get("cpu", "0")), round(_quantity(room.get("memory", "0")) / 1e9, 1))
        kinds[key] = kinds.get(key, 0) + 1
    return [
        (f"{count} node{'' if count == 1 else 's'} {type}{having}".rstrip(), cpus, memory)
        for (having, type, cpus, memory), count in sorted(kinds.items(), reverse=True)
    ]


_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _quantity(text: str) -> float:
    """A number as Kubernetes writes it: "3920m", "16Gi"."""
    digits = text.rstrip("mkMGTPEi")
    return float(digits) * _UNITS.get(text[len(digits) :], 1.0) if digits.replace(".", "").isdigit() else 0.0
