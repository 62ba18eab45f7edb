"""What the page shows, computed from a pool's history as it grows; answers are small however long the history is.

Told what happened (`apply`), asked by the server: nothing here reads files, clocks or sockets.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from skyward import events
from skyward.events import Event
from skyward.view.page.curves import SAMPLES, thinned
from skyward.view.page.lanes import FAILED, ROWS, PageCall, PageNode, blocks

__all__ = ["PageModel"]

_LINES = 200_000  # of output that can be searched
_MOMENTS = 5_000
_CURVES = 400
_BLOCKS = 20_000  # in one answer
_HOUR = 3600.0
_JITTER = 0.02  # seconds by which the client may have heard late of an end


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    time: float
    node: int
    stream: str
    text: str
    call: str | None


class PageModel:
    """The state of one pool, as the page asks for it."""

    def __init__(self, pool: str) -> None:
        self.pool, self.state, self.provider = pool, "opening", ""
        self.began = self.last = 0.0
        self.revision = 0
        self._nodes: dict[int, PageNode] = {}
        self._calls: list[PageCall] = []
        self._by_id: dict[str, PageCall] = {}
        self._done = self._failed = 0
        self._lines: deque[_Line] = deque(maxlen=_LINES)
        self._written = 0
        self._metrics: dict[tuple[str, int, int | None, str | None], deque[tuple[float, float]]] = {}
        self._groups: dict[int, events.GroupProgress] = {}
        self._moments: deque[tuple[float, str, str, int | None]] = deque(maxlen=_MOMENTS)
        self._hourly, self._spent, self._since = 0.0, 0.0, 0.0

    def apply(self, found: Iterable[Event]) -> None:
        """Takes in what has happened."""
        for event in found:
            self.began = self.began or event.time
            self.last = max(self.last, event.time)
            self.revision += 1
            handler = getattr(self, f"_on_{type(event).__name__}", None)
            if handler is not None:
                handler(event)

    # answers

    def summary(self, now: float) -> dict[str, Any]:
        """What stands at the top of the page."""
        up = sum(node.state == "up" for node in self._nodes.values())
        over = self.state in ("closed", "killed")
        end = self.last if over else now
        recent = 0 if over else self._rate(now)
        cost = self._spent + (0.0 if over else self._hourly * max(0.0, now - self._since) / _HOUR)
        return {
            "pool": self.pool,
            "state": self.state,
            "provider": self.provider,
            "revision": self.revision,
            "began": self.began,
            "now": end,
            "nodes": len(self._nodes),
            "up": up,
            "calls": len(self._calls),
            "running": sum(node.running for node in self._nodes.values()),
            "done": self._done,
            "failed": self._failed,
            "rate": recent,
            "cost": _finite(cost) if self._hourly or self._spent else None,
            "hourly": _finite(self._hourly),
            "groups": [
                {key: getattr(g, key) for key in ("name", "done", "failed", "total", "left", "rate", "over")}
                for g in list(self._groups.values())[-8:]
            ],
        }

    def nodes(self, since: float) -> list[dict[str, Any]]:
        """Every node with its figures over time, from `since` on."""
        return [
            {
                "node": number,
                "state": node.state,
                "running": node.running,
                "done": node.done,
                "failed": node.failed,
                "cpu": thinned(zip(node.times, node.cpu, strict=True), since),
                "memory": thinned(zip(node.times, node.memory, strict=True), since),
                "gpus": [
                    {
                        "index": index,
                        "name": name,
                        "use": thinned(((t, use) for t, use, _ in found), since),
                        "memory": thinned(((t, used) for t, _, used in found), since),
                    }
                    for index, (name, found) in sorted(node.gpus.items())
                ],
            }
            for number, node in sorted(self._nodes.items())
        ]

    def lanes(self, start: float, end: float, width: int, now: float) -> list[dict[str, Any]]:
        """The calls of a window of time, node by node: as blocks, in which calls too short to be seen are one.

        A block is [row, start, end, how many calls, outcome, name, id of the call if it is one].
        """
        tick = max(1e-6, (end - start) / max(1, width))
        room = max(50, _BLOCKS // max(1, len(self._nodes)))
        return [
            {"node": number, "rows": max(1, len(node.rows)), "blocks": blocks(node, start, end, tick, now)[:room]}
            for number, node in sorted(self._nodes.items())
        ]

    def calls(
        self, text: str = "", node: int | None = None, outcome: str = "", before: int | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """Calls, the newest first: those whose name, arguments or error have `text`; from number `before` down."""
        found: list[dict[str, Any]] = []
        wanted = text.lower()
        last = len(self._calls) if before is None else max(0, min(before, len(self._calls)))
        for index in range(last - 1, -1, -1):
            call = self._calls[index]
            if node is not None and call.node != node:
                continue
            if outcome and not (call.outcome == outcome or (outcome == "failed" and call.outcome in FAILED)):
                continue
            if wanted and wanted not in f"{call.name}({call.arguments}) {call.error} {call.id}".lower():
                continue
            found.append(_row(call))
            if len(found) >= limit:
                break
        return found

    def call(self, id: str) -> dict[str, Any] | None:
        """All that is known of one call."""
        call = self._by_id.get(id)
        if call is None:
            return None
        lines = [_written(line) for line in self._lines if line.call == id]
        return {**_row(call), "error": call.error, "output": lines[-2000:]}

    def output(
        self, text: str = "", node: int | None = None, call: str = "", before: int | None = None, limit: int = 300
    ) -> list[dict[str, Any]]:
        """Lines of output, the newest first."""
        wanted, found = text.lower(), list[dict[str, Any]]()
        for line in reversed(self._lines):
            if before is not None and line.number >= before:
                continue
            if (node is not None and line.node != node) or (call and line.call != call):
                continue
            if wanted and wanted not in line.text.lower():
                continue
            found.append(_written(line))
            if len(found) >= limit:
                break
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """What bodies have reported, as curves by step, one for each call."""
        return [
            {
                "name": name,
                "node": node,
                "rank": rank,
                "call": call,
                "points": thinned(points, -math.inf),
            }
            for (name, node, rank, call), points in sorted(self._metrics.items(), key=lambda item: item[0][:2])
        ]

    def moments(self, before: int | None = None, limit: int = 300) -> list[dict[str, Any]]:
        """Warnings, nodes that came and went, steps of opening: the newest first."""
        found = list(self._moments)
        last = len(found) if before is None else max(0, min(before, len(found)))
        return [
            {"number": i, "time": found[i][0], "kind": found[i][1], "text": found[i][2], "node": found[i][3]}
            for i in range(last - 1, max(-1, last - 1 - limit), -1)
        ]

    # what happens

    def _on_PoolOpening(self, event: events.PoolOpening) -> None:
        self.state, self.provider = "opening", event.provider
        for number in range(event.nodes):
            self._node(number)

    def _on_PoolOpened(self, event: events.PoolOpened) -> None:
        self.state = "open"
        for node in self._nodes.values():
            if node.state in ("waiting", "ready"):
                node.state = "up"
        self._say(event, "pool", f"open: {event.nodes} nodes, {event.slots} slots, after {event.seconds:.1f} s")

    def _on_PoolClosing(self, event: events.PoolClosing) -> None:
        self.state = "closing"
        self._say(event, "pool", "closing")

    def _on_PoolClosed(self, event: events.PoolClosed) -> None:
        self.state = "closed"
        self._account(event.time, 0.0)
        for node in self._nodes.values():
            node.state, node.running = "gone", 0
        self._say(event, "pool", f"closed after {event.seconds:.1f} s")

    def _on_PoolCost(self, event: events.PoolCost) -> None:
        self._account(event.time, event.hourly if math.isfinite(event.hourly) else 0.0)

    def _on_NodePhase(self, event: events.NodePhase) -> None:
        if event.node is not None and event.phase == "ready":
            self._node(event.node).state = "up" if self.state == "open" else "ready"
        self._say(event, "set-up", event.phase, event.node)

    def _on_NodeUp(self, event: events.NodeUp) -> None:
        self._node(event.node).state = "up"
        self._say(event, "node", "takes calls again", event.node)

    def _on_NodeDown(self, event: events.NodeDown) -> None:
        node = self._node(event.node)
        node.state, node.running = "down", 0
        self._say(event, "warning", event.reason, event.node)

    def _on_NodeLeaving(self, event: events.NodeLeaving) -> None:
        self._node(event.node).state = "leaving"
        self._say(event, "warning", f"will be taken away in {event.seconds:.0f} s", event.node)

    def _on_Notice(self, event: events.Notice) -> None:
        self._say(event, "warning" if event.level == "warning" else "note", event.text)

    def _on_NodeSample(self, event: events.NodeSample) -> None:
        node = self._node(event.node)
        node.times.append(event.time)
        node.cpu.append(event.cpu)
        node.memory.append(event.memory)
        for gpu in event.gpus:
            known = node.gpus.setdefault(gpu.index, (gpu.name, deque(maxlen=SAMPLES)))
            known[1].append((event.time, gpu.utilization or 0.0, float(gpu.memory_used or 0)))

    def _on_CallStarted(self, event: events.CallStarted) -> None:
        before = self._by_id.get(event.call)
        if before is not None and before.outcome == "running":
            self._finish(before, event.time, max(0.0, event.time - before.began), "lost", "")
            self._node(before.node).failed += 1
        made = (event.call, event.name, event.node, event.rank, event.time, event.arguments, event.attempt)
        call = PageCall(len(self._calls), *made)
        node = self._node(event.node)
        at = event.time + _JITTER
        free = next((row for row, until in enumerate(node.rows) if until <= at), len(node.rows))
        call.row = min(free, ROWS - 1)
        if call.row == len(node.rows):
            node.rows.append(math.inf)
        else:
            node.rows[call.row] = math.inf
        node.running += 1
        at = bisect_left(node.starts, call.began)  # nearly always the end
        node.starts.insert(at, call.began)
        node.calls.insert(at, call)
        self._calls.append(call)
        self._by_id[event.call] = call

    def _on_CallEnded(self, event: events.CallEnded) -> None:
        call = self._by_id.get(event.call)
        if (call is None or call.outcome != "running") and event.node >= 0:  # it was over before it was told of
            e, began = event, event.time - event.seconds
            at = (e.pool, e.call, e.name, e.node, e.attempt, e.rank, e.arguments)
            self._on_CallStarted(events.CallStarted(*at, time=began))
            call = self._by_id.get(event.call)
        self._done += event.done
        self._failed += event.failed
        if call is not None:  # it has begun
            self._finish(call, event.time, event.seconds, event.outcome, event.error)
            node = self._node(call.node)
            node.done += event.done
            node.failed += event.failed

    def _finish(self, call: PageCall, now: float, seconds: float, outcome: str, error: str) -> None:
        call.seconds, call.outcome, call.error = seconds, outcome, error
        node = self._node(call.node)
        node.running = max(0, node.running - 1)
        node.longest = max(node.longest, seconds)
        node.rows[call.row] = min(now, call.began + seconds)

    def _on_Output(self, event: events.Output) -> None:
        self._line(event, event.node, event.stream, event.text, event.call)

    def _on_Log(self, event: events.Log) -> None:
        self._line(event, event.node, "stderr", f"{event.logger}: {event.text}", event.call)

    def _on_Warned(self, event: events.Warned) -> None:
        text = f"{event.path}:{event.line}: {event.category}: {event.text}"
        self._line(event, event.node, "stderr", text, event.call)

    def _on_Progress(self, event: events.Progress) -> None:
        for name, value in event.metrics.items():
            if math.isfinite(value):
                key = (name, event.node, event.rank, event.call)
                self._metrics.setdefault(key, deque(maxlen=SAMPLES)).append((event.step, value))
        while len(self._metrics) > _CURVES:
            del self._metrics[next(iter(self._metrics))]  # of the calls that reported first

    def _on_GroupProgress(self, event: events.GroupProgress) -> None:
        self._groups.pop(event.group, None)
        self._groups[event.group] = event

    # how

    def _node(self, number: int) -> PageNode:
        return self._nodes.setdefault(number, PageNode())

    def _line(self, event: Event, node: int, stream: str, text: str, call: str | None) -> None:
        self._lines.append(_Line(self._written, event.time, node, stream, text, call))
        self._written += 1

    def _say(self, event: Event, kind: str, text: str, node: int | None = None) -> None:
        self._moments.append((event.time, kind, text, node))

    def _account(self, now: float, hourly: float) -> None:
        self._spent += self._hourly * max(0.0, now - self._since) / _HOUR
        self._hourly, self._since = hourly, now

    def _rate(self, now: float, window: float = 10.0) -> float:
        ended = 0
        for call in reversed(self._calls):
            if call.began < now - 2 * window:
                break
            ended += call.seconds is not None and call.began + call.seconds > now - window
        return ended / window


def _row(call: PageCall) -> dict[str, Any]:
    return {
        "number": call.number,
        "id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "node": call.node,
        "rank": call.rank,
        "began": call.began,
        "seconds": call.seconds,
        "outcome": call.outcome,
        "attempt": call.attempt,
        "why": call.error.rstrip().rpartition("\n")[2][:300],
    }


def _written(line: _Line) -> dict[str, Any]:
    return {
        "number": line.number,
        "time": line.time,
        "node": line.node,
        "stream": line.stream,
        "text": line.text[:4000],
        "call": line.call,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
