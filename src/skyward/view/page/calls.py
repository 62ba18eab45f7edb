"""The calls of a pool as the page lists them: searched, a broadcast as one row, each with its earlier attempts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyward.events import CallEnded
from skyward.history.summary import summary
from skyward.view.page.timeline import FAILED, PageCall

__all__ = ["Broadcast", "PageCalls", "died"]


@dataclass(slots=True)
class Broadcast:
    """The ranks of a broadcast, as far as they have begun."""

    id: str
    calls: list[PageCall]

    def told(self) -> dict[str, Any]:
        """What the page shows of it."""
        ended = [call.ended for call in self.calls]
        return {
            "id": self.id,
            "name": self.calls[0].name,
            "ranks": len(self.calls),
            "running": sum(call.outcome == "running" for call in self.calls),
            "failed": sum(call.outcome in FAILED for call in self.calls),
            "nodes": [min(call.node for call in self.calls), max(call.node for call in self.calls)],
            "began": min(call.began for call in self.calls),
            "ended": None if None in ended else max(end or 0.0 for end in ended),
        }


class PageCalls:
    """Every attempt of every call, in the order in which they began to be known."""

    def __init__(self) -> None:
        self.all: list[PageCall] = []
        self.broadcasts: dict[str, Broadcast] = {}
        self._by_id: dict[str, PageCall] = {}

    def add(self, call: PageCall) -> None:
        """One more attempt of a call."""
        call.before = self._by_id.get(call.id)
        self.all.append(call)
        self._by_id[call.id] = call
        if call.group:
            self.broadcasts.setdefault(call.group, Broadcast(call.group, [])).calls.append(call)

    def get(self, id: str) -> PageCall | None:
        """The last attempt of a call."""
        return self._by_id.get(id)

    def search(
        self, text: str = "", node: int | None = None, outcome: str = "", before: int | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """Calls, the newest first: those whose name, arguments or error have `text`; from number `before` down.

        A broadcast is one row, that of its last rank, where nothing else is asked for.
        """
        found, wanted = list[dict[str, Any]](), text.lower()
        whole = not (wanted or outcome or node is not None)
        last = len(self.all) if before is None else max(0, min(before, len(self.all)))
        for index in range(last - 1, -1, -1):
            call = self.all[index]
            if whole and call.group and self.broadcasts[call.group].calls[-1] is not call:
                continue
            if node is not None and call.node != node:
                continue
            if outcome and not (call.outcome == outcome or (outcome == "failed" and call.outcome in FAILED)):
                continue
            if wanted and not _has(call, wanted):
                continue
            row = shown(call)
            if whole and call.group:
                row["broadcast"] = self.broadcasts[call.group].told()
            found.append(row)
            if len(found) >= limit:
                break
        return found

    def details(self, id: str) -> dict[str, Any] | None:
        """What is known of one call, but for its output."""
        call = self._by_id.get(id)
        if call is None:
            return None
        earlier, attempts = call.before, list[dict[str, Any]]()
        while earlier is not None and len(attempts) < 20:
            attempts.append(shown(earlier))
            earlier = earlier.before
        group = self.broadcasts.get(call.group)
        ranks = [shown(each) for each in group.calls[:200]] if group is not None else []
        return {**shown(call), "error": call.error, "earlier": attempts, "ranks": ranks}


def shown(call: PageCall) -> dict[str, Any]:
    """A call as a row of a list."""
    return {
        "number": call.number,
        "id": call.id,
        "name": call.name[:200],
        "arguments": call.arguments[:1000],
        "node": call.node,
        "rank": call.rank,
        "began": call.began,
        "seconds": call.seconds,
        "waited": round(call.waited, 4),
        "outcome": call.outcome,
        "attempt": call.attempt,
        "items": call.items,
        "progress": call.progress,
        "why": summary(call.outcome, call.error)[:300],
    }


def _has(call: PageCall, wanted: str) -> bool:
    return (
        wanted in call.name.lower()
        or wanted in call.arguments.lower()
        or wanted in f"{call.name}({call.arguments})".lower()
        or (bool(call.error) and wanted in call.error.lower())
        or wanted == call.id
    )


def died(event: CallEnded) -> str:
    """What is said of a process that died while it ran a call."""
    why = summary("crashed", event.error).removeprefix("TaskCrashed: ").partition(". ")[0]
    return why or f"the process that ran {event.name} died"
