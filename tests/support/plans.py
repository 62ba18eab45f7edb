"""A plan of a pool for tests that decide and do nothing: no sockets, no certificates, no files."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from skyward.api.spec import Ranks
from skyward.client.settings import PoolSettings

__all__ = ["plan_of_two"]


def plan_of_two(**given: Any) -> PoolSettings:
    """Two nodes of one slot each on other machines; what is not given is None."""
    known: dict[str, Any] = dict.fromkeys((field.name for field in fields(PoolSettings)), None)
    known |= {"pool": "pool", "nodes": 2, "slots": 1, "gang": False, "local": False, "lease": 60.0, "directory": ""}
    known |= {
        "setup": lambda node, abouts, ports: ({"info": f"info {node}"}, [b"hook"]),
        "listening": lambda: True,
        "ranks": lambda abouts: Ranks([1] * len(abouts)),
        "refusal": lambda node, about: None,
    }
    return PoolSettings(**{field.name: (known | given)[field.name] for field in fields(PoolSettings)})
