"""The states of a call on its node, and of the runner processes there, as tables: (state, event) -> (state, actions).

An event that a state has no row for changes nothing. `agent_calls` applies the tables; docs/architecture.md shows them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

__all__ = ["CALLS", "SLOTS", "UNBEGUN", "NodeCall", "Row", "Slot", "sent_ahead"]

Row = tuple[str, tuple[str, ...]]

_STOP: Row = ("stopping", ("send cancel", "start grace"))

CALLS: dict[tuple[str, str], Row] = {
    # waits here, for a runner or for its large buffers
    ("queued", "assign"): ("sent", ("send call",)),
    ("queued", "recall"): ("gone", ("tell recalled",)),
    ("queued", "cancel"): ("gone", ("tell stopped",)),
    ("queued", "no room"): ("gone", ("tell verdict",)),
    # with a runner, and not known to have begun
    ("sent", "began"): ("running", ("start limit", "tell started")),
    ("sent", "recall"): ("returning", ("send recall",)),
    ("sent", "shift"): ("shifting", ("send recall",)),
    ("sent", "cancel"): ("withdrawn", ("send cancel",)),
    ("sent", "returned"): ("queued", ("queue",)),
    ("sent", "ended"): ("gone", ("tell verdict",)),
    ("sent", "exited"): ("queued", ("queue",)),
    # the runner was asked to give it back, for the client
    ("returning", "began"): ("running", ("start limit", "tell started")),
    ("returning", "cancel"): ("withdrawn", ("send cancel",)),
    ("returning", "returned"): ("gone", ("tell recalled",)),
    ("returning", "ended"): ("gone", ("tell verdict",)),
    ("returning", "exited"): ("gone", ("tell recalled",)),
    # the runner was asked to give it back, for another runner of this node
    ("shifting", "began"): ("running", ("start limit", "tell started")),
    ("shifting", "recall"): ("returning", ()),
    ("shifting", "cancel"): ("withdrawn", ("send cancel",)),
    ("shifting", "returned"): ("queued", ("queue",)),
    ("shifting", "ended"): ("gone", ("tell verdict",)),
    ("shifting", "exited"): ("queued", ("queue",)),
    # to be stopped, and not known to have begun: the runner gives it back, or stops it
    ("withdrawn", "began"): ("stopping", ("start grace",)),
    ("withdrawn", "returned"): ("gone", ("tell stopped",)),
    ("withdrawn", "ended"): ("gone", ("tell stopped",)),
    ("withdrawn", "exited"): ("gone", ("tell stopped",)),
    # its body runs
    ("running", "cancel"): _STOP,
    ("running", "limit"): _STOP,
    ("running", "ended"): ("gone", ("tell verdict",)),
    ("running", "exited"): ("gone", ("tell crashed",)),
    ("running", "process killed"): ("doomed", ()),
    # its body was asked to end
    ("stopping", "grace"): ("stopping", ("kill process",)),
    ("stopping", "ended"): ("gone", ("tell stopped",)),
    ("stopping", "exited"): ("gone", ("tell stopped",)),
    # its body runs in a process that is killed for another reason
    ("doomed", "ended"): ("gone", ("tell verdict",)),
    ("doomed", "exited"): ("gone", ("tell lost",)),
}

SLOTS: dict[tuple[str, str], Row] = {
    ("starting", "ready"): ("ready", ("tell ready",)),
    ("starting", "failed"): ("failed", ()),
    ("starting", "exited"): ("gone", ("count failure", "tell replaced", "spawn")),
    ("starting", "retire"): ("retired", ("kill",)),
    ("ready", "leaving"): ("leaving", ("spawn beside",)),
    ("ready", "exited"): ("gone", ("tell replaced", "spawn")),
    ("ready", "retire"): ("retired", ("kill",)),
    ("leaving", "exited"): ("gone", ("tell replaced", "spawn")),
    ("leaving", "retire"): ("retired", ("kill",)),
    ("failed", "exited"): ("gone", ()),
    ("failed", "retire"): ("retired", ("kill",)),
    ("retired", "exited"): ("gone", ()),
}

UNBEGUN = frozenset(("sent", "returning", "shifting", "withdrawn"))
_AHEAD_SECONDS = 0.002
_AHEAD_ONE_SECONDS = 0.2
_AHEAD_MOST = 32


def sent_ahead(mean: float | None, threads: int) -> int:
    """How many calls a runner gets beyond those it runs: none if they are long, so that another may take them."""
    if mean is None or mean > _AHEAD_ONE_SECONDS:
        return 0
    if mean > _AHEAD_SECONDS:
        return threads
    return threads * min(_AHEAD_MOST, int(_AHEAD_SECONDS / max(mean, 1e-6)))


class NodeCall:
    """A call on this node."""

    __slots__ = (
        *("about", "asked", "backlog", "began", "buffers", "digests", "grace", "id"),
        *("killed", "missing", "order", "reason", "slot", "state", "why"),
    )

    def __init__(self, call_id: str, about: dict[str, Any], buffers: list[Any]) -> None:
        self.id, self.about, self.buffers = call_id, about, buffers
        self.state = "queued"
        self.order = 0
        self.slot: Slot | None = None
        self.began: float | None = None
        self.why = ""  # what is told when it was stopped: cancelled, timeout, gang
        self.reason = ""  # why its process is killed
        self.asked = self.grace = 0.0
        self.killed = False
        self.digests: list[str] = []
        self.missing: set[str] = set()
        self.backlog: list[tuple[list[Any], list[Any]]] = []

    @property
    def place(self) -> int | None:
        """Which of the node's processes must run it, by local rank: a rank of a broadcast says so."""
        return self.about.get("place", 0) if self.about.get("gang") else None

    @property
    def movable(self) -> bool:
        """Whether it may go to another node: a rank of a broadcast may not, nor one whose arguments stream here."""
        return not self.about.get("gang") and not self.about.get("streams")


class Slot:
    """A runner process, and the calls it has; `threads` of them run at a time. `place` is its local rank."""

    __slots__ = ("calls", "look_at", "name", "place", "since", "state", "stops", "threads")

    def __init__(self, name: str, threads: int, now: float, place: int = 0) -> None:
        self.name, self.threads, self.since, self.place = name, threads, now, place
        self.state = "starting"
        self.calls: OrderedDict[str, NodeCall] = OrderedDict()
        self.look_at: float | None = None
        self.stops: set[str] = set()  # calls that may cost the process
