"""Nodes that were missing when their pool opened: tried again now and then, and taken in when they come.

    Joining (a thread for each) --bring, place--> Newcomers (setup/bringup.py) --> provider, host
                                --admit, connect--> Place (the engine)

Nodes are numbered without gaps: whichever of the missing ones comes first gets the next number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyward.api.provider import Machine
from skyward.errors import PoolClosed

__all__ = ["Joining", "Missing", "Newcomers"]

log = logging.getLogger("skyward.engine")

_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 120.0


@dataclass(frozen=True)
class Missing:
    """A node that could not be had when its pool opened."""

    name: str
    reason: str
    machine: Machine | None
    """The machine that is tried again; None if the provider is asked for another one."""


class Newcomers(Protocol):
    """Gets and sets up what was missing; `setup/bringup.py: PoolHosts` does it."""

    def bring(self, missing: Missing) -> Any:
        """Sets the machine up; raises if that cannot be done now."""
        ...

    def place(self, newcomer: Any, node: int) -> None:
        """Makes it the machine of a node, whose agent listens then."""
        ...

    def turn_back(self, newcomer: Any, node: int) -> None:
        """It could not join after all."""
        ...


class Place(Protocol):
    """What `Joining` needs of the engine; called without the engine's lock."""

    def vacancy(self) -> int:
        """The number that the next node gets."""
        ...

    def admit(self, node: int) -> bool:
        """Waits until the ranks of the pool may change; False if the pool is closed."""
        ...

    def connect(self, node: int) -> None:
        """Connects to a node."""
        ...

    def pause_for(self, seconds: float) -> bool:
        """Waits; False if the pool is closed meanwhile."""
        ...

    def tell(self, node: int, text: str) -> None:
        """Says how far it is with a node."""
        ...


class Joining:
    """Tries all that is missing, until it has come or the pool is closed."""

    def __init__(self, source: Newcomers, place: Place, missing: Sequence[Missing]) -> None:
        self._source, self._place = source, place
        self._one_at_a_time = threading.Lock()
        self._threads = [
            threading.Thread(target=self._try, args=(one, row), name="skyward-joining", daemon=True)
            for row, one in enumerate(missing)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, seconds: float) -> None:
        """Waits for what is under way; the engine is closed already, so that it ends soon."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _try(self, missing: Missing, row: int) -> None:
        pause, reason = _FIRST_PAUSE, missing.reason
        while self._place.pause_for(pause):
            try:
                self._take_in(missing)
                return
            except PoolClosed:
                return
            except Exception as exc:  # whatever a provider or a machine does: it is tried again
                log.debug("%s cannot join yet", missing.name, exc_info=True)
                pause = min(pause * 2, _LONGEST_PAUSE)
                if (said := str(exc).partition("\n")[0]) != reason:
                    reason = said
                    self._place.tell(self._place.vacancy() + row, f"missing: {missing.name}: {said}")

    def _take_in(self, missing: Missing) -> None:
        newcomer = self._source.bring(missing)
        with self._one_at_a_time:
            node = self._place.vacancy()
            try:
                self._source.place(newcomer, node)
                if not self._place.admit(node):
                    raise PoolClosed("the pool was closed.")
                self._place.connect(node)
            except BaseException:
                self._source.turn_back(newcomer, node)
                raise
