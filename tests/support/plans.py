"""A plan of a pool for tests that decide and do nothing: no sockets, no certificates, no files."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from skyward.api.spec import Ranks
from skyward.client.settings import PoolSettings

__all__ = ["StillMachines", "plan_of_two"]


def plan_of_two(**given: Any) -> PoolSettings:
    """Two nodes of one slot each on other machines; what is not given is None."""
    known: dict[str, Any] = dict.fromkeys((field.name for field in fields(PoolSettings)), None)
    known |= {"pool": "pool", "nodes": 2, "slots": 1, "gang": False, "local": False, "lease": 60.0, "directory": ""}
    known |= {"listening": lambda: True}
    return PoolSettings(**{field.name: (known | given)[field.name] for field in fields(PoolSettings)})


class StillMachines:
    """Machines of which one process each is asked for, and that nobody reaches or replaces."""

    def __init__(self, refusal: Callable[[int, Any], Any] = lambda node, about: None) -> None:
        self.refusal = refusal

    def reach(self, node: int) -> socket.socket:
        raise ConnectionError("nobody is there")

    def revive(self, node: int) -> None: ...

    def address(self, node: int) -> tuple[str, int] | None:
        return None

    def ranks(self, greetings: list[dict[str, Any]]) -> Ranks:
        return Ranks([1] * len(greetings))

    def setup(self, node: int, greetings: list[dict[str, Any]], ports: list[int]) -> tuple[dict[str, Any], list[Any]]:
        return {"info": f"info {node}"}, [b"hook"]

    def replace(self, node: int) -> bool:
        return False

    def replacing(self, node: int) -> bool:
        return False

    def inquire(self) -> None: ...
