"""The state of a pool, folded from its events: what live view, page, commands, history and telemetry read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from skyward import events as on

__all__ = ["FAILED", "Attempt", "NodeState", "PoolState"]

FAILED = frozenset(("error", "crashed", "timeout", "lost"))

_HOUR = 3600.0
_SAMPLED = 1.0  # seconds between two samples of a node
_MOST_GROUPS = 64


@dataclass(slots=True, eq=False)
class Attempt:
    """What is below `items` belongs to the page."""

    id: str
    name: str
    arguments: str
    node: int
    """-1 if it never began."""
    rank: int | None
    began: float
    attempt: int = 0
    group: str = ""
    waited: float = 0.0
    ended: float | None = None
    seconds: float | None = None
    outcome: str = "running"
    error: str = ""
    items: int = 1
    failed_items: int = 0
    number: int = -1
    row: int = 0
    before: Attempt | None = None
    progress: tuple[float, float | None] | None = None


@dataclass(slots=True)
class NodeState:
    since: float = 0.0
    status: Literal["waiting", "ready", "up", "leaving", "down", "gone"] = "waiting"
    phase: str = "waiting"
    reason: str = ""
    leaving: float | None = None
    sample: on.NodeSample | None = None
    heard: float | None = None
    done: int = 0
    failed: int = 0
    running: dict[str, Attempt] = field(default_factory=dict[str, Attempt])


class PoolState:
    def __init__(self) -> None:
        self.pool = self.provider = ""
        self.stage: Literal["", "opening", "open", "closing", "closed"] = ""
        self.processes: int | str = 1  # per node; each is a rank
        self.requested = self.slots = 0
        self.began = 0.0
        self.nodes: dict[int, NodeState] = {}
        self.calls: dict[str, Attempt] = {}  # those that run, by id
        self.done = self.failed = self.cancelled = self.queued = 0
        self.groups: dict[int, tuple[on.GroupProgress, float]] = {}  # with when it was told, the newest last
        self.budget: float | None = None
        self.rates: list[tuple[float, float | None]] = []  # from when on, dollars an hour; None: closed

    def node(self, number: int) -> NodeState:
        if number < 0:
            return NodeState()
        return self.nodes.get(number) or self.nodes.setdefault(number, NodeState())

    def apply(self, event: on.Event, now: float) -> tuple[Attempt, ...]:
        match event:
            case on.CallStarted():
                return self._begin(event, now)
            case on.CallEnded():
                return self._end(event, now)
            case on.NodeSample(node=number):
                node = self.node(number)
                node.sample, node.heard = event, now
            case on.QueueLength(calls=calls):
                self.queued = calls
            case on.GroupProgress(group=group):
                self.groups.pop(group, None)
                self.groups[group] = event, now
                if len(self.groups) > _MOST_GROUPS:
                    over = (key for key, (known, _) in self.groups.items() if known.over)
                    del self.groups[next(over, next(iter(self.groups)))]
            case on.PoolOpening():
                self.pool, self.provider, self.processes = event.pool, event.provider, event.processes_per_node
                self.stage, self.began = "opening", now
                self.requested = self.requested or event.nodes
                self.nodes = {number: NodeState(now) for number in range(event.nodes)}
            case on.PoolOpened(slots=slots):
                self.stage, self.slots = "open", slots
                for node in self.nodes.values():
                    node.since = now
                    node.status = "up" if node.status in ("waiting", "ready") else node.status
            case on.PoolCost(hourly=hourly):
                self.budget = event.budget
                self.rates.append((now, hourly))
            case on.NodePhase(node=number, phase=phase):
                for node in self.nodes.values() if number is None else (self.node(number),):
                    if node.phase != phase:
                        node.phase, node.since, node.leaving = phase, now, None
                if number is not None and phase == "ready":
                    self.node(number).status = "up" if self.stage == "open" else "ready"
            case on.NodeDown(node=number, reason=reason):
                node = self.node(number)
                node.status, node.reason = "down", reason
                node.running.clear()
            case on.NodeLeaving(node=number, seconds=seconds):
                node = self.node(number)
                node.status, node.leaving = "leaving", seconds
            case on.NodeUp(node=number):
                node = self.node(number)
                node.status, node.since, node.leaving = "up", now, None
            case on.PoolClosing():
                self.stage = "closing"
            case on.PoolClosed():
                self.stage = "closed"
                self.rates.append((now, None))
                for node in self.nodes.values():
                    node.status = "gone"
            case _:
                pass
        return ()

    def prices(self, end: float) -> Iterator[tuple[float, float, float]]:
        for number, (began, hourly) in enumerate(self.rates):
            if hourly is not None:
                last = number + 1 == len(self.rates)
                yield began, max(began, end if last else self.rates[number + 1][0]), hourly

    def spent(self, now: float) -> float:
        return sum(rate * (until - began) / _HOUR for began, until, rate in self.prices(now) if math.isfinite(rate))

    @property
    def hourly(self) -> float | None:
        return self.rates[-1][1] if self.rates else None

    @property
    def price_known(self) -> bool:
        return all(hourly is None or math.isfinite(hourly) for _, hourly in self.rates)

    @property
    def priced(self) -> bool:
        return any(hourly is not None for _, hourly in self.rates)

    def _begin(self, event: on.CallStarted, now: float) -> tuple[Attempt, ...]:
        e = event
        before = self.calls.get(e.call)
        if before is not None:  # it was lost with its node, and is tried again
            self._finish(before, now, 0.0, "lost", "")
            self.node(before.node).failed += 1
        began = Attempt(e.call, e.name, e.arguments, e.node, e.rank, now, e.attempt, e.group, e.waited)
        self.calls[e.call] = self.node(e.node).running[e.call] = began
        return (began,) if before is None else (before, began)

    def _end(self, event: on.CallEnded, now: float) -> tuple[Attempt, ...]:
        e, call = event, self.calls.get(event.call)
        if call is None:  # it was over before it was told of
            began = now - e.seconds
            call = Attempt(e.call, e.name, e.arguments, e.node, e.rank, began, e.attempt, e.group, e.waited)
        elif e.seconds:
            call.waited = e.waited
        call.items, call.failed_items = e.items, e.failed_items
        self._finish(call, now, e.seconds, e.outcome, e.error)
        done, failed = e.done, e.failed
        self.done += done
        self.failed += failed
        self.cancelled += e.outcome == "cancelled"
        node = self.node(call.node)
        node.done += done
        node.failed += failed
        return (call,)

    def _finish(self, call: Attempt, now: float, seconds: float, outcome: str, error: str) -> None:
        node = self.node(call.node)
        if outcome == "lost" and node.heard is not None:  # not as long as it took to notice
            now = min(now, node.heard + _SAMPLED)
        ended = max(call.began, min(now, call.began + seconds) if seconds else now)
        call.ended, call.seconds = ended, seconds or ended - call.began
        call.outcome, call.error = outcome, error
        self.calls.pop(call.id, None)
        if node.running.get(call.id) is call:
            del node.running[call.id]
