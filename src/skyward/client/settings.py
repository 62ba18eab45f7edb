"""What the engine needs to know about its pool, and asks of the pool's machines."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyward import events
from skyward.api.spec import Ranks
from skyward.errors import SkywardError
from skyward.node.settings import Greeting, NodeSettings

__all__ = ["Machines", "PoolSettings"]


class Machines(Protocol):
    """For the engine; mostly called with its lock, which they never take."""

    def reach(self, node: int) -> socket.socket:
        """Connects to an agent; both sides have checked who the other is. Called without the lock."""
        ...

    def revive(self, node: int) -> None:
        """Sets a machine up again that has lost everything of ours. Called without the lock."""
        ...

    def address(self, node: int) -> tuple[str, int] | None:
        """Where other nodes reach a node's agent; None if they cannot."""
        ...

    def ranks(self, greetings: Sequence[Greeting]) -> Ranks:
        """How many processes each node runs; all nodes have greeted."""
        ...

    def setup(self, node: int, greetings: Sequence[Greeting], ports: list[int]) -> tuple[NodeSettings, list[Any]]:
        """What an agent needs before it starts runners: settings, and the plugins' hooks."""
        ...

    def refusal(self, node: int, greeting: Greeting) -> SkywardError | None:
        """Why a greeting node is not what the pool asked for: no runner is made on it."""
        ...

    def replace(self, node: int) -> bool: ...

    def replacing(self, node: int) -> bool: ...

    def inquire(self) -> None: ...


@dataclass(frozen=True)
class PoolSettings:
    pool: str
    nodes: int
    slots: int
    emit: Callable[[events.Event], None]
    listening: Callable[[], object]
    release: Callable[[Sequence[str]], None]
    gang: bool
    """Whether runners form groups: then losing one restarts all."""
    local: bool
    lease: float
    directory: str
    replaces: bool = False
    """Whether lost machines may be replaced: then the provider is asked why one is gone."""
    reboots: bool = False
    """Whether machines that refuse connections may be booting: hosts of the user."""
    stall_timeout: float | None = None
    present: int | None = None
    """How many nodes there are when the pool opens; the missing ones are the last."""
    session: str = ""
    epoch: int = 0
    """Which start of a detached run's program this is; agents refuse earlier ones."""
