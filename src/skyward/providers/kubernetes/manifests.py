"""The Job of a pool and its Secret, as values: names, labels, resources, and what a site adds by a template."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

from skyward.api.spec import Spec
from skyward.errors import InvalidArgument
from skyward.setup.pods import CONTAINER, PROGRAM

__all__ = [
    "EXPIRES",
    "OWNER",
    "POOL",
    "Wish",
    "job",
    "job_name",
    "label",
    "merged",
    "rights",
    "role",
    "secret",
    "selector",
    "sized",
]

POOL, OWNER, EXPIRES = "skyward/pool", "skyward/owner", "skyward/expires"
"""What the things of a pool say of themselves; the pool as a label, the others as annotations."""
_MANAGED = {"app.kubernetes.io/managed-by": "skyward", "app.kubernetes.io/name": "skyward"}
_QUEUE = "kueue.x-k8s.io/queue-name"
_HOME = "/home/skyward"
_GRACE = 30
_KEPT = 300  # seconds for which a finished Job can be looked at
_FAILURES = 10  # of one node, each with a longer pause before the next
_PER_INDEX = 29
"""The minor version of Kubernetes from which on Jobs count failures for each node."""
_LONGEST = 45  # a pod's name is that of the Job, its number and five letters, and at most 63
_ARCHITECTURES = {"x86_64": "amd64", "arm64": "arm64"}
# Lists of a pod whose entries are known by a name; others are put one after the other.
_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort"}


@dataclass(frozen=True)
class Wish:
    """What a pool asks for."""

    pool: str
    owner: str
    expires: float
    count: int
    image: str
    resources: Mapping[str, str]
    labels: Mapping[str, str]
    """Of nodes."""
    tolerations: Sequence[Mapping[str, Any]]
    queue: str | None
    template: Mapping[str, Any]
    joins: bool
    """Whether pods connect to the client, instead of being reached by `kubectl exec`."""
    patience: float
    """How long a pod waits for the client."""


def label(pool: str) -> str:
    """The pool's name as the value of a label."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", pool)[:50].strip("._-")
    return plain if plain == pool else f"{plain or 'pool'}-{_digest(pool)}"


def job_name(pool: str) -> str:
    """The name of the Job and of its Secret."""
    plain = re.sub(r"[^a-z0-9]+", "-", pool.lower()).strip("-")
    short = plain[: _LONGEST - len("skyward--123456")].strip("-") or "pool"
    return f"skyward-{plain}" if plain == pool and short == plain else f"skyward-{short}-{_digest(pool)}"


def selector(pool: str | None = None) -> str:
    """What finds everything of a pool, or of all pools."""
    return f"{POOL}={label(pool)}" if pool is not None else "app.kubernetes.io/managed-by=skyward"


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=3).hexdigest()


def sized(spec: Spec, gpus: str) -> dict[str, str]:
    """What each pod asks for, and may use; nothing that the user did not name."""
    found: dict[str, str] = {}
    if spec.vcpus is not None:
        found["cpu"] = f"{spec.vcpus:g}"
    if spec.memory_gb is not None:
        found["memory"] = f"{math.ceil(spec.memory_gb * 1e9 / (1 << 20))}Mi"
    if spec.accelerator is not None:
        found[gpus] = str(spec.accelerator.count)
    return found


def job(wish: Wish, spec: Spec, minor: int, now: float) -> dict[str, Any]:
    """The Job, suspended: its pods start when their Secret is there. The cluster has the version 1.`minor`."""
    name = job_name(wish.pool)
    labels = {**_MANAGED, POOL: label(wish.pool)}
    annotations = {POOL: wish.pool, OWNER: wish.owner, EXPIRES: f"{wish.expires:.0f}"}
    made: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": dict(labels), "annotations": annotations},
        "spec": {
            "completionMode": "Indexed",
            "completions": wish.count,
            "parallelism": wish.count,
            "suspend": True,
            "activeDeadlineSeconds": max(60, math.ceil(wish.expires - now)),
            "ttlSecondsAfterFinished": _KEPT,
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "template": {
                "metadata": {"labels": dict(labels)},
                "spec": _pod(wish, spec, name),
            },
        },
    }
    if wish.queue is not None:
        made["metadata"]["labels"][_QUEUE] = wish.queue
    if minor >= _PER_INDEX:
        made["spec"] |= {"backoffLimitPerIndex": _FAILURES, "podReplacementPolicy": "Failed"}
    else:
        made["spec"]["backoffLimit"] = _FAILURES * wish.count
    return merged(made, wish.template)


def _pod(wish: Wish, spec: Spec, name: str) -> dict[str, Any]:
    shm: dict[str, Any] = {"medium": "Memory"}
    if spec.memory_gb is not None:
        shm["sizeLimit"] = f"{math.ceil(spec.memory_gb / 2 * 1e9 / (1 << 20))}Mi"
    folder = PROGRAM.rpartition("/")[0]
    if wish.joins:  # the program refuses a file that a group can read, as a Secret's is
        command = ["sh", "-c", f"umask 077; mkdir -p ~ && cp -f {folder}/join.py ~ && exec python3 ~/join.py"]
    else:
        command = ["python3", PROGRAM, "stay", f"{wish.patience:g}", str(_GRACE)]
    labels = dict(wish.labels)
    if spec.architecture is not None:
        labels["kubernetes.io/arch"] = _ARCHITECTURES[spec.architecture]
    container = {
        "name": CONTAINER,
        "image": wish.image,
        "command": command,
        "env": [
            {"name": "HOME", "value": _HOME},
            {"name": "SKYWARD_NOTICE", "value": "/tmp/skyward-notice"},
        ],
        "resources": {"limits": dict(wish.resources)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "program", "mountPath": folder, "readOnly": True},
            {"name": "home", "mountPath": _HOME},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    made: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "program", "secret": {"secretName": name, "defaultMode": 0o440}},
            {"name": "home", "emptyDir": {}},
            {"name": "shm", "emptyDir": shm},
        ],
    }
    if wish.joins:
        made["shareProcessNamespace"] = True  # what takes care of processes whose parents have ended
    if labels:
        made["nodeSelector"] = labels
    if wish.tolerations:
        made["tolerations"] = [dict(item) for item in wish.tolerations]
    return made


def secret(pool: str, uid: str, file: str, content: str) -> dict[str, Any]:
    """The Secret: it goes with its Job."""
    name = job_name(pool)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
    labels = {**_MANAGED, POOL: label(pool)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
        "type": "Opaque",
        "stringData": {file: content},
    }


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A Job with what a template adds: of a Job, or of a Pod alone. Its first container is the node's."""
    kind = more.get("kind")
    if kind not in (None, "Job", "Pod"):
        raise InvalidArgument(f"template={kind!r}: the template of a Job or of a Pod is expected.")
    spec = more.get("spec", {})
    whole = kind == "Job" or (kind is None and isinstance(spec, Mapping) and "template" in spec)
    given = {name: value for name, value in more.items() if name not in ("apiVersion", "kind", "status")}
    if not whole:
        given = {"spec": {"template": given}} if given else {}
    pod = given.get("spec", {}).get("template", {}).get("spec", {})
    containers = pod.get("containers", [])
    if containers and not any(item.get("name") == CONTAINER for item in containers):
        pod["containers"] = [{**containers[0], "name": CONTAINER}, *containers[1:]]
    return _merged(base, given)


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for name, value in more.items():
        old = found.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            found[name] = _merged(cast("dict[str, Any]", old), cast("dict[str, Any]", value))
        elif isinstance(old, list) and isinstance(value, list):
            key = _KEYS.get(name, "name")
            found[name] = _merged_lists(cast("list[Any]", old), cast("list[Any]", value), key)
        else:
            found[name] = value
    return found


def _merged_lists(old: list[Any], new: list[Any], key: str) -> list[Any]:
    """Entries of the same name are one; the rest comes after them."""
    names = [_name(item, key) for item in old]
    found = list(old)
    for item in new:
        if (name := _name(item, key)) is not None and name in names:
            found[names.index(name)] = _merged(found[names.index(name)], item)
        else:
            found.append(item)
    return found


def _name(item: Any, key: str) -> Any:
    return cast("dict[str, Any]", item).get(key) if isinstance(item, dict) else None


# What a user has to be allowed.

_VERBS = {
    ("batch", "jobs"): ("create", "get", "list", "patch", "delete"),
    ("", "secrets"): ("create",),
    ("", "pods"): ("get", "list", "delete"),
    ("", "events"): ("list",),
}
_EXEC = {("", "pods/exec"): ("create", "get")}


def rights(executes: bool = True) -> list[tuple[str, str, str]]:
    """Verbs, groups and resources that a pool needs; with what `kubectl exec` needs."""
    wanted = {**_VERBS, **(_EXEC if executes else {})}
    return [(verb, group, resource) for (group, resource), verbs in wanted.items() for verb in verbs]


def role(namespace: str) -> str:
    """The Role that allows it, and how it is given to somebody."""
    lines = ["apiVersion: rbac.authorization.k8s.io/v1", "kind: Role"]
    lines += [f"metadata: {{name: skyward, namespace: {namespace}}}", "rules:"]
    for (group, resource), verbs in {**_VERBS, **_EXEC}.items():
        lines.append(f"- {{apiGroups: [{json.dumps(group)}], resources: [{resource}], verbs: [{', '.join(verbs)}]}}")
    bind = f"kubectl -n {namespace} create rolebinding skyward --role=skyward --user=NAME"
    return "\n".join([*lines, f"# and then: {bind}"])
