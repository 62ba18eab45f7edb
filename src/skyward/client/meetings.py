"""What follows when a connection to a node is made, is lost, or cannot be made."""

from __future__ import annotations

from skyward.client.calls import Action
from skyward.client.connections import Connections, Event, Greeted, Lost, NotReached, Unreachable
from skyward.client.core import Core

__all__ = ["Meetings"]


class Meetings:
    """Tells `Core` what the connections saw; the engine's lock is held."""

    def __init__(self, core: Core, connections: Connections) -> None:
        self._core, self._connections = core, connections
        self.first: set[int] = set()
        """Nodes that are connected to for the first time."""
        self.closing = False

    def follow(self, event: Event, now: float) -> list[Action]:
        """What is to be done after something has happened to a connection."""
        number = event.number
        match event:
            case Greeted():
                restarted = self._connections.attach(event)
                if restarted is not None or event.first:
                    self.first.discard(number)
                if restarted is not None:
                    return self._core.attached(number, restarted=restarted, now=now)
                if number in self.first or event.first:
                    return []
                return self._retry(number, ConnectionError("it was given up during the greeting"), now)
            case NotReached():
                return self._retry(number, event.error, now)
            case Lost() if self._connections.current(number, event.link):
                return self._core.broken(number, now)
            case Unreachable() if event.link is None or self._connections.current(number, event.link):
                self.first.discard(number)
                return self._core.unreachable(number, event.error, now)
            case _:
                return []

    def _retry(self, number: int, error: Exception, now: float) -> list[Action]:
        if self.closing or self._connections.connected(number):
            return []
        pause, actions = self._core.retry(number, error, now)
        if pause is not None:
            self._connections.reconnect(number, pause)
        return actions
