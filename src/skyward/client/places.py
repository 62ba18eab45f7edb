"""The places of nodes that other machines take: vacated, connected to, or left empty.

The part of an engine that the threads of `machines/replacement.py` call; none of them holds the engine's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from skyward import events
from skyward.errors import BootstrapError, SkywardError

if TYPE_CHECKING:
    from skyward.client.calls import Action
    from skyward.client.connections import Connections
    from skyward.client.core import Core
    from skyward.client.settings import PoolSettings

__all__ = ["NodePlaces"]

_JOIN = 30.0


class NodePlaces:
    """What an engine lets others do with the places of its nodes."""

    if TYPE_CHECKING:
        _lock: threading.RLock
        _changed: threading.Condition
        _stopping: threading.Event
        _closing: bool
        _plan: PoolSettings
        _core: Core
        _connections: Connections
        _clock: Callable[[], float]

        def _do(self, actions: list[Action]) -> None: ...
        def _defer(self, act: Callable[..., Any], *args: Any) -> None: ...
        def _connect(self, numbers: Iterable[int], deadline: float) -> None: ...

    def await_vacant(self, node: int) -> bool:
        """Waits until a node has nothing to do or is lost, and takes it out; False if the pool is closed."""
        with self._lock:
            while not self._closing:
                vacant, actions = self._core.vacate(node, self._clock())
                self._do(actions)
                if vacant:
                    return True
                self._changed.wait(0.2)
            return False

    def vacancy(self) -> int:
        """The number that the next node gets of those that were missing when the pool opened."""
        with self._lock:
            return len(self._core.nodes.present)

    def admit(self, node: int) -> bool:
        """Waits until the ranks of a pool may change, and makes room for a node; False if the pool is closed."""
        with self._lock:
            while not self._closing:
                admitted, actions = self._core.admit(node, self._clock())
                self._do(actions)
                if admitted:
                    return True
                self._changed.wait(0.2)
            return False

    def connect(self, node: int) -> None:
        """Connects to the machine that stands in for a node's old one, or for one that was missing."""
        with self._lock:
            self._connect([node], self._clock() + _JOIN)
            self._changed.notify_all()
            connected, error = self._connections.connected(node), self._core.nodes.all[node].error
        if isinstance(error, SkywardError) and not connected:
            raise error
        if not connected:
            raise BootstrapError("connecting", "the machine that was to take its place cannot be reached.", node)

    def not_replaced(self, node: int, reason: str) -> None:
        """No machine was found: what waits for one fails."""
        with self._lock:
            self._do(self._core.not_replaced(node, reason, self._clock()))
            self._changed.notify_all()

    def missing(self) -> list[int]:
        """The nodes of which it is not known whether they are lost."""
        with self._lock:
            return self._core.nodes.silent()

    def ended(self, node: int, reason: str) -> None:
        """A node's machine is known to be gone."""
        with self._lock:
            self._do(self._core.machine_ended(node, reason, self._clock()))
            self._changed.notify_all()

    def pause_for(self, seconds: float) -> bool:
        """Waits; False if the pool is closed meanwhile."""
        return not self._stopping.wait(seconds)

    def tell(self, node: int, text: str) -> None:
        """Says how far it is with a node."""
        self._defer(self._plan.emit, events.NodePhase(self._plan.pool, node, text))
