"""Replaces nodes that are lost, about to be taken away, or missing.

engine --replace, inquire--> Fleet --begin, inquire--> Replacements (a thread for each node)
Replacements --prepare--> Fleet --another--> Supply --> lease;  --await_vacant, connect--> engine
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from skyward.api.context import PoolContext
from skyward.api.provider import Admission, Lease, Machine, Report
from skyward.errors import BootstrapError, CredentialsExpired, NoCapacity, PoolClosed, QuotaExceeded, SkywardError
from skyward.transport.backoff import backoff

__all__ = ["Joining", "Missing", "NodePlaces", "Readmission", "Replacements", "Source", "Supply"]


log = logging.getLogger("skyward.engine")

_PAUSES = (5.0, 15.0, 30.0, 60.0, 60.0)  # longer than the two minutes in which the old machine still counts
_TEMPORARY = (NoCapacity, QuotaExceeded, CredentialsExpired, BootstrapError)
_FIRST_INQUIRY = 1.0
_INQUIRY = 5.0
_MOMENT = 1.0  # machines that are lost together are lost within it


class _Batch:
    def __init__(self) -> None:
        self.count = 0
        self.machines: Future[Sequence[Machine]] = Future()


class Supply:
    """Asks a provider for more machines for a lease; thread-safe."""

    def __init__(self, context: PoolContext, lease: Lease) -> None:
        self._context, self._lease = context, lease
        self._changed = threading.Condition()
        self._busy = 0
        self._closed = False
        self._batch: _Batch | None = None
        self._readmission = Readmission()
        self._readmitting = threading.Lock()

    def replaces(self, machine: Machine) -> bool:
        """By default, if it may be taken away."""
        return machine.preemptible if self._context.replace is None else self._context.replace

    def another(self, spent: float, report: Report, lost: bool = False) -> Machine:
        """`spent`: hourly cost of the others. PoolClosed if the pool closes meanwhile."""
        last, spec = "", self._context.spec
        if spec.max_hourly_cost is not None:
            spec = replace(spec, max_hourly_cost=max(spec.max_hourly_cost - spent, 1e-9))

        def tell(text: str) -> None:
            nonlocal last
            self._check_open()  # providers report while they wait
            if text != last:
                report(text)
            last = text

        def ask(count: int) -> Sequence[Machine]:
            return self._lease.more(spec, count, self._context.provision_timeout, tell)

        with self._asking():
            return self._one_of(ask) if lost and self._context.provider.replaces_together else ask(1)[0]

    def _one_of(self, ask: Callable[[int], Sequence[Machine]]) -> Machine:
        """Combines requests made within a moment."""
        with self._changed:
            first = self._batch is None
            batch = self._batch = self._batch or _Batch()
            number = batch.count
            batch.count += 1
        if first:
            time.sleep(_MOMENT)
            with self._changed:
                self._batch = None
            try:
                batch.machines.set_result(ask(batch.count))
            except BaseException as exc:  # whoever asked raises it
                batch.machines.set_exception(exc)
        try:
            return batch.machines.result()[number]
        except NoCapacity:
            if batch.count == 1:
                raise
            return ask(1)[0]

    def ended(self, machines: Sequence[Machine]) -> list[str]:
        with self._asking():
            return [machine.gone for machine in self._lease.refresh(machines)]

    def unanswered(self, machines: Sequence[Machine]) -> list[str]:
        """Asks repeatedly. If this computer's address has changed, the machines let it in."""
        if self._readmitting.acquire(blocking=False):  # once is enough, whoever waits for machines
            try:
                self._readmit()
            finally:
                self._readmitting.release()
        return self.ended(machines)

    def who_is_let_in(self) -> str:
        try:
            with self._asking():
                return self._lease.readmit().allowed
        except SkywardError as exc:
            log.debug("cannot tell which addresses are let in: %s", exc)
            return ""

    def discard(self, machine: Machine) -> None:
        try:
            with self._asking():
                self._lease.terminate([machine])
        except SkywardError as exc:
            log.debug("%s is not given back yet: %s", machine.id, exc)

    def close(self, seconds: float) -> None:
        """Waits for running requests: the pool releases only machines known by then."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._busy, seconds)

    def _readmit(self) -> None:
        if not self._readmission.due(time.monotonic()):
            return
        try:
            with self._asking():
                admission = self._lease.readmit()
            text = self._readmission.answered(admission, time.monotonic())
        except SkywardError as exc:  # this computer may be offline; asked again
            log.debug("this computer is not let in again: %s", exc)
            text = self._readmission.failed(exc, time.monotonic())
        if text:
            self._context.warn(text)

    @contextmanager
    def _asking(self) -> Generator[None]:
        with self._changed:
            self._check_open()
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the pool was closed while another machine was asked for.")


class Source(Protocol):
    def wanted(self, node: int) -> bool: ...

    def prepare(self, node: int) -> Callable[[], None]: ...

    def ended(self, nodes: Sequence[int]) -> dict[int, str]: ...

    def bring(self, missing: Missing) -> Any: ...

    def place(self, newcomer: Any, node: int) -> None: ...

    def turn_back(self, newcomer: Any, node: int) -> None: ...


class NodePlaces(Protocol):
    """What `Replacements` and `Joining` need of the engine; called without the engine's lock."""

    def await_vacant(self, node: int) -> bool: ...

    def connect(self, node: int) -> None: ...

    def not_replaced(self, node: int, reason: str) -> None: ...

    def missing(self) -> list[int]: ...

    def ended(self, node: int, reason: str) -> None: ...

    def pause_for(self, seconds: float) -> bool: ...

    def tell(self, node: int, text: str) -> None: ...

    def vacancy(self) -> int: ...

    def admit(self, node: int) -> bool:
        """Waits until the ranks of the pool may change; False if the pool is closed."""
        ...


_ASK, _END = -1, -2


class Replacements:
    """Nodes that get another machine: one thread for each; thread-safe."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._going: set[int] = set()
        self._placed: set[int] = set()
        self._again: set[int] = set()
        self._asking = False
        self._threads: list[threading.Thread] = []

    def begin(self, node: int) -> bool:
        with self._lock:
            if node in self._going:
                if node in self._placed:  # the new machine is meant, to which we are connecting just now
                    self._again.add(node)
                return True
            if not self._source.wanted(node):
                return False
            self._going.add(node)
        self._queue.put(node)
        return True

    def going(self, node: int) -> bool:
        return node in self._going

    def inquire(self) -> None:
        """While nodes do not answer, asks the provider whether their machines still exist."""
        if not self._asking:
            self._asking = True
            self._queue.put(_ASK)

    def start(self, place: NodePlaces) -> None:
        self._place = place
        thread = threading.Thread(target=self._run, name="skyward-requests", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self, seconds: float) -> None:
        """The pool has closed its `Supply`, so replacements end soon."""
        deadline = time.monotonic() + seconds
        self._queue.put(_END)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (node := self._queue.get()) != _END:
            if node == _ASK:
                threading.Thread(target=self._ask, name="skyward-ask", daemon=True).start()
            else:
                thread = threading.Thread(target=self._replace, args=(node,), name="skyward-replace", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _replace(self, node: int) -> None:
        reason = ""
        try:
            self._try(node)
            while not self._done(node):
                self._try(node)  # the machine that took the place is being taken away as well
            return
        except PoolClosed:
            pass
        except Exception as exc:  # whatever a provider or a machine does: the engine tells the user
            log.debug("node %d could not be replaced", node, exc_info=True)
            reason = _short(exc)
        self._give_up(node)
        if reason:
            self._place.not_replaced(node, reason)

    def _try(self, node: int) -> None:
        """Retries errors that may pass."""
        for pause in (*_PAUSES, None):
            try:
                put = self._source.prepare(node)
                if not self._place.await_vacant(node):
                    raise PoolClosed("the pool was closed.")
                put()
                self._set_placed(node)
                self._place.connect(node)
                return
            except _TEMPORARY as exc:
                self._take_back(node)
                if pause is None:
                    raise
                self._place.tell(node, f"no replacement yet: {_short(exc)}. Trying again in {pause:.0f} s")
                if not self._place.pause_for(pause):
                    raise PoolClosed("the pool was closed.") from None

    def _ask(self) -> None:
        try:
            pause = _FIRST_INQUIRY
            while self._place.pause_for(pause) and (nodes := self._place.missing()):
                pause = _INQUIRY
                for node, reason in self._answer(nodes).items():
                    self._place.ended(node, reason)
        finally:
            self._asking = False
        if self._place.pause_for(0) and self._place.missing():
            self.inquire()  # another node stopped answering just now

    def _set_placed(self, node: int) -> None:
        with self._lock:
            self._placed.add(node)

    def _take_back(self, node: int) -> None:
        with self._lock:
            self._placed.discard(node)
            self._again.discard(node)

    def _done(self, node: int) -> bool:
        """False if the new machine must be replaced as well."""
        with self._lock:
            self._placed.discard(node)
            if node not in self._again:
                self._going.discard(node)
                return True
            self._again.discard(node)
            return False

    def _give_up(self, node: int) -> None:
        with self._lock:
            for nodes in (self._going, self._placed, self._again):
                nodes.discard(node)

    def _answer(self, nodes: Sequence[int]) -> dict[int, str]:
        try:
            return self._source.ended(nodes)
        except SkywardError as exc:  # it may be our own network that is down; asked again
            log.debug("the provider does not say what became of nodes %s: %s", nodes, exc)
            return {}


def _short(error: Exception) -> str:
    if isinstance(error, NoCapacity) and error.attempts:
        return f"there is no capacity ({len(error.attempts)} offers were tried; the last: {error.attempts[-1]})"
    return str(error).partition("\n")[0].rstrip(".")


# Nodes that were missing when their pool opened: tried again now and then, and taken in when they come.
#
#     Joining (a thread for each) --bring, place--> Fleet (setup/fleet.py) --> provider, host
#                                 --admit, connect--> NodePlaces (the engine)
#
# Nodes are numbered without gaps: whichever of the missing ones comes first gets the next number.


_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 120.0


@dataclass(frozen=True)
class Missing:
    name: str
    reason: str
    machine: Machine | None
    """The machine to retry; None: ask the provider for another one."""


class Joining:
    def __init__(self, source: Source, place: NodePlaces, missing: Sequence[Missing]) -> None:
        self._source, self._place = source, place
        self._one_at_a_time = threading.Lock()
        self._threads = [
            threading.Thread(target=self._try, args=(one, row), name="skyward-joining", daemon=True)
            for row, one in enumerate(missing)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _try(self, missing: Missing, row: int) -> None:
        reason, pauses = missing.reason, backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while self._place.pause_for(next(pauses)):
            try:
                self._take_in(missing)
                return
            except PoolClosed:
                return
            except Exception as exc:  # whatever a provider or a machine does: it is tried again
                log.debug("%s cannot join yet", missing.name, exc_info=True)
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


# When a provider is asked to let this computer in again, and what the user sees. Knows no clock and no provider.
#
# A cloud that lets in the caller's address only shuts out a laptop that has changed networks. Machines that do not
# answer are the sign of it: whoever looks after them says so here every few seconds.


_FIRST = 4.0  # a connection that breaks is usually back by then
_OFTEN, _RARELY = 10.0, 30.0
_SOON = 60.0
_OVER = 60.0  # so long after the last question, a silence is another one
_TELL = 30.0


class Readmission:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._began = self._seen = float("-inf")
        self._asked: float | None = None
        self._told = False

    def due(self, now: float) -> bool:
        if now - self._seen > _OVER:
            self._began, self._asked, self._told = now, None, False
        self._seen = now
        if self._asked is None:
            due = now - self._began >= _FIRST
        else:
            due = now - self._asked >= (_OFTEN if now - self._began < _SOON else _RARELY)
        if due:
            self._asked = now
        return due

    def answered(self, admission: Admission, now: float) -> str:
        if admission.changed:
            self._told = False
            return admission.changed
        return self._once(admission.allowed, now)

    def failed(self, error: SkywardError, now: float) -> str:
        return self._once(str(error), now)

    def _once(self, text: str, now: float) -> str:
        if not text or self._told or now - self._began < _TELL:
            return ""
        self._told = True
        return f"machines do not answer. {text}"
