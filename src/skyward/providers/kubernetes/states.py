"""Jobs and pods as Kubernetes describes them, read into records: what they wait for and how they ended, in words.

A pure reading: no process, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from skyward.providers.kubernetes.manifests import EXPIRES, OWNER, POOL
from skyward.setup.pods import CONTAINER

__all__ = ["JobState", "PodState", "node_offers", "parse", "refused_pods", "story"]

_INDEX = "batch.kubernetes.io/job-completion-index"
# What will not change by waiting, and what can be done.
_HOPELESS = {
    "InvalidImageName": "the name of its image is wrong. Give sky.Kubernetes(image=...) another",
    "ErrImageNeverPull": "its image is not there, and may not be pulled",
    "CreateContainerConfigError": "its container cannot be made as it is described",
    "CreateContainerError": "its container cannot be made",
    "RunContainerError": "its container cannot be started",
}
_NOT_PULLED = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
_ENDED = {
    "OOMKilled": "it ran out of memory; ask for more with memory_gb=",
    "DeadlineExceeded": "its time was over",
    "StartError": "its container could not be started: the image needs python3",
    "ContainerCannotRun": "its container could not be started: the image needs python3",
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
    runs: bool = False
    """Whether its container runs, and nobody has told it to end."""
    ending: bool = False
    waits: str = ""
    """What it waits for, as far as it says."""
    hopeless: str = ""
    """Why it will never run."""
    unpulled: str = ""
    """Why its image is not pulled; which may pass."""
    ended: str = ""
    """What became of it."""

    @property
    def over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True)
class JobState:
    """The Job of a pool."""

    name: str
    uid: str
    pool: str
    owner: str
    expires: float | None
    count: int
    suspended: bool
    succeeded: int
    over: str = ""
    """Why it is over."""


def parse(items: Iterable[Mapping[str, Any]]) -> tuple[list[JobState], list[PodState]]:
    """The Jobs and the pods among objects; pods in the order of their numbers."""
    jobs: list[JobState] = []
    pods: list[PodState] = []
    for item in items:
        if item.get("kind") == "Job":
            jobs.append(_job(item))
        elif item.get("kind") == "Pod":
            pods.append(_pod(item))
    return jobs, sorted(pods, key=lambda pod: (pod.index, pod.name))


def _job(item: Mapping[str, Any]) -> JobState:
    metadata, spec, status = item["metadata"], item["spec"], item.get("status", {})
    notes, labels = metadata.get("annotations", {}), metadata.get("labels", {})
    over = next((c for c in status.get("conditions", []) if c["type"] in ("Failed", "Complete") and _holds(c)), None)
    expires = str(notes.get(EXPIRES, ""))
    return JobState(
        metadata["name"],
        metadata["uid"],
        str(notes.get(POOL) or labels.get(POOL, "")),
        str(notes.get(OWNER, "")),
        float(expires) if expires.isdigit() else None,
        int(spec.get("completions", 0)),
        bool(spec.get("suspend")),
        int(status.get("succeeded", 0)),
        "" if over is None else _why_over(over),
    )


def _why_over(condition: Mapping[str, Any]) -> str:
    match condition.get("reason", ""):
        case "DeadlineExceeded":
            return "its time is over: it is as long as the pool's ttl"
        case "BackoffLimitExceeded" | "FailedIndexes" | "MaxFailedIndexesExceeded":
            return "its pods have failed too often"
        case _ if condition["type"] == "Complete":
            return "all of its pods have ended"
        case reason:
            return f"{reason}: {condition.get('message', '')}"


def _pod(item: Mapping[str, Any]) -> PodState:
    metadata, spec, status = item["metadata"], item["spec"], item.get("status", {})
    labels = metadata.get("labels", {})
    number = str(metadata.get("annotations", {}).get(_INDEX) or labels.get(_INDEX, ""))
    phase, ending = status.get("phase", "Pending"), "deletionTimestamp" in metadata
    nothing: dict[str, Any] = {}
    own = next((c for c in status.get("containerStatuses", []) if c["name"] == CONTAINER), nothing)
    waits, hopeless, unpulled = _waiting(spec, status) if phase == "Pending" else ("", "", "")
    return PodState(
        metadata["name"],
        str(labels.get(POOL, "")),
        int(number) if number.isdigit() else 0,
        phase,
        spec.get("nodeName", ""),
        status.get("podIP", ""),
        phase == "Running" and "running" in own.get("state", {}) and not ending,
        ending,
        waits,
        hopeless,
        unpulled,
        _why_ended(metadata["name"], status, own, ending, phase),
    )


def _waiting(spec: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str, str, str]:
    """What a pending pod waits for; why it will never run; why its image is not there."""
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and not _holds(condition):
            if condition.get("reason") == "SchedulingGated":
                return "a scheduling gate of the cluster holds it", "", ""
            return f"no node has room: {condition.get('message', 'the scheduler does not say why')}", "", ""
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting: Mapping[str, str] = container.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _NOT_PULLED:
            text = f"the image {container.get('image', '')} cannot be pulled: {message or reason}"
            return text, "", text
        if reason in _HOPELESS:
            return reason, f"{_HOPELESS[reason]} ({message or reason})", ""
        if reason == "CrashLoopBackOff":
            return "a container of it ends again and again", "", ""
    if spec.get("nodeName"):
        return f"node {spec['nodeName']} pulls its image and prepares its volumes", "", ""
    return "the scheduler has not looked at it yet", "", ""


def _why_ended(name: str, status: Mapping[str, Any], container: Mapping[str, Any], ending: bool, phase: str) -> str:
    """Why a pod is not the pool's any more; empty while it is."""
    if not ending and phase not in ("Succeeded", "Failed"):
        return ""
    for condition in status.get("conditions", []):
        if condition["type"] == "DisruptionTarget" and _holds(condition):
            return f"pod {name} was taken away ({condition.get('reason', '')}: {condition.get('message', '')})"
    if status.get("reason"):
        return f"pod {name} ended: {status['reason']}, {status.get('message', '')}".rstrip(", ")
    over: Mapping[str, Any] = container.get("state", {}).get("terminated", {})
    reason = str(over.get("reason", ""))
    if reason in _ENDED:
        return f"pod {name} ended: {_ENDED[reason]}"
    if over and over.get("exitCode") not in (0, 143):
        return f"the first process of pod {name} ended with code {over.get('exitCode')}"
    return f"pod {name} was deleted" if ending else f"pod {name} has ended"


def refused_pods(events: Iterable[Mapping[str, Any]]) -> str:
    """Why the cluster does not even make pods of a Job: what it said last."""
    found = [event for event in events if event.get("reason") in ("FailedCreate", "Suspended", "Pending")]
    last = max(found, key=_moment, default=None)
    return "" if last is None else str(last.get("message", ""))


def story(events: Iterable[Mapping[str, Any]]) -> str:
    """The last warning of a pod, such as a volume that cannot be mounted."""
    last = max((event for event in events if event.get("type") == "Warning"), key=_moment, default=None)
    return "" if last is None else f"{last.get('reason', '')}: {last.get('message', '')}"


def _moment(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")


def _holds(condition: Mapping[str, Any]) -> bool:
    return condition.get("status") == "True"


def node_offers(nodes: Sequence[Mapping[str, Any]], gpus: str) -> list[tuple[str, float, float]]:
    """Kinds of nodes, as "4 nodes g5.xlarge with 1 NVIDIA-A10G", with CPUs and GB of memory; those that take no pods
    are left out."""
    kinds: dict[tuple[str, float, float, str], int] = {}
    for node in nodes:
        if node.get("spec", {}).get("unschedulable"):
            continue
        labels: Mapping[str, str] = node["metadata"].get("labels", {})
        room = cast("Mapping[str, str]", node.get("status", {}).get("allocatable", {}))
        type = labels.get("node.kubernetes.io/instance-type", "")
        product = labels.get("nvidia.com/gpu.product") or labels.get("cloud.google.com/gke-accelerator") or gpus
        count = room.get(gpus, "0")
        having = f"{count} {product}" if count not in ("", "0") else ""
        key = (type, _quantity(room.get("cpu", "0")), round(_quantity(room.get("memory", "0")) / 1e9, 1), having)
        kinds[key] = kinds.get(key, 0) + 1
    found: list[tuple[str, float, float]] = []
    for (type, cpus, memory, having), count in sorted(kinds.items(), key=lambda item: (not item[0][3], item[0])):
        words = [f"{count} node{'' if count == 1 else 's'}", type, f"with {having}" if having else ""]
        found.append((" ".join(filter(None, words)), cpus, memory))
    return found


_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _quantity(text: str) -> float:
    """A number as Kubernetes writes it: "3920m", "16Gi"."""
    digits = text.rstrip("mkMGTPEi")
    try:
        return float(digits) * _UNITS.get(text[len(digits) :], 1.0)
    except ValueError:
        return 0.0
