"""Pods of a Kubernetes cluster: one Indexed Job for a pool, reached by `kubectl exec`, and its Secret."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from skyward.api.image import check_number
from skyward.api.provider import Availability, Leftover, Offer, Provider, Report
from skyward.api.shell import Access
from skyward.api.spec import Spec
from skyward.api.usage_errors import corrects
from skyward.errors import InvalidArgument
from skyward.machines.ledger import Ledger, given_back
from skyward.node import join_notice
from skyward.node import pod as pod_program
from skyward.providers.kubernetes.lease import PodLease, end, listed
from skyward.providers.kubernetes.manifests import EXPIRES, OWNER, QUEUE, job, rights, role, secret
from skyward.providers.kubernetes.states import NodeKind, counted, fitting, node_kinds
from skyward.setup.kubectl import Forbidden, Kubectl, KubernetesRefused, in_pod

__all__ = ["Kubernetes", "may_execute", "minor_version"]

_NEWEST = 1000
_SETTINGS = {
    "node_selector": (dict, '{"disk": "ssd"}'),
    "tolerations": (list, '[{"key": "gpu", "operator": "Exists"}]'),
    "template": (dict, '{"spec": {"serviceAccountName": "trainer"}}, or the path of a YAML file'),
}
_NOT_REACHED = (
    "Pods connect to this program, because `kubectl exec` is not allowed: allow it (create pods/exec), or run the "
    "program in a pod of the cluster."
)


@corrects(
    dict.fromkeys(("nodes", "accelerator"), '`sky.ComputePool(provider=sky.Kubernetes(), nodes=4, accelerator="A100")`')
    | dict.fromkeys(("cpu", "memory", "resources"), "`sky.ComputePool(vcpus=..., memory_gb=...)`")
    | dict.fromkeys(("volumes", "service_account", "labels", "annotations"), "`template={...}`")
    | dict.fromkeys(("kubeconfig", "config"), "the variable KUBECONFIG, and `context=`")
    | {"timeout": "`sky.ComputePool(provision_timeout=seconds)`"}
)
@dataclass(frozen=True, repr=False)
class Kubernetes(Provider):
    """Pods of a Kubernetes cluster, as one Job; needs only the program kubectl, logged in.

    Args:
        context: which of kubectl's contexts. Default: the current one, or the cluster in which this program runs.
        namespace: where the Job is made. Default: the context's own.
        image: the container image of pods, with a python3; what calls need comes with the pool's `image=`. Default:
            python:3.x-slim, with the version of this program's Python.
        gpus: what the cluster calls its GPUs. Default: "nvidia.com/gpu".
        node_selector: labels that nodes must have, {"cloud.google.com/gke-spot": "true"}.
        tolerations: taints that pods tolerate, as Kubernetes writes them. Default: that of the GPUs, if the pool has
            an accelerator.
        queue: the queue of Kueue in which the Job waits. Default: none.
        template: a Job or a Pod, or the path of a YAML file with one, of which everything is added: volumes, service
            account, topology. Its first container is the node.
        lease: how many seconds pods continue without hearing from us. Default: 900.
    """

    context: str | None = None
    namespace: str | None = None
    image: str | None = None
    gpus: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] | str | None = None
    tolerations: Sequence[Mapping[str, Any]] | str | None = None
    queue: str | None = None
    template: Mapping[str, Any] | str | os.PathLike[str] | None = None
    lease: float = 900.0

    def __post_init__(self) -> None:
        for name in ("context", "namespace", "image", "gpus", "queue"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value or not value.isprintable()):
                raise InvalidArgument(f"{name}={value!r}: a name is expected, like {name}='...'.")
        if self.namespace is not None:
            Kubectl(self.namespace, self.context)
        check_number("lease", self.lease, whole=False)
        for name in ("node_selector", "tolerations", "template"):
            object.__setattr__(self, name, _frozen(name, getattr(self, name)))

    @property
    def access(self) -> Access:
        return Access(lease=self.lease, ssh_timeout=120.0, notices=join_notice.wait, detaches=True)

    @property
    def rented(self) -> bool:
        return True

    @property
    def elastic(self) -> bool:
        return True

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        """Kinds of nodes, if this user may list them. Creates nothing."""
        kubectl = self._kubectl()
        kinds = self._kinds(kubectl)
        if kinds is None:
            return [Offer(f"pods in the namespace {kubectl.namespace} (its nodes may not be listed)")]
        fit = fitting(kinds, spec.accelerator, kubectl.where) if spec.accelerator else kinds
        found = [Offer(counted(kind, kinds[kind]), 0.0, kind.vcpus, kind.memory_gb) for kind in fit]
        return found or [Offer("no such nodes yet")]

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        return [Availability("pods wait for room") for _ in offers]

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> PodLease:
        kubectl = self._kubectl()
        executes = may_execute(kubectl)
        joins = not executes or in_pod()
        expires = time.time() + spec.ttl
        notes = {OWNER: _user(kubectl), EXPIRES: f"{expires:.0f}"}
        site, minor = self._resolved(kubectl, spec), minor_version(kubectl)
        made = job(site, spec, pool, count, joins, minor, notes)
        place = {"context": kubectl.context, "namespace": kubectl.namespace}
        ledger = Ledger.start(pool, {"provider": self.name, "expires": expires, **place})
        lease = PodLease(self, pool, ledger, kubectl, executes)
        try:
            file, content = "pod.py", Path(pod_program.__file__).read_text()
            if joins:
                from skyward.setup.joined.arrivals import join_file, open_arrivals

                hint, ttl = _NOT_REACHED, spec.ttl
                lease.arrivals = open_arrivals(pool, ttl=ttl, lease=self.lease, interchangeable=True, hint=hint)
                file, content = "join.py", join_file(lease.arrivals.text)
            report("asking Kubernetes for pods")
            there: dict[str, Any] = {}

            def create() -> str:
                there.update(kubectl.create("making the Job", made)[0])
                return there["metadata"]["uid"]

            uid = ledger.create("job", create, name=made["metadata"]["name"])
            kubectl.create("making the Secret", secret(pool, uid, file, content))
            lease.ends_at = time.time() + made["spec"]["activeDeadlineSeconds"]
            if QUEUE not in there["metadata"].get("labels", {}):  # a template or the namespace may name one, too
                lease.resume()
            lease.machines = tuple(lease.wait(count, timeout, report, spec.min_nodes))
            return lease
        except BaseException:
            lease.close(lambda text: None)
            raise

    def rehearse(self) -> None:
        """An error if the cluster would not take a pool's Job; nothing is made."""
        kubectl, spec = self._kubectl(), Spec()
        made = job(self._resolved(kubectl, spec), spec, "doctor", 1, False, minor_version(kubectl), {})
        kubectl.create("asking whether a Job would be accepted", made, dry=True)

    def give_back(self, pool: str, report: Report) -> object:
        with given_back(pool) as ledger:
            here = self if ledger is None else self.reopened(ledger.history.metadata)
            return end(here._kubectl(), pool, ledger, report)

    def find(self) -> list[Leftover]:
        kubectl = self._kubectl()
        jobs, pods = listed(kubectl)
        me = _user(kubectl) if jobs else ""
        found: list[Leftover] = []
        for known in jobs:
            other = f"it was made by {known.owner}; `kubectl delete job {known.name}` would end it"
            foreign = other if known.owner and me and known.owner != me else ""
            ours = [pod for pod in pods if pod.name.startswith(f"{known.name}-") and not pod.over]
            items = [(pod.name, "machine", f"Job {known.name}, {pod.phase.lower()}") for pod in ours]
            for id, kind, detail in items or [(known.name, "job", "without pods")]:
                found.append(Leftover(known.pool, id, kind, detail, expires=known.expires, foreign=foreign))
        return found

    def reopened(self, metadata: Mapping[str, Any]) -> Kubernetes:
        if "namespace" not in metadata:
            return self
        there = Kubectl(metadata["namespace"], metadata.get("context"))
        return replace(self, context=there.context, namespace=there.namespace)

    def _kubectl(self) -> Kubectl:
        return Kubectl.find(self.context, self.namespace)

    def _resolved(self, kubectl: Kubectl, spec: Spec) -> Kubernetes:
        """With what was left open, and the content of files."""
        usual = [{"key": self.gpus, "operator": "Exists", "effect": "NoSchedule"}] if spec.accelerator else []
        tolerations = usual if self.tolerations is None else self.tolerations
        selector, kinds = self._selector(), self._kinds(kubectl) if spec.accelerator else None
        for best in fitting(kinds, spec.accelerator, kubectl.where)[:1] if spec.accelerator and kinds else ():
            selector |= {best.label: best.product} if best.label else {}  # so that all nodes are alike
        image = self.image or f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
        template = self._template(kubectl)
        return replace(self, image=image, node_selector=selector, tolerations=tolerations, template=template)

    def _selector(self) -> dict[str, str]:
        return json.loads(cast(str, self.node_selector or "{}"))

    def _kinds(self, kubectl: Kubectl) -> Counter[NodeKind] | None:
        """Kinds of nodes that pods may be on; None if this user may not list them."""
        try:
            return node_kinds(kubectl.read("listing nodes", "get", "nodes"), self.gpus, self._selector())
        except Forbidden:
            return None

    def _template(self, kubectl: Kubectl) -> Mapping[str, Any] | str:
        path = os.path.expanduser(cast(str, self.template or "{}"))
        if path.startswith("{"):
            return path
        if not os.path.isfile(path):
            raise InvalidArgument(f"template={path!r}: there is no such file.")
        # kubectl reads YAML, so nothing else has to
        said = kubectl.read("reading the template", "create", "--dry-run=client", "--validate=false", "-f", path)
        if len(said) != 1:
            raise InvalidArgument(f"template={path!r} holds {len(said)} objects. A Job or a Pod is expected.")
        return said[0]


def may_execute(kubectl: Kubectl) -> bool:
    """Whether `kubectl exec` is allowed; an error if a pool is not possible at all."""
    missing = _missing_rights(kubectl)
    needed = [f"{verb} {resource}" for verb, resource in missing if resource not in ("pods/exec", "events")]
    if needed:
        place = f"in the namespace {kubectl.namespace} of {kubectl.where}"
        text = f"this user may not do all that a pool needs {place}. Missing: {', '.join(needed)}. Nothing was created."
        advice = f"Whoever runs the cluster can allow it with:\n{role(kubectl.namespace)}"
        raise Forbidden("opening a pool", "Forbidden", f"{text} {advice}", kubectl.where, "permission")
    return ("create", "pods/exec") not in missing


def _missing_rights(kubectl: Kubectl) -> list[tuple[str, str]]:
    """Verbs and resources that `kubectl auth can-i` refuses."""
    wanted = [(verb, group, *resource.split("/")) for verb, group, resource in rights()]
    names = ("verb", "group", "resource", "subresource")
    asked = [{"namespace": kubectl.namespace, **dict(zip(names, right, strict=False))} for right in wanted]
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    reviews = [{**review, "spec": {"resourceAttributes": attributes}} for attributes in asked]
    answers = kubectl.create("asking what is allowed", *reviews)
    pairs = zip(rights(), answers, strict=True)
    return [(verb, resource) for (verb, _, resource), answer in pairs if not answer.get("status", {}).get("allowed")]


def minor_version(kubectl: Kubectl) -> int:
    """A large number if unknown."""
    said = json.loads(kubectl.run("asking for the version", "get", "--raw", "/version"))
    digits = "".join(character for character in str(said.get("minor", "")) if character.isdigit())
    return int(digits) if digits else _NEWEST


def _user(kubectl: Kubectl) -> str:
    """What the cluster calls this user, if it says so."""
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    try:
        (said,) = kubectl.create("asking who this is", review)
    except KubernetesRefused as exc:
        if exc.kind == "credentials" or exc.unanswered:
            raise
        return ""  # before Kubernetes 1.28
    return str(said.get("status", {}).get("userInfo", {}).get("username", ""))


def _frozen(name: str, value: Any) -> str | None:
    """As text, so that the provider is a value: a path's, or JSON."""
    if value is None:
        return None
    if name == "template" and isinstance(value, str | os.PathLike) and str(cast("object", value))[:1] != "{":
        return os.fspath(cast("str | os.PathLike[str]", value))
    kind, example = _SETTINGS[name]
    try:
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    except TypeError as exc:
        raise InvalidArgument(f"{name}={value!r} cannot be written as JSON, as Kubernetes needs it: {exc}.") from None
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    fits = isinstance(found, kind)
    if fits and name == "node_selector":
        fits = all(isinstance(text, str) for text in cast("dict[str, Any]", found).values())
    if not fits:
        raise InvalidArgument(f"{name}={value!r} is not what is expected, like {name}={example}.")
    return text
