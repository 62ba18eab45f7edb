"""What the engine needs to know about its pool."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skyward import events
from skyward.api.spec import Ranks
from skyward.errors import SkywardError
from skyward.machines.replacement import Machines

__all__ = ["PoolSettings"]


def _welcome(node: int, about: dict[str, Any]) -> SkywardError | None:
    """Any node will do."""


@dataclass(frozen=True)
class PoolSettings:
    pool: str
    nodes: int
    slots: int
    """Concurrent calls per process."""
    reach: Callable[[int], socket.socket]
    setup: Callable[[int, list[dict[str, Any]], list[int]], tuple[dict[str, Any], list[Any]]]
    emit: Callable[[events.Event], None]
    listening: Callable[[], object]
    release: Callable[[Sequence[str]], None]
    gang: bool
    """Whether runners form groups when the pool opens: then losing one means starting all of them again."""
    ranks: Callable[[list[dict[str, Any]]], Ranks]
    local: bool
    """Whether the nodes are on this computer: they end when this process does, and read its files."""
    lease: float
    directory: str
    address: Callable[[int], tuple[str, int] | None]
    revive: Callable[[int], None] | None
    substitutes: Machines | None
    reboots: bool = False
    """Whether machines where nobody listens any more may be booting, and are back by themselves: hosts of the user."""
    refusal: Callable[[int, dict[str, Any]], SkywardError | None] = _welcome
    """Why a node that has greeted is not what the pool asked for, if that is so: no runner is made on it."""
    stall_timeout: float | None = None
    present: int | None = None
    """How many nodes are there when the pool opens, if some are missing; those are the last ones."""
    session: str = ""
