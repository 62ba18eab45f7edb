"""Other machines for nodes that are lost or being taken away: asked for at once, put in place when it harms nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from skyward.api.provider import Machine
from skyward.errors import BootstrapError, CredentialsExpired, NoCapacity, PoolClosed, QuotaExceeded, SkywardError
from skyward.machines.supply import Supply

__all__ = ["Replacing", "Substitutes", "Substitution"]

log = logging.getLogger("skyward.engine")

_PAUSES = (5.0, 15.0, 30.0, 60.0, 60.0)  # more than the two minutes in which the old machine still counts
_PASSING = (NoCapacity, QuotaExceeded, CredentialsExpired, BootstrapError)
_FIRST_INQUIRY = 1.0
_INQUIRY = 5.0
_CLOSING = 120.0


class Substitutes(Protocol):
    """Where other machines come from."""

    def wanted(self, node: int) -> bool:
        """Whether a node's machine is to be replaced when it goes."""
        ...

    def prepare(self, node: int) -> Callable[[], None]:
        """Gets a machine and sets it up; what it returns puts it in the place of the node's old one."""
        ...

    def ended(self, nodes: Sequence[int]) -> dict[int, str]:
        """Which machines of these nodes are gone, as their provider knows, and why."""
        ...

    def close(self) -> None:
        """Stops what is being prepared."""
        ...


class Place(Protocol):
    """What is replaced, as the engine sees it; called without its lock."""

    def await_vacant(self, node: int) -> bool:
        """Waits until a node has nothing to do or is lost, and takes it out; False if the pool is closed."""
        ...

    def connect(self, node: int) -> None:
        """Connects to the machine that stands in for a node's old one."""
        ...

    def not_replaced(self, node: int, reason: str) -> None:
        """No machine could be had."""
        ...

    def missing(self) -> list[int]:
        """The nodes of which it is not known whether they are lost."""
        ...

    def ended(self, node: int, reason: str) -> None:
        """A node's machine is known to be gone."""
        ...

    def pause_for(self, seconds: float) -> bool:
        """Waits; False if the pool is closed meanwhile."""
        ...

    def tell(self, node: int, text: str) -> None:
        """Says how far it is with a node."""
        ...


class Substitution:
    """Machines of a pool that others stand in for."""

    def __init__(
        self,
        supply: Supply,
        machines: list[Machine],
        set_up: Callable[[int, Machine], Callable[[], None]],
        halt: Callable[[], None],
        report: Callable[[int, str], None],
    ) -> None:
        self._supply, self._machines, self._set_up = supply, machines, set_up
        self._halt, self._report = halt, report

    def wanted(self, node: int) -> bool:
        return self._supply.replaces(self._machines[node])

    def ended(self, nodes: Sequence[int]) -> dict[int, str]:
        reasons = self._supply.ended([self._machines[node] for node in nodes])
        return {node: reason for node, reason in zip(nodes, reasons, strict=True) if reason}

    def prepare(self, node: int) -> Callable[[], None]:
        others = sum(machine.hourly_cost for other, machine in enumerate(self._machines) if other != node)
        machine = self._supply.another(others, lambda text: self._report(node, text))
        try:
            put = self._set_up(node, machine)
        except BaseException:
            self._discard(machine)
            raise

        def stand_in() -> None:
            old, self._machines[node] = self._machines[node], machine
            put()
            threading.Thread(target=self._discard, args=(old,), name="skyward-discard", daemon=True).start()

        return stand_in

    def close(self) -> None:
        self._supply.close(_CLOSING)
        self._halt()

    def _discard(self, machine: Machine) -> None:
        try:
            self._supply.discard(machine)
        except SkywardError as exc:  # it goes with the pool, whose receipt says so
            log.debug("%s is not given back yet: %s", machine.id, exc)


class Replacing:
    """One thread for every node that is being replaced."""

    def __init__(self, source: Substitutes | None, place: Place) -> None:
        self._source, self._place = source, place
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._going: set[int] = set()
        self._placed: set[int] = set()
        self._again: set[int] = set()
        self._asking = False

    def going(self, node: int) -> bool:
        """Whether another machine for a node is on its way."""
        return node in self._going

    def begin(self, node: int) -> bool:
        """Has a node's machine replaced, if that is wanted; once, however often this is said."""
        with self._lock:
            if node in self._going:
                if node in self._placed:  # it is the other machine that is spoken of, just when we connect to it
                    self._again.add(node)
                return True
            if self._source is None or not self._source.wanted(node):
                return False
            self._going.add(node)
        thread = threading.Thread(target=self._replace, args=(self._source, node), name="skyward-replace", daemon=True)
        self._threads.append(thread)
        thread.start()
        return True

    def inquire(self) -> None:
        """Asks the provider, for as long as nodes do not answer, whether their machines are still there."""
        if self._source is not None and not self._asking:
            self._asking = True
            threading.Thread(target=self._ask, args=(self._source,), name="skyward-ask", daemon=True).start()

    def close(self, seconds: float) -> None:
        """Stops asking for machines, and waits for those that have been asked for; the pool is closing."""
        if self._source is not None:
            self._source.close()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _replace(self, source: Substitutes, node: int) -> None:
        reason = ""
        try:
            while True:
                self._try(source, node)
                with self._lock:
                    self._placed.discard(node)
                    if node not in self._again:
                        self._going.discard(node)
                        return
                    self._again.discard(node)  # the machine that took the place is being taken away as well
        except PoolClosed:
            pass
        except Exception as exc:  # whatever a provider or a machine does: told to the user by the engine
            log.debug("node %d could not be replaced", node, exc_info=True)
            reason = _short(exc)
        with self._lock:
            for nodes in (self._going, self._placed, self._again):
                nodes.discard(node)
        if reason:
            self._place.not_replaced(node, reason)

    def _try(self, source: Substitutes, node: int) -> None:
        """Capacity comes and goes, machines break while they are set up, a login can be renewed; all else is final."""
        for pause in (*_PAUSES, None):
            try:
                put = source.prepare(node)
                if not self._place.await_vacant(node):
                    raise PoolClosed("the pool was closed.")
                put()
                with self._lock:
                    self._placed.add(node)
                self._place.connect(node)
                return
            except _PASSING as exc:
                with self._lock:
                    self._placed.discard(node)
                    self._again.discard(node)  # said of the machine that we could not connect to
                if pause is None:
                    raise
                self._place.tell(node, f"no other machine yet: {_short(exc)}. The next try is in {pause:.0f} s")
                if not self._place.pause_for(pause):
                    raise PoolClosed("the pool was closed.") from None

    def _ask(self, source: Substitutes) -> None:
        try:
            pause = _FIRST_INQUIRY
            while self._place.pause_for(pause) and (nodes := self._place.missing()):
                pause = _INQUIRY
                for node, reason in self._answer(source, nodes).items():
                    self._place.ended(node, reason)
        finally:
            self._asking = False
        if self._place.pause_for(0) and self._place.missing():
            self.inquire()  # one has fallen silent just now

    def _answer(self, source: Substitutes, nodes: Sequence[int]) -> dict[int, str]:
        try:
            return source.ended(nodes)
        except SkywardError as exc:  # it may be our own network that is down; asked again
            log.debug("the provider does not say what became of nodes %s: %s", nodes, exc)
            return {}


def _short(error: Exception) -> str:
    """What went wrong, in one line: what the errors of an opening pool advise does not hold for one that is open."""
    if isinstance(error, NoCapacity) and error.attempts:
        return f"there is no capacity ({len(error.attempts)} offers were tried; the last: {error.attempts[-1]})"
    return str(error).partition("\n")[0].rstrip(".")
