"""A pool under stress: sends calls, then checks that each has ended as it may, and that no slot is lost."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import skyward as sky
from tests.stress import bodies

__all__ = ["Failed", "Trial", "within"]

T = TypeVar("T")


class Failed(AssertionError):
    """What a pool under stress must not do."""


def within(seconds: float, what: str, act: Callable[[], T]) -> T:
    """Does it in a thread of its own; fails when it takes longer, so that nothing here waits for ever."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, name=f"stress {what}", daemon=True).start()
    if not wait([future], seconds).done:
        raise Failed(f"{what} did not end within {seconds:g} s")
    return future.result()


@dataclass(frozen=True)
class Sent:
    """A call, what it may return or raise, and how often its body may start."""

    key: str
    future: Future[Any]
    result: object
    may_raise: tuple[type[BaseException], ...]
    starts: int


class Trial:
    """One open pool, and the calls of the present round."""

    def __init__(
        self, pool: sky.ComputePool, directory: Path, limit: float, rough: tuple[type[BaseException], ...] = ()
    ) -> None:
        """`limit`: seconds within which everything ends. `rough`: what the mode's faults may do to a broadcast."""
        self.pool, self.limit, self._rough = pool, limit, rough
        self.rng = random.Random()
        self.calls = 0
        self.runners: list[int] = []
        self.slots = pool.slots
        self.log = str(directory / "starts")
        Path(self.log).touch()
        self._directory = directory
        self._numbers = itertools.count()
        self._sent: list[Sent] = []
        self._asked: set[Future[Any]] = set()
        self._starts: dict[str, int] = {}
        self._begun: set[str] = set()
        self._ended: Counter[str] = Counter()
        pool.on_event(self._note)

    def _note(self, event: sky.events.Event) -> None:
        if isinstance(event, sky.events.CallStarted):
            self._begun.add(event.call)
        elif isinstance(event, sky.events.CallEnded):
            self._ended[event.call] += 1

    # sending

    def key(self) -> str:
        """A name for the next call."""
        return f"k{next(self._numbers)}"

    def expect(
        self,
        key: str,
        future: Future[Any],
        result: object,
        may_raise: Sequence[type[BaseException]] = (),
        starts: int = 1,
    ) -> Future[Any]:
        """Has `check` look at this call too."""
        self._sent.append(Sent(key, future, result, tuple(may_raise), starts))
        self._starts[key] = starts
        self.calls += 1
        return future

    def allow(self, key: str, starts: int = 1) -> None:
        """Has `check` look at how often a body starts whose call is not a future here."""
        self._starts[key] = starts
        self.calls += 1

    def may_be_cancelled(self, futures: Iterable[Future[Any]]) -> None:
        """Has `check` accept that these were cancelled; no others may be."""
        self._asked.update(futures)

    def speak(
        self,
        seconds: Sequence[float],
        may_raise: Sequence[type[BaseException]] = (),
        starts: int = 1,
        timeout: float | None = None,
    ) -> list[Future[Any]]:
        """Sends calls that print and compute for so long, together or one by one."""
        keys = [self.key() for _ in seconds]
        calls = [bodies.speak(self.log, key, s).with_timeout(timeout) for key, s in zip(keys, seconds, strict=True)]
        futures = self.pool._send(calls) if self.rng.random() < 0.5 else [call > self.pool for call in calls]
        for key, future in zip(keys, futures, strict=True):
            self.expect(key, future, key, may_raise, starts)
        return futures

    # the processes of the pool

    def agents(self) -> list[int]:
        """The processes that speak for the nodes."""
        return [about["pid"] for about in self.pool._engine.greetings()]

    def processes(self) -> list[int]:
        """Agents and runners, as far as they are known."""
        return [*self.agents(), *self.runners]

    # checking

    def check(self) -> None:
        """Every call has ended as it may, and the pool is as good as new."""
        self.settled()
        self._check_broadcast()
        self._check_slots()
        self._check_events()
        self.check_starts()

    def settled(self) -> None:
        """Every call has ended as it may."""
        late = wait([sent.future for sent in self._sent], self.limit).not_done
        if late:
            keys = [sent.key for sent in self._sent if sent.future in late]
            raise Failed(f"{len(late)} of {len(self._sent)} calls did not end within {self.limit:g} s: {keys[:20]}")
        for sent in self._sent:
            _judge(sent, sent.future in self._asked)
        self._sent.clear()
        self._asked.clear()

    def _check_broadcast(self) -> None:
        end = time.monotonic() + self.limit
        while True:
            key = self.key()
            call = bodies.rank(self.log, key, 0, None)
            try:
                ranks = within(self.limit, "a broadcast", partial(self.pool.broadcast, call))
                break
            except self._rough:
                if time.monotonic() > end:
                    raise
        if ranks != list(range(self.pool.world_size)):
            raise Failed(f"a broadcast returned {ranks}")
        for node in ranks:
            self._starts[f"{key}.{node}"] = 1

    def _check_slots(self) -> None:
        """As many calls as there are slots run at the same time."""
        path = str(self._directory / f"meeting-{self.key()}")
        futures = self.pool._send([bodies.meet(path, self.slots, self.limit) for _ in range(self.slots)])
        if wait(futures, 2 * self.limit).not_done:
            raise Failed(f"not all of {self.slots} calls for {self.slots} slots ended")
        met = [future.result() for future in futures]
        if any(came != self.slots for came, _ in met):
            raise Failed(
                f"{self.slots} calls for {self.slots} slots did not run at the same time (came, process): {met}"
            )
        self.runners = sorted({pid for _, pid in met})
        Path(path).unlink()

    def _check_events(self) -> None:
        """Every call that has begun has been told as ended, once."""
        end = time.monotonic() + self.limit
        while missing := self._begun - self._ended.keys():
            if time.monotonic() > end:
                raise Failed(f"no CallEnded came for {sorted(missing)[:20]}")
            time.sleep(0.01)
        if twice := [call for call, times in list(self._ended.items()) if times > 1]:
            raise Failed(f"CallEnded came more than once for {twice[:20]}")

    def check_starts(self) -> None:
        """No body has started more often than allowed."""
        counted = Counter(Path(self.log).read_text().split())
        often = {key: times for key, times in counted.items() if times > self._starts.get(key, 1)}
        if often:
            raise Failed(f"bodies started more often than allowed: {often}")


def _judge(sent: Sent, asked: bool) -> None:
    if sent.future.cancelled():
        if not asked:
            raise Failed(f"{sent.key} was cancelled, which nobody has asked for")
        return
    error = sent.future.exception()
    if error is not None and not isinstance(error, sent.may_raise):
        raise Failed(f"{sent.key} raised {error!r}") from error
    if error is None and sent.future.result() != sent.result:
        raise Failed(f"{sent.key} returned {sent.future.result()!r} instead of {sent.result!r}")
