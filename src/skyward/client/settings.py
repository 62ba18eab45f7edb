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
    """Connects to a node's agent, mutually authenticated."""
    setup: Callable[[int, list[dict[str, Any]], list[int]], tuple[dict[str, Any], list[Any]]]
    emit: Callable[[events.Event], None]
    listening: Callable[[], object]
    """Whether anybody wants to hear of calls that start and end; an `events.KeepEnd` if ends are enough for it."""
    release: Callable[[Sequence[str]], None]
    gang: bool
    """Whether runners form groups when the pool opens: then losing one means starting all of them again."""
    ranks: Callable[[list[dict[str, Any]]], Ranks]
    """How many processes each node runs, by what the nodes say of themselves; raises if one cannot run any."""
    local: bool
    """Whether the nodes are on this computer: they end when this process does, and read its files."""
    lease: float
    """How many seconds nodes on other machines go on without us; 0 for local nodes."""
    directory: str
    address: Callable[[int], tuple[str, int] | None]
    """Where other nodes reach a node's agent, if they can."""
    revive: Callable[[int], None] | None
    """Sets a lost node's machine up again, if it answers."""
    substitutes: Machines | None
    reboots: bool = False
    """Whether machines where nobody listens any more may be booting, and are back by themselves: hosts of the user."""
    refusal: Callable[[int, dict[str, Any]], SkywardError | None] = _welcome
    """Why a node that has greeted is not what the pool asked for, if that is so: no runner is made on it."""
    stall_timeout: float | None = None
    """After how many seconds a broadcast is stopped whose ranks all wait in collectives; None never stops one."""
    present: int | None = None
    """How many nodes are there when the pool opens, if some are missing; those are the last ones."""
    session: str = ""
    """How the names of this pool's sessions begin; its agents take no others."""
