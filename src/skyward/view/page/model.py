"""What the page shows, computed from a pool's history as it grows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from skyward import events
from skyward.events import CallEnded, Event
from skyward.history.lines import Skipped, summary
from skyward.history.state import FAILED, Attempt, PoolState
from skyward.view.terminal import clean

__all__ = ["ROWS", "PageModel", "Reports", "Timeline", "died", "thinned"]


ROWS = 64

_TILE = 256  # ticks
_TILES = 2_000  # kept for a node
_JITTER = 0.02  # seconds by which the client may have heard late of an end

Block = list[Any]


@dataclass(slots=True)
class _Class:
    starts: list[float] = field(default_factory=list[float])
    calls: list[Attempt] = field(default_factory=list[Attempt])
    longest: float = 0.0


class Timeline:
    def __init__(self) -> None:
        self.rows: list[float] = []  # until when each is taken
        self.running: dict[int, Attempt] = {}
        self._starts: list[float] = []
        self._calls: list[Attempt] = []
        self._lengths: dict[int, _Class] = {}
        self._tiles: dict[tuple[int, int], list[Block]] = {}
        self._levels: set[int] = set()

    def begin(self, call: Attempt) -> None:
        at = call.began + _JITTER
        free = next((row for row, until in enumerate(self.rows) if until <= at), len(self.rows))
        call.row = min(free, ROWS - 1)
        if call.row == len(self.rows):
            self.rows.append(math.inf)
        else:
            self.rows[call.row] = math.inf
        where = bisect_left(self._starts, call.began)  # nearly always the end
        self._starts.insert(where, call.began)
        self._calls.insert(where, call)
        self.running[call.number] = call
        self._forget(call)

    def end(self, call: Attempt) -> None:
        until = call.ended if call.ended is not None else call.began
        self.running.pop(call.number, None)
        self.rows[call.row] = until
        length = until - call.began
        same = self._lengths.setdefault(math.frexp(max(length, 0.001))[1], _Class())
        where = bisect_left(same.starts, call.began)
        same.starts.insert(where, call.began)
        same.calls.insert(where, call)
        same.longest = max(same.longest, length)
        self._forget(call)

    def blocks(self, start: float, end: float, tick: float, now: float) -> list[Block]:
        """Blocks of at least about a `tick`: [row, start, end, calls, outcome, name, id if one call, failed]."""
        level = math.ceil(math.log2(tick))
        span = _TILE * 2.0**level
        first = math.floor(start / span)
        found = _merged(self._across(first * span, start, end), 2.0**level, now)
        for tile in range(first, math.floor(end / span) + 1):
            found += self._tile(level, tile, span, now)
        return [block for block in found if block[2] >= start and block[1] <= end]

    def _across(self, before: float, start: float, end: float) -> list[Attempt]:
        found = [call for call in self.running.values() if call.began < before]
        for same in self._lengths.values():
            low = bisect_left(same.starts, start - same.longest)
            high = bisect_left(same.starts, before)
            found += [call for call in same.calls[low:high] if (call.ended or 0.0) >= start and call.began <= end]
        return sorted(found, key=lambda call: call.began)

    def _tile(self, level: int, tile: int, span: float, now: float) -> list[Block]:
        known = self._tiles.get((level, tile))
        if known is not None:
            return known
        low, high = bisect_left(self._starts, tile * span), bisect_left(self._starts, (tile + 1) * span)
        calls = self._calls[low:high]
        made = _merged(calls, 2.0**level, now)
        if all(call.ended is not None for call in calls):
            if len(self._tiles) >= _TILES:
                self._tiles.clear()
            self._tiles[level, tile] = made
            self._levels.add(level)
        return made

    def _forget(self, call: Attempt) -> None:
        for level in self._levels:
            self._tiles.pop((level, math.floor(call.began / (_TILE * 2.0**level))), None)


def _merged(calls: Iterable[Attempt], tick: float, now: float) -> list[Block]:
    shown: dict[int, Block] = {}
    return list(_made(calls, tick, now, shown))


def _made(calls: Iterable[Attempt], tick: float, now: float, shown: dict[int, Block]) -> Iterator[Block]:
    for call in calls:
        until = call.ended if call.ended is not None else max(now, call.began)
        block = shown.get(call.row)
        short, failed = until - call.began < tick, int(call.outcome in FAILED)
        if short and block is not None and call.began - block[2] < tick and block[2] - block[1] < 8 * tick:
            block[2], block[3], block[6] = max(block[2], until), block[3] + 1, ""
            block[4], block[7] = call.outcome if failed else block[4], block[7] + failed
            block[5] = block[5] if block[5] == call.name else "several functions"
            continue
        block = [call.row, call.began, until, 1, call.outcome, call.name, call.id, failed]
        shown[call.row] = block
        yield block


@dataclass(slots=True)
class Broadcast:
    id: str
    calls: list[Attempt]

    def told(self) -> dict[str, Any]:
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
    def __init__(self) -> None:
        self.all: list[Attempt] = []
        self.broadcasts: dict[str, Broadcast] = {}
        self._by_id: dict[str, Attempt] = {}

    def add(self, call: Attempt) -> None:
        call.number, call.before = len(self.all), self._by_id.get(call.id)
        self.all.append(call)
        self._by_id[call.id] = call
        if call.group:
            self.broadcasts.setdefault(call.group, Broadcast(call.group, [])).calls.append(call)

    def get(self, id: str) -> Attempt | None:
        return self._by_id.get(id)

    def search(
        self, text: str = "", node: int | None = None, outcome: str = "", before: int | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """Newest first. A broadcast is one row unless more is requested."""
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


def shown(call: Attempt) -> dict[str, Any]:
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


def _has(call: Attempt, wanted: str) -> bool:
    return (
        wanted in call.name.lower()
        or wanted in call.arguments.lower()
        or wanted in f"{call.name}({call.arguments})".lower()
        or (bool(call.error) and wanted in call.error.lower())
        or wanted == call.id
    )


def died(event: CallEnded) -> str:
    why = summary("crashed", event.error).removeprefix("TaskCrashed: ").partition(". ")[0]
    return why or f"the process that ran {event.name} died"


SAMPLES = 20_000

Point = tuple[float, float]


class Curve:
    __slots__ = ("at", "values")

    def __init__(self) -> None:
        self.at: list[float] = []
        self.values: list[float] = []

    def add(self, at: float, value: float) -> None:
        if not math.isfinite(value) or not math.isfinite(at):
            return
        self.at.append(at)
        self.values.append(value)
        if len(self.at) >= 2 * SAMPLES:
            del self.at[:SAMPLES], self.values[:SAMPLES]

    def points(self, most: int, since: float = -math.inf) -> list[Point]:
        first = 0 if since == -math.inf else bisect_left(self.at, since)
        return thinned(list(zip(self.at[first:], self.values[first:], strict=True)), most)


def thinned(found: Sequence[Point], most: int) -> list[Point]:
    """From each stretch, the point that differs most from the one before."""
    most = max(3, most)
    if len(found) <= most:
        return [_short(point) for point in found]
    size, chosen = len(found) / (most - 2), [found[0]]
    for index in range(most - 2):
        stretch = found[int(index * size) : max(int((index + 1) * size), int(index * size) + 1)]
        chosen.append(max(stretch, key=lambda point: abs(point[1] - chosen[-1][1])))
    return [_short(point) for point in [*chosen, found[-1]]]


def _short(point: Point) -> Point:
    at, value = point
    return round(at, 2), float(f"{value:.5g}")


_MOMENTS = 5_000
_BLOCKS = 12_000  # in one answer
_BROADCASTS = 300
_NARROWEST = 3  # pixels that a block has at least
_SPARK = 60  # points of a curve of a node
_WINDOW = 10  # seconds over which the rate of calls is taken


@dataclass(slots=True)
class _Gpu:
    name: str
    use: Curve = field(default_factory=Curve)
    memory: Curve = field(default_factory=Curve)
    total: int | None = None


@dataclass(slots=True)
class _Node:
    cpu: Curve = field(default_factory=Curve)
    memory: Curve = field(default_factory=Curve)
    gpus: dict[int, _Gpu] = field(default_factory=dict[int, _Gpu])
    time: Timeline = field(default_factory=Timeline)


class PageModel:
    def __init__(self, pool: str) -> None:
        self.pool, self.killed, self._pool = pool, False, PoolState()
        self.began = self.last = 0.0
        self.revision = 0
        self._nodes: dict[int, _Node] = {}
        self._calls = PageCalls()
        self._recent: Counter[int] = Counter()  # calls that ended, by second
        self._lines = OutputLines()
        self._reports = Reports()
        self._queue = Curve()
        self._moments: deque[tuple[float, str, str, int | None]] = deque(maxlen=_MOMENTS)
        self._said = 0
        self._skipped = Skipped("")

    def apply(self, found: Iterable[Event]) -> None:
        for event in found:
            self.began = self.began or event.time
            self.last = max(self.last, event.time)
            self.revision += 1
            for attempt in self._pool.apply(event, event.time):
                self._follow(attempt)
            self._on(event)

    @property
    def state(self) -> str:
        return "killed" if self.killed else self._pool.stage or "opening"

    # answers

    def summary(self, now: float) -> dict[str, Any]:
        over = self.state in ("closed", "killed")
        pool, hourly = self._pool, self._pool.hourly or 0.0
        return {
            "pool": self.pool,
            "state": self.state,
            "provider": pool.provider,
            "revision": self.revision,
            "began": self.began,
            "now": self.last if over else now,
            "nodes": len(pool.nodes),
            "up": sum(node.status == "up" for node in pool.nodes.values()),
            "calls": len(self._calls.all),
            "running": 0 if over else len(pool.calls),
            "waiting": 0 if over else pool.queued,
            "done": pool.done + self._skipped.ok,
            "failed": pool.failed,
            "cancelled": pool.cancelled,
            "rate": 0.0 if over else self._rate(now),
            "cost": pool.spent(self.last if over else now) if _has_price(pool) else None,
            "hourly": 0.0 if over else _finite(hourly),
            "unpriced": not pool.price_known,
            "skipped": self._skipped.count,
            "groups": [
                {name: getattr(group, name) for name in ("name", "done", "failed", "total", "left", "rate", "over")}
                for group, _ in list(pool.groups.values())[-8:]
            ],
        }

    def nodes(self, since: float = 0.0, first: int = 0, last: int | None = None) -> list[dict[str, Any]]:
        found = sorted(self._pool.nodes.items())
        shown = range(first, len(found) if last is None else last)
        return [
            {
                "node": number,
                "state": node.status,
                "running": len(self._node(number).time.running),
                "done": node.done,
                "failed": node.failed,
                **(_figures(self._node(number), since) if place in shown else {}),
            }
            for place, (number, node) in enumerate(found)
        ]

    def lanes(
        self, start: float, end: float, width: int, now: float, first: int = 0, last: int | None = None
    ) -> dict[str, Any]:
        """`Timeline.blocks` of nodes from `first` to before `last`, with times counted from `start`."""
        tick = max(1e-6, _NARROWEST * (end - start) / max(1, width))
        over = self.state in ("closed", "killed")
        until = self.last if over else now
        found = [(number, self._node(number)) for number in sorted(self._pool.nodes)]
        shown = found[first:last]
        room = max(100, _BLOCKS // max(1, len(shown)))
        digits = max(0, min(6, 1 - math.floor(math.log10(tick))))
        blocks = {
            number: [
                [row, round(a - start, digits), round(b - start, digits), *rest]
                for row, a, b, *rest in node.time.blocks(start, end, tick, until)[:room]
            ]
            for number, node in shown
        }
        return {
            "start": start,
            "lanes": [{"node": number, "rows": max(1, len(node.time.rows))} for number, node in found],
            "blocks": blocks,
            "broadcasts": self._broadcasts(start, end, tick, until),
            "waiting": [(round(at - start, digits), count) for at, count in self._queue.points(400)],
        }

    def calls(
        self, text: str = "", node: int | None = None, outcome: str = "", before: int | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        return self._calls.search(text, node, outcome, before, limit)

    def call(self, id: str) -> dict[str, Any] | None:
        found = self._calls.details(id)
        return None if found is None else {**found, "output": self._lines.of_call(id)}

    def output(
        self, text: str = "", node: int | None = None, call: str = "", before: int | None = None, limit: int = 300
    ) -> list[dict[str, Any]]:
        return self._lines.search(text, node, call, before, limit)

    def metrics(self) -> list[dict[str, Any]]:
        found = self._reports.curves()
        for each in found:
            call = self._calls.get(each["call"]) if each["call"] else None
            each["function"], each["arguments"] = (call.name[:80], call.arguments[:60]) if call else ("", "")
        return found

    def moments(self, before: int | None = None, limit: int = 300) -> list[dict[str, Any]]:
        gone = self._said - len(self._moments)
        found = list(self._moments)
        last = self._said if before is None else max(gone, min(before, self._said))
        return [
            {"number": i, "time": at, "kind": kind, "text": text[:4000], "node": node}
            for i in range(last - 1, max(gone - 1, last - 1 - limit), -1)
            for at, kind, text, node in (found[i - gone],)
        ]

    # what happens

    def _on(self, event: Event) -> None:
        match event:
            case events.PoolOpened():
                self._say(event, "pool", f"open: {event.nodes} nodes, {event.slots} slots, after {event.seconds:.1f} s")
            case events.PoolClosing():
                self._say(event, "pool", "closing")
            case events.PoolClosed():
                self._say(event, "pool", f"closed after {event.seconds:.1f} s")
            case events.NodePhase():
                self._say(event, "set-up", event.phase, event.node)
            case events.NodeUp():
                self._say(event, "node", "takes calls again", event.node)
            case events.NodeDown():
                self._say(event, "warning", event.reason, event.node)
            case events.NodeLeaving():
                self._say(event, "warning", f"will be taken away in {event.seconds:.0f} s", event.node)
            case events.Notice() if "/?token=" not in event.text:  # the address of this page, which works once
                self._say(event, "warning" if event.level == "warning" else "note", event.text)
            case Skipped():
                self._skip(event)
            case events.QueueLength():
                self._queue.add(event.time, event.calls)
            case events.NodeSample():
                self._sample(event)
            case events.CallEnded():
                if event.outcome == "crashed":
                    self._say(event, "warning", died(event), None if event.node < 0 else event.node)
                self._recent[int(event.time)] += event.items
            case events.Output():
                self._lines.add(event.time, event.node, event.stream, event.text, event.call)
            case events.Log():
                self._lines.add(event.time, event.node, "stderr", f"{event.logger}: {event.text}", event.call)
            case events.Warned():
                text = f"{event.path}:{event.line}: {event.category}: {event.text}"
                self._lines.add(event.time, event.node, "stderr", text, event.call)
            case events.Progress():
                self._reports.add(event, self.began)
                call = self._calls.get(event.call) if event.call else None
                if call is not None:
                    call.progress = (event.step, event.total)
            case _:
                pass

    def _skip(self, event: Skipped) -> None:
        if not self._skipped.count:
            text = (
                "the history of this pool is full: from here on only failures and warnings are kept, others are counted"
            )
            self._say(event, "warning", text)
        self._skipped = event

    def _sample(self, event: events.NodeSample) -> None:
        node = self._node(event.node)
        node.cpu.add(event.time, event.cpu)
        if event.memory:  # when a pool closes, its processes may be gone before the last sample
            node.memory.add(event.time, event.memory)
        for gpu in event.gpus:
            known = node.gpus.get(gpu.index) or node.gpus.setdefault(gpu.index, _Gpu(gpu.name))
            known.total = gpu.memory_total
            if gpu.utilization is not None:
                known.use.add(event.time, gpu.utilization)
            if gpu.memory_used is not None:
                known.memory.add(event.time, gpu.memory_used)

    def _follow(self, call: Attempt) -> None:
        if call.node < 0:
            return
        time = self._node(call.node).time
        if call.number < 0:
            self._calls.add(call)
            time.begin(call)
        if call.ended is not None:
            time.end(call)

    # how

    def _node(self, number: int) -> _Node:
        return self._nodes.get(number) or self._nodes.setdefault(number, _Node())

    def _say(self, event: Event, kind: str, text: str, node: int | None = None) -> None:
        self._moments.append((event.time, kind, text, node))
        self._said += 1

    def _rate(self, now: float) -> float:
        last = int(now)
        if len(self._recent) > 1000:
            self._recent = Counter({at: count for at, count in self._recent.items() if at > last - 60})
        return sum(self._recent[at] for at in range(last - _WINDOW, last)) / _WINDOW

    def _broadcasts(self, start: float, end: float, tick: float, now: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for each in reversed(self._calls.broadcasts.values()):
            told = each.told()
            ended = told["ended"] or now
            if told["began"] > end or ended < start or ended - told["began"] < 2 * tick:
                continue
            found.append({**told, "began": round(told["began"] - start, 6), "ended": round(ended - start, 6)})
            if len(found) >= _BROADCASTS:
                break
        return found


def _figures(node: _Node, since: float) -> dict[str, Any]:
    return {
        "cpu": node.cpu.points(_SPARK, since),
        "memory": node.memory.points(_SPARK, since),
        "gpus": [
            {
                "index": index,
                "name": gpu.name,
                "use": gpu.use.points(_SPARK, since),
                "memory": gpu.memory.points(_SPARK, since),
                "total": gpu.total,
            }
            for index, gpu in sorted(node.gpus.items())
        ],
    }


def _has_price(pool: PoolState) -> bool:
    return any(hourly for _, hourly in pool.rates if hourly is not None and math.isfinite(hourly))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_LINES = 200_000
_LONGEST = 4_000
_OF_A_CALL = 500
_CHARACTERS = 200_000  # in one answer


class _Line(NamedTuple):
    number: int
    time: float
    node: int
    stream: str
    text: str
    call: str | None


class OutputLines:
    def __init__(self) -> None:
        self._lines: deque[_Line] = deque(maxlen=_LINES)
        self._written = 0

    def add(self, time: float, node: int, stream: str, text: str, call: str | None) -> None:
        self._lines.append(_Line(self._written, time, node, stream, text, call))
        self._written += 1

    def of_call(self, call: str) -> list[dict[str, Any]]:
        return self.search(call=call, limit=_OF_A_CALL)[::-1]

    def search(
        self, text: str = "", node: int | None = None, call: str = "", before: int | None = None, limit: int = 200
    ) -> list[dict[str, Any]]:
        wanted, found, room = text.lower(), list[dict[str, Any]](), _CHARACTERS
        newer = 0 if before is None else max(0, self._written - before)
        for line in islice(reversed(self._lines), newer, None):
            if (node is not None and line.node != node) or (call and line.call != call):
                continue
            if wanted and wanted not in line.text.lower():
                continue
            found.append(_shown(line))
            room -= len(line.text)
            if len(found) >= limit or room <= 0:
                break
        return found


def _shown(line: _Line) -> dict[str, Any]:
    text = line.text if len(line.text) <= _LONGEST else f"{line.text[:_LONGEST]} ... ({len(line.text):,} characters)"
    shown = {"number": line.number, "time": line.time, "node": line.node, "stream": line.stream}
    return {**shown, "text": clean(text, colours=False), "call": line.call}


_CURVES = 400
_POINTS = 12_000  # in one answer
_OF_A_CURVE = 300

Key = tuple[str, int, int | None, str | None]


class Reports:
    """Curves by name, node, rank and call; the oldest calls are dropped when there are too many."""

    def __init__(self) -> None:
        self._curves: dict[Key, Curve] = {}
        self._shares: dict[Key, Curve] = {}
        self._seen: dict[str, set[int]] = {}  # what has reported under each name, also what went

    def add(self, event: events.Progress, began: float) -> None:
        where = (event.node, event.rank, event.call)
        for name, value in event.metrics.items():
            self._append(self._curves, (name[:200], *where), event.step, value)
        if event.total and math.isfinite(event.total):
            self._append(self._shares, ("progress", *where), event.time - began, 100.0 * event.step / event.total)

    def curves(self) -> list[dict[str, Any]]:
        found = [("time", key, curve) for key, curve in self._shares.items()]
        found += [("step", key, curve) for key, curve in sorted(self._curves.items(), key=lambda item: item[0][:2])]
        most = min(_OF_A_CURVE, max(20, _POINTS // max(1, len(found))))
        return [
            {"by": by, "name": name, "node": node, "rank": rank, "call": call, "points": curve.points(most)}
            | {"of": len(self._seen.get(f"{by} {name}", ()))}
            for by, (name, node, rank, call), curve in found
        ]

    def _append(self, curves: dict[Key, Curve], key: Key, at: float, value: float) -> None:
        if not math.isfinite(value):
            return
        by = "time" if curves is self._shares else "step"
        self._seen.setdefault(f"{by} {key[0]}", set()).add(hash(key))
        (curves.get(key) or curves.setdefault(key, Curve())).add(at, value)
        while len(curves) > _CURVES:
            del curves[next(iter(curves))]
        while len(self._seen) > 2 * _CURVES:  # a body may report under any number of names
            del self._seen[next(iter(self._seen))]
