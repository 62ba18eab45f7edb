"""Kubernetes' own schemas of the objects that the docs show, and a check against them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

__all__ = ["VERSIONS", "documents", "problems"]

VERSIONS = ("1.27", "1.29", "1.37")
"""The oldest, the first whose Jobs count failures of each node, and the newest."""


def documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a manifest."""
    return [item for item in yaml.safe_load_all(path.read_text()) if item is not None]


def problems(item: dict[str, Any], version: str = VERSIONS[-1]) -> list[str]:
    """What the schema of a version finds wrong with an object: fields that do not exist, types, what is missing."""
    schema = json.loads(Path(__file__).with_name(f"schema-{version}.json").read_text())
    name = schema["kinds"][f"{item['apiVersion']} {item['kind']}"]
    validator = Draft202012Validator({"$defs": schema["$defs"], "$ref": f"#/$defs/{name}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(item)]
