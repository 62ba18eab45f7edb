"""A pool's Job and Secret, as values: names, labels, resources, and what a site adds by a template."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

from skyward.api.spec import Spec
from skyward.errors import InvalidArgument
from skyward.setup.pods import CONTAINER, PROGRAM

if TYPE_CHECKING:
    from skyward.providers.kubernetes.provider import Kubernetes

__all__ = [
    "EXPIRES",
    "OWNER",
    "POOL",
    "QUEUE",
    "job",
    "job_name",
    "label",
    "rights",
    "role",
    "secret",
    "selector",
    "sized",
]

POOL, OWNER, EXPIRES = "skyward/pool", "skyward/owner", "skyward/expires"
"""The pool is a label, the others are annotations."""
_MANAGED = {"app.kubernetes.io/managed-by": "skyward", "app.kubernetes.io/name": "skyward"}
QUEUE = "kueue.x-k8s.io/queue-name"
_HOME, _SHM = "/home/skyward", "/dev/shm"
_FOLDER = PROGRAM.rpartition("/")[0]
_GRACE = 30
_KEPT = 300  # seconds for which a finished Job can be looked at
_FAILURES = 10  # of one node, each with a longer pause before the next
_PER_INDEX = 29  # the minor version of Kubernetes from which on Jobs count failures for each node
_LONGEST = 45  # a pod's name is that of the Job, its number and five letters, and at most 63
_ARCHITECTURES = {"x86_64": "amd64", "arm64": "arm64"}
# Lists of a pod whose entries are known by something else than a name.
_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort"}
# What a template cannot set: by which argument of the pool it is set instead.
_DECIDED = {
    ("spec", "activeDeadlineSeconds"): "ttl=",
    ("spec", "completions"): "nodes=",
    ("spec", "parallelism"): "nodes=",
    ("spec", "completionMode"): "",
    ("spec", "suspend"): "",
    ("spec", "template", "spec", "restartPolicy"): "",
    ("metadata", "labels", POOL): "name=",
    ("spec", "template", "metadata", "labels", POOL): "name=",
}
_RESTRICTED = {
    "runAsNonRoot": True,
    **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 1000),
    "seccompProfile": {"type": "RuntimeDefault"},
}


def label(pool: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", pool)[:50].strip("._-")
    return plain if plain == pool else f"{plain or 'pool'}-{_digest(pool)}"


def job_name(pool: str) -> str:
    """Also of its Secret."""
    plain = re.sub(r"[^a-z0-9]+", "-", pool.lower()).strip("-")
    short = plain[: _LONGEST - len("skyward--123456")].strip("-") or "pool"
    return f"skyward-{plain}" if plain == pool == short else f"skyward-{short}-{_digest(pool)}"


def selector(pool: str | None = None) -> str:
    return f"{POOL}={label(pool)}" if pool is not None else "app.kubernetes.io/managed-by=skyward"


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=3).hexdigest()


def sized(spec: Spec, gpus: str) -> dict[str, str]:
    """What each pod asks for, and may use; nothing that the user did not name."""
    found = {} if spec.vcpus is None else {"cpu": f"{spec.vcpus:g}"}
    found |= {} if spec.memory_gb is None else {"memory": _mebibytes(spec.memory_gb)}
    return found if spec.accelerator is None else {**found, gpus: str(spec.accelerator.count)}


def _mebibytes(gigabytes: float) -> str:
    return f"{math.ceil(gigabytes * 1e9 / (1 << 20))}Mi"


def job(
    site: Kubernetes, spec: Spec, pool: str, count: int, joins: bool, minor: int, notes: Mapping[str, str]
) -> dict[str, Any]:
    """Suspended: its pods start once their Secret is there. The cluster has version 1.`minor`.

    If it `joins`, its pods connect to the client, instead of being reached by `kubectl exec`.
    """
    name, labels = job_name(pool), {**_MANAGED, POOL: label(pool)}
    taken_away = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    details: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "suspend": True,
        "activeDeadlineSeconds": max(60, math.ceil(spec.ttl)),
        "ttlSecondsAfterFinished": _KEPT,
        "podFailurePolicy": {"rules": [taken_away]},
        "template": {"metadata": {"labels": dict(labels)}, "spec": _pod(site, spec, name, joins)},
    }
    if minor >= _PER_INDEX:
        details |= {"backoffLimitPerIndex": _FAILURES, "podReplacementPolicy": "Failed"}
    else:
        details["backoffLimit"] = _FAILURES * count
    labels |= {} if site.queue is None else {QUEUE: site.queue}
    metadata = {"name": name, "labels": labels, "annotations": {POOL: pool, **notes}}
    base = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": details}
    made = _with_template(base, _value(site.template) or {})
    pod = made["spec"]["template"]["spec"]
    own = next(container for container in pod["containers"] if container["name"] == CONTAINER)
    own["command"] = _command(site, pod["terminationGracePeriodSeconds"], joins)
    return made


def _pod(site: Kubernetes, spec: Spec, name: str, joins: bool) -> dict[str, Any]:
    shm = {"medium": "Memory"} | ({} if spec.memory_gb is None else {"sizeLimit": _mebibytes(spec.memory_gb / 2)})
    labels = {} if spec.architecture is None else {"kubernetes.io/arch": _ARCHITECTURES[spec.architecture]}
    container = {
        "name": CONTAINER,
        "image": site.image,
        "env": [
            {"name": "HOME", "value": _HOME},
            {"name": "USER", "value": "skyward"},  # torch and others ask for the name, which images do not have
            {"name": "SKYWARD_OWN", "value": f"{_HOME} {_SHM}"},
            {"name": "SKYWARD_NOTICE", "value": "/tmp/skyward-notice"},
            {"name": "SKYWARD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "resources": {"limits": sized(spec, site.gpus)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "program", "mountPath": _FOLDER, "readOnly": True},
            {"name": "home", "mountPath": _HOME},
            {"name": "shm", "mountPath": _SHM},
        ],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # what takes care of processes whose parents have ended; node/pod.py does so itself
        "shareProcessNamespace": joins,
        "nodeSelector": labels | (_value(site.node_selector) or {}),
        "tolerations": _value(site.tolerations) or [],
        "securityContext": _RESTRICTED,
        "containers": [container],
        "volumes": [
            {"name": "program", "secret": {"secretName": name, "defaultMode": 0o440}},
            {"name": "home", "emptyDir": {}},
            {"name": "shm", "emptyDir": shm},
        ],
    }


def _command(site: Kubernetes, grace: int, joins: bool) -> list[str]:
    if joins:  # the program refuses a file that a group can read, as a Secret's is
        return ["sh", "-c", f"umask 077; mkdir -p ~ && cp -f {_FOLDER}/join.py ~ && exec python3 ~/join.py"]
    return ["python3", PROGRAM, "stay", f"{site.lease:g}", str(grace)]


def _value(setting: object) -> Any:
    """As it was given: the provider keeps it as JSON."""
    return json.loads(setting) if isinstance(setting, str) else setting


def secret(pool: str, uid: str, file: str, content: str) -> dict[str, Any]:
    name = job_name(pool)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
    metadata = {"name": name, "labels": {**_MANAGED, POOL: label(pool)}, "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {file: content}}


def _with_template(base: dict[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """A Job with what a template adds: of a Job, or of a Pod. Its first container is the node's."""
    kind, spec = template.get("kind"), _mapping(template, "spec")
    if kind not in (None, "Job", "Pod"):
        raise InvalidArgument(f"template={kind!r}: the template of a Job or of a Pod is expected.")
    if unknown := sorted(template.keys() - {"apiVersion", "kind", "metadata", "spec", "status"}):
        raise InvalidArgument(f"template= has {', '.join(unknown)}. A Job or a Pod has metadata and spec.")
    given = {"metadata": _mapping(template, "metadata"), "spec": spec}
    if kind == "Pod" or (kind is None and "template" not in spec):
        given = {"spec": {"template": given}}
    # a file has to have a name; the pool's is another
    given["metadata"] = {k: v for k, v in given.get("metadata", {}).items() if k not in ("name", "namespace")}
    pod = _mapping(_mapping(given["spec"], "template"), "spec")
    if containers := _mappings(pod, "containers"):
        own = next((item for item in containers if item.get("name") == CONTAINER), containers[0])
        if words := [word for word in ("command", "args") if word in own]:
            raise InvalidArgument(
                f"template= has {' and '.join(words)} for the first container, which runs Skyward's own program. "
                "Leave that out; other containers may have it."
            )
        pod["containers"] = [{**item, "name": CONTAINER} if item is own else item for item in containers]
    _check_decided(base, given)
    return _merged(base, given, "")


def _mapping(parent: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = parent.get(name, {})
    if not isinstance(found, dict):
        raise InvalidArgument(f"template= has {name}={found!r}. A mapping is expected.")
    return cast("dict[str, Any]", found)


def _mappings(parent: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found: Any = parent.get(name, [])
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in cast("list[Any]", found)):
        raise InvalidArgument(f"template= has {name}={found!r}. A list of mappings is expected.")
    return cast("list[dict[str, Any]]", found)


def _check_decided(base: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """An error if a template changes what ends the Job, or by what it is found again."""
    for path, instead in _DECIDED.items():
        ours, theirs = base, given
        for name in path[:-1]:
            ours, theirs = ours.get(name, {}), _mapping(theirs, name)
        if (name := path[-1]) in theirs and theirs[name] != ours.get(name):
            advice = f" Use sky.ComputePool({instead}...)." if instead else ""
            raise InvalidArgument(f"template= sets {name} to {theirs[name]!r}; the pool decides that.{advice}")


def _merged(old: Any, new: Any, name: str) -> Any:
    """Merges mappings and joins lists; entries of the same name are one."""
    if isinstance(old, dict) and isinstance(new, dict):
        one, other = cast("dict[str, Any]", old), cast("dict[str, Any]", new)
        return one | {key: _merged(one[key], value, key) if key in one else value for key, value in other.items()}
    if not (isinstance(old, list) and isinstance(new, list)):
        return new
    key, found = _KEYS.get(name, "name"), list(cast("list[Any]", old))
    names = [_name(item, key) for item in found]
    for item in cast("list[Any]", new):
        if (known := _name(item, key)) is not None and known in names:
            found[names.index(known)] = _merged(found[names.index(known)], item, "")
        else:
            found.append(item)
    return found


def _name(item: Any, key: str) -> Any:
    return cast("dict[str, Any]", item).get(key) if isinstance(item, dict) else None


# What a user has to be allowed.

_VERBS = {
    ("batch", "jobs"): "create get list patch delete",
    ("", "secrets"): "create",
    ("", "pods"): "get list delete",
    ("", "events"): "list",
}
_EXEC = {("", "pods/exec"): "create get"}


def rights(executes: bool = True) -> list[tuple[str, str, str]]:
    """Verbs, groups and resources that a pool needs; with those of `kubectl exec`."""
    wanted = _VERBS | (_EXEC if executes else {})
    return [(verb, group, resource) for (group, resource), verbs in wanted.items() for verb in verbs.split()]


def role(namespace: str) -> str:
    """The Role that allows it, and how to grant it."""
    rules = "".join(
        f"- {{apiGroups: [{json.dumps(group)}], resources: [{resource}], verbs: [{', '.join(verbs.split())}]}}\n"
        for (group, resource), verbs in (_VERBS | _EXEC).items()
    )
    head = f"apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\nmetadata: {{name: skyward, namespace: {namespace}}}"
    bind = f"kubectl -n {namespace} create rolebinding skyward --role=skyward --user=NAME"
    return f"{head}\nrules:\n{rules}# and then: {bind}"
