"""Looks for what must not be among a node's calls and runners: the net under the logic's own mistakes."""

from __future__ import annotations

from skyward.node.agent_slots import RunnerSlots

__all__ = ["Audit"]


class Audit:
    """A finding counts when it is seen twice in a row: once, it may be about to pass."""

    def __init__(self, runners: RunnerSlots) -> None:
        self._runners = runners
        self._seen: set[str] = set()

    def look(self, call_waits: bool, now: float) -> dict[str, str]:
        """What was found now and the last time, in words: by the runner, or under "queue" or "spawn"."""
        runners = self._runners
        found = {slot.name: text for slot in runners.all.values() if (text := runners.overdue(slot, now))}
        if call_waits:
            found["queue"] = "a call waited beside a free slot; it was sent"
        if runners.lacking() and not runners.closing:
            found["spawn"] = "a process was missing; it was started"
        twice = {name: found[name] for name in sorted(found.keys() & self._seen)}
        self._seen = set(found)
        return twice
