"""The runner processes of one node, as far as their life goes: which start, serve, leave, are to be replaced.

No process here: `RunnerSlots` is told what happens to them, and returns what is to be done.
"""

from __future__ import annotations

import itertools
from typing import Any

from skyward.node.agent_tables import SLOTS, NodeCall, Slot
from skyward.node.protocol import AgentToClient

__all__ = ["Action", "RunnerSlots"]

Action = tuple[Any, ...]
"""What the agent is to do: ("send", slot, message, buffers), ("tell", call, message, buffers), ("kill", slot),
("spawn", slot), ("drop", digests), ("remove", paths)."""

_SPAWN_ATTEMPTS = 3
_OVERDUE = 5.0
_LOOK, _LOOK_AGAIN = 0.05, 0.25  # after a call was sent, and while it waits


class RunnerSlots:
    """All runner processes, those that are being ended included."""

    def __init__(self) -> None:
        self.all: dict[str, Slot] = {}
        self.processes, self.places, self.closing = 0, 1, False
        self._threads, self._generation, self._hooks = 1, 0, False
        self._failures = 0
        self._names = itertools.count()

    def configure(self, settings: dict[str, Any], hooks: bool) -> None:
        """Says how many are wanted from now on, and how they are: for each of the node's ranks equally many."""
        self.processes, self.places = settings["processes"], len(settings["places"])
        self._threads, self._generation, self._hooks = settings["threads"], settings["generation"], hooks
        self._failures = 0

    def spawn_missing(self, now: float) -> list[Action]:
        """Has those started that are lacking."""
        actions: list[Action] = []
        while (place := self._vacancy()) is not None and not self.closing:
            name = f"{self._generation}-{next(self._names)}"
            slot = self.all[name] = Slot(name, self._threads, now, place)
            actions.append(("spawn", slot))
        return actions

    def lacking(self) -> bool:
        """Whether fewer are there than are wanted, and another may be tried."""
        return self._vacancy() is not None

    def _vacancy(self) -> int | None:
        """The place of a process that is lacking: the next one takes the local rank of the one that is gone."""
        if self._failures >= _SPAWN_ATTEMPTS:
            return None
        taken = [slot.place for slot in self._serving()]
        wanted = self.processes // self.places
        return next((place for place in range(self.places) if taken.count(place) < wanted), None)

    def give_up(self) -> None:
        """The hooks of one have failed, and would fail in the next as well: the client decides."""
        self._failures = _SPAWN_ATTEMPTS

    def move(self, slot: Slot, event: str, now: float, status: int = 0, stderr: str = "") -> list[Action] | None:
        """Moves a runner along its table; None if the event changes nothing in its state."""
        row = SLOTS.get((slot.state, event))
        if row is None:
            return None
        slot.state, names = row
        slot.since = now
        if slot.state == "gone":
            del self.all[slot.name]
        actions: list[Action] = []
        for name in names:
            if name == "kill":
                actions.append(("kill", slot))
            elif name == "tell ready":
                self._failures = 0
                if not self.lacking() and all(s.state == "ready" for s in self._serving()):
                    actions.append(("tell", None, AgentToClient.ready(self._generation), None))
            elif name == "tell replaced" and not self.closing:
                actions.append(("tell", None, AgentToClient.replaced(self._generation, slot.place), None))
            elif name == "count failure":
                actions += self._count_failure(slot, status, stderr)
            elif name == "spawn" or (name == "spawn beside" and slot.threads > 1 and not self._hooks):
                actions += self.spawn_missing(now)
        return actions

    def look_soon(self, slot: Slot, call: NodeCall, now: float) -> None:
        """Has a runner's status page read soon: it was sent a call."""
        look_at = now + min(_LOOK, call.about.get("timeout") or _LOOK)
        slot.look_at = look_at if slot.look_at is None else min(slot.look_at, look_at)

    def look_again(self, slot: Slot, now: float) -> None:
        """Has a status page read again while a call may begin there."""
        waits = [call.about.get("timeout") or _LOOK_AGAIN for call in slot.calls.values() if call.began is None]
        slot.look_at = now + min(_LOOK_AGAIN, *waits) if waits else None

    def looks(self, now: float) -> list[str]:
        """Runners whose status page is to be read now."""
        return [slot.name for slot in self.all.values() if slot.look_at is not None and slot.look_at <= now]

    def next_look(self) -> float:
        """When the next status page is to be read."""
        return min((slot.look_at for slot in self.all.values() if slot.look_at is not None), default=float("inf"))

    def overdue(self, slot: Slot, now: float) -> str:
        """What is wrong with a runner that should be gone by now."""
        late = [c for c in slot.calls.values() if c.state == "stopping" and now > c.asked + c.grace + _OVERDUE]
        if late:
            return f"call {late[0].id} outlived its stop; its process was killed again"
        if slot.state in ("leaving", "retired") and not slot.calls and now > slot.since + _OVERDUE:
            return f"process {slot.name} had nothing to do and did not end; it was killed again"
        return ""

    def _count_failure(self, slot: Slot, status: int, stderr: str) -> list[Action]:
        self._failures += 1
        if self._failures != _SPAWN_ATTEMPTS or self.closing:
            return []
        which = f" (local rank {slot.place})" if self.places > 1 else ""
        text = f"a runner{which} ended with status {status} before it was ready.\n{stderr}"
        error = {"type": "", "message": text, "traceback": ""}
        return [("tell", None, AgentToClient.failed(error, self._generation, 1), [b""])]

    def _serving(self) -> list[Slot]:
        """Runners that take calls, or will; and one that leaves, where the next must wait for it to be gone."""
        beside = ("leaving",) if self._hooks or self._threads == 1 else ()
        return [slot for slot in self.all.values() if slot.state in ("starting", "ready", "failed", *beside)]
