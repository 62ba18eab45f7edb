"""Makes schema-*.json out of the schemas that the package kubernetes-validate carries, which are Kubernetes' own.

pip download --no-deps kubernetes-validate && python -m tests.support.kubernetes.trim kubernetes_validate-*.whl
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

__all__ = ["trimmed"]

_VERSIONS = ("1.27", "1.29", "1.37")
_FILE = "kubernetes_validate/kubernetes-json-schema/v{}.0-local-strict/_definitions.json"
_KINDS = {
    "batch/v1 Job": "io.k8s.api.batch.v1.Job",
    "v1 Pod": "io.k8s.api.core.v1.Pod",
    "v1 Secret": "io.k8s.api.core.v1.Secret",
    "networking.k8s.io/v1 NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
}
_ORIGIN = (
    "Kubernetes {}, api/openapi-spec, as the package kubernetes-validate carries it; Apache License 2.0, "
    "copyright The Kubernetes Authors. Trimmed by trim.py: without descriptions, and only what the kinds need."
)


def trimmed(version: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """What the kinds above need of all definitions, without descriptions."""
    kept: dict[str, Any] = {}
    waiting = list(_KINDS.values())
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept[name] = _plain(definitions[name])
            waiting += [ref.rpartition("/")[2] for ref in _references(kept[name])]
    return {"origin": _ORIGIN.format(version), "kinds": _KINDS, "$defs": dict(sorted(kept.items()))}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    dropped = {name for name in value if name.startswith("x-kubernetes")}
    dropped |= {"description"} if isinstance(value.get("description"), str) else set()
    return {name: _plain(item) for name, item in value.items() if name not in dropped}


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [ref for item in value for ref in _references(item)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + [ref for item in value.values() for ref in _references(item)]


if __name__ == "__main__":
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        for version in _VERSIONS:
            read = json.loads(wheel.read(_FILE.format(version)))
            text = json.dumps(trimmed(version, read.get("$defs") or read["definitions"]), separators=(",", ":"))
            Path(__file__).with_name(f"schema-{version}.json").write_text(
                text.replace("#/definitions/", "#/$defs/") + "\n"
            )
