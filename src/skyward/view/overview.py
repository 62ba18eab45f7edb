"""What one pool is doing: sentences for the user, and rows of the live view."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from skyward import events as on
from skyward.events import GpuSample
from skyward.history.state import Attempt, NodeState, PoolState
from skyward.machines.offers import money
from skyward.view.terminal import Cell, clean

__all__ = ["NODE_COLOURS", "Overview", "Recent", "counted", "gpu_cell", "group_text", "progress_text"]


_SPAN = 2.0
_MOST = 100_000
_SHORT = 0.05


class Recent:
    def __init__(self) -> None:
        self._ended: deque[tuple[float, str, float]] = deque()
        self._names: Counter[str] = Counter()
        self._short = 0.0  # seconds of those that were short
        self._long: deque[tuple[float, float]] = deque(maxlen=_MOST)  # the others: when they ended, and their seconds

    def add(self, name: str, now: float, seconds: float = 0.0) -> None:
        if len(self._ended) == _MOST:
            self._drop()
        short = seconds if seconds < _SHORT else 0.0
        self._ended.append((now, name, short))
        self._names[name] += 1
        self._short += short
        if not short and seconds:
            self._long.append((now, seconds))
        self._forget(now)

    def text(self, now: float) -> str:
        self._forget(now)
        busy = [(name, count) for name, count in self._names.most_common(3) if count > 0]
        return ", ".join(f"{name} {count / _SPAN:,.3g}/s" for name, count in busy)

    def busy(self, now: float, running: Iterable[float], slots: int, since: float) -> float:
        """The share of its slots' time that a node has worked in the last two seconds."""
        self._forget(now)
        span = min(_SPAN, max(now - since, 0.1))
        ended = sum(max(0.0, min(seconds, span - (now - at))) for at, seconds in self._long)
        current = sum(min(max(0.0, now - began), span) for began in running)
        return min(1.0, (self._short + ended + current) / (span * max(slots, 1)))

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0][0] < now - _SPAN:
            self._drop()
        while self._long and self._long[0][0] < now - _SPAN:
            self._long.popleft()
        if not self._ended:
            self._short = 0.0  # what rounding has left of it

    def _drop(self) -> None:
        _, name, short = self._ended.popleft()
        self._short -= short
        self._names[name] -= 1
        if not self._names[name]:
            del self._names[name]


def elapsed(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def progress_text(event: on.Progress) -> str:
    share = f"/{event.total:,g} ({event.step / event.total:.0%})" if event.total else ""
    return " ".join([f"{event.step:,g}{share}", *(f"{name} {value:.4g}" for name, value in event.metrics.items())])


def group_text(event: on.GroupProgress, age: float = 0.0) -> str:
    ended = event.done + event.failed
    total = " done" if event.total is None else f"/{event.total:,}"
    parts = [f"{event.name}: {ended:,}{total}{f' ({event.failed:,} failed)' if event.failed else ''}"]
    if event.over:
        complete = ended == event.total
        return ", ".join([*parts, f"{'' if complete else 'stopped after '}{elapsed(event.seconds)}"])
    parts.append(f"{event.rate:,.1f}/s")
    if event.left is not None:
        parts.append(f"{elapsed(max(0.0, event.left - age))} left")
    return ", ".join(parts)


_BOLD, _DIM, _RED, _GREEN, _CYAN = "1", "2", "31", "32", "36"
NODE_COLOURS = ("36", "33", "35", "32", "34", "96", "93", "95", "92", "94")
_MOST_FAILURES = 10  # lines on failed calls of a group
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@dataclass(slots=True)
class Bar:
    text: str = ""
    shown: str = ""
    due: float = 0.0
    due_at_end: float = 0.0


@dataclass(slots=True)
class _Row:
    bars: dict[int, Bar] = field(default_factory=dict[int, Bar])  # by rank
    recent: Recent = field(default_factory=Recent)

    def cells(self, number: int, node: NodeState, opening: bool, ranked: bool, slots: int, now: float) -> list[Cell]:
        name = (f"node-{number}", NODE_COLOURS[number % len(NODE_COLOURS)])
        if node.status == "down":
            return [("✗", _RED), name, ("down", _RED), (node.reason, _RED)]
        if opening:
            phase = node.phase if node.leaving is None else f"taken away in {elapsed(node.leaving)}"
            return [(_SPINNER[int(now * 10) % 10], _CYAN), name, (phase, ""), (elapsed(now - node.since), _DIM)]
        share = self.recent.busy(now, [call.began for call in node.running.values()], slots, node.since)
        figures = ""
        if node.sample is not None:
            figures = f"{node.sample.cpu:4.0f} % CPU {node.sample.memory / 1e6:8,.0f} MB"
            figures += f"  {gpu_cell(node.sample.gpus)}" if node.sample.gpus else ""
        calls = _calls(node, ranked, now) or self.recent.text(now)
        return [
            ("●" if calls else "○", _GREEN),
            name,
            ("up", _GREEN),
            (f"{share:4.0%} busy", ""),
            (figures, ""),
            (calls, _BOLD),
        ]


def _calls(node: NodeState, ranked: bool, now: float) -> str:
    named: dict[str, list[Attempt]] = {}
    for call in node.running.values():
        named.setdefault(call.name, []).append(call)
    return ", ".join(
        f"{name}{f' ×{len(calls)}' if len(calls) > 1 else ''} {elapsed(now - min(call.began for call in calls))}"
        + (_ranks(calls) if ranked else "")
        for name, calls in named.items()
    )


class Overview:
    def __init__(self, *, live: bool) -> None:
        self.live = live  # the view shows much of what is a sentence elsewhere
        self.state = PoolState()
        self.marks: dict[int, _Row] = {}
        self._told: Counter[str] = Counter()  # lines on failed calls, by function
        self._untold: Counter[str] = Counter()  # failed calls that have no line

    def bar(self, node: int, rank: int | None) -> Bar:
        return self._marks(node).bars.setdefault(rank or 0, Bar())

    def _marks(self, node: int) -> _Row:
        return self.marks.get(node) or (self.marks.setdefault(node, _Row()) if node >= 0 else _Row())

    def is_idle_after(self, event: on.Event) -> bool:
        ended = event.call if isinstance(event, on.CallEnded) else None
        return not any(call != ended for node in self.state.nodes.values() for call in node.running)

    def cost(self, now: float) -> str:
        hourly = self.state.hourly
        if hourly is None:
            return ""
        most = "" if self.state.budget is None else f" of {money(self.state.budget)}"
        return (
            f"{_rate(hourly)}, {money(self.state.spent(now))}{most} so far" if math.isfinite(hourly) else _rate(hourly)
        )

    def rows(self, now: float, width: int = sys.maxsize) -> list[list[Cell]]:
        state = self.state
        if state.stage in ("", "closed"):
            return []
        opening, ranked = state.stage == "opening", state.processes != 1
        rows = [[(self._head(now, opening, width), _BOLD)]]
        rows += [[(f"  {group_text(group, now - at)}", "")] for group, at in state.groups.values() if not group.over]
        for number, node in sorted(state.nodes.items()):
            marks = self._marks(number)
            rows.append(marks.cells(number, node, opening, ranked, state.slots // max(1, len(state.nodes)), now))
            for rank, bar in sorted(marks.bars.items()):
                if bar.text and node.running:  # a report may come after the end of its call
                    rows.append([(f"   rank-{rank} {bar.text}" if ranked else f"   {bar.text}", "")])
        return [[(clean(text, colours=False), style) for text, style in row] for row in rows]

    def _head(self, now: float, opening: bool, width: int) -> str:
        state = self.state
        parts = {
            "pool": f"skyward {state.pool}",
            "provider": state.provider,
            "nodes": counted(len(state.nodes), "node"),
            "cost": self.cost(now),
            "slots": "" if opening else counted(state.slots, "slot"),
            "calls": "" if opening else f"{state.done:,} ok, {state.failed:,} failed",
            "queued": f"{state.queued:,} queued" if state.queued else "",
            "stage": "" if state.stage == "open" else state.stage,
            "time": elapsed(now - state.began),
        }
        shown = " · ".join(filter(None, parts.values()))
        for least in ("provider", "slots", "time", "nodes", "cost", "pool"):
            if len(shown) <= width:
                break
            del parts[least]
            shown = " · ".join(filter(None, parts.values()))
        return shown

    def follow(self, event: on.Event, now: float) -> str | None:
        sentence = self._sentence(event)
        for call in self.state.apply(event, now):
            if call.ended is not None and isinstance(event, on.CallEnded):
                self._ended(call, event.node, now, event.seconds)
        if self.live and isinstance(event, on.NodeDown):
            self._marks(event.node).bars.clear()
        return sentence

    def _sentence(self, event: on.Event) -> str | None:
        state = self.state
        match event:
            case on.CallEnded():
                return self._failure(event) if event.failed_items else None  # else the program gets the exception
            case on.GroupProgress(over=True) | on.PoolClosing():
                return self._more_failures()
            case on.PoolOpening(nodes=count, provider=provider):
                return None if self.live else f"opening {counted(count, 'node')} on {provider}"
            case on.PoolCost(hourly=hourly):
                return None if self.live or state.hourly == hourly else f"machines cost {_rate(hourly)}"
            case on.NodePhase(node=number, phase=phase):
                return self._phase(number, phase)
            case on.PoolOpened(nodes=count, slots=slots, seconds=seconds):
                opened = f"{counted(count, 'node')}, {counted(slots, 'slot')}, {elapsed(seconds)}"
                return None if self.live else f"pool open: {opened}"
            case on.NodeDown(node=number, reason=reason):
                return f"node {number} is down: {reason}"
            case on.NodeUp(node=number):
                return f"node {number} is up again"
            case on.Notice(text=text, level=level):
                return f"warning: {text}" if level == "warning" else text
            case on.BroadcastStalled(text=text):
                return f"warning: {text}"
            case on.PoolClosed(seconds=seconds, calls=calls, stopped=stopped):
                if not (state.slots or calls):
                    return f"was not opened, {elapsed(seconds)}"
                ended = f"{counted(calls, 'call')}, {state.failed:,} failed"
                if stopped:
                    done = max(0, calls - state.failed - stopped)
                    ended = f"{counted(calls, 'call')} ({done:,} done, {state.failed:,} failed, {stopped:,} stopped)"
                return f"closed: {ended}, {counted(len(state.nodes), 'node')}, {elapsed(seconds)}"
            case _:
                return None

    def recall(self, event: on.Event, now: float) -> None:
        if isinstance(event, on.Progress):
            self.bar(event.node, event.rank).text = progress_text(event)
        else:
            self.follow(event, now)

    def _ended(self, call: Attempt, number: int, now: float, seconds: float) -> None:
        marks, node = self._marks(number), self.state.node(number)
        marks.recent.add(call.name, now, seconds)
        if self.live and marks.bars:
            busy = {other.rank or 0 for other in node.running.values()}
            for rank, bar in marks.bars.items():
                if rank not in busy:
                    bar.text = ""

    def _failure(self, event: on.CallEnded) -> str | None:
        self._told[event.name] += 1
        if self._told[event.name] > _MOST_FAILURES:
            self._untold[event.name] += event.failed_items
            return None
        from skyward.history.lines import failure  # most groups have none

        return failure(event)

    def _more_failures(self) -> str | None:
        more = [f"{counted(count, 'more call')} of {name}" for name, count in self._untold.items()]
        self._told.clear()
        self._untold.clear()
        return f"{' and '.join(more)} failed" if more else None

    def _phase(self, number: int | None, phase: str) -> str | None:
        nodes = self.state.nodes.values() if number is None else [self.state.node(number)]
        if self.live or (nodes and all(node.phase == phase for node in nodes)):
            return None
        return phase if number is None else f"node {number}: {phase}"


def _rate(hourly: float) -> str:
    return f"{money(hourly)} an hour" if math.isfinite(hourly) else "an unknown price"


def _ranks(running: Sequence[Attempt]) -> str:
    ranks = sorted({call.rank for call in running if call.rank is not None})
    return f" (rank{'' if len(ranks) == 1 else 's'} {' '.join(map(str, ranks))})" if ranks else ""


_BARS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "·"
_MOST_BARS = 16
_GB = 1 << 30


def gpu_cell(gpus: Sequence[GpuSample]) -> str:
    """Such as "8 GPU ▇▇▅▁▇▇▇▇ 77% 402/640GB 71° 3.2kW": mean use, total memory (GiB) and power, hottest."""
    used = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    parts = ["GPU"] if len(gpus) == 1 else [f"{len(gpus)} GPU"]
    if 1 < len(gpus) <= _MOST_BARS and used:
        parts.append("".join(map(_bar, gpus)))
    parts.append(f"{sum(used) / len(used):.0f}%" if used else "n/a")
    if all(gpu.memory_used is not None and gpu.memory_total for gpu in gpus):
        full = sum(gpu.memory_used or 0 for gpu in gpus) / _GB
        parts.append(f"{full:.0f}/{sum(gpu.memory_total or 0 for gpu in gpus) / _GB:.0f}GB")
    cards = {gpu.index: gpu for gpu in gpus}.values()  # slices of one card have its temperature and power
    heat = [gpu.temperature for gpu in cards if gpu.temperature is not None]
    power = [gpu.power for gpu in cards if gpu.power is not None]
    parts += [f"{max(heat):.0f}°"] if heat else []
    parts += [_watts(sum(power))] if power else []
    return " ".join(parts)


def _bar(gpu: GpuSample) -> str:
    if gpu.utilization is None:
        return _UNKNOWN
    return _BARS[min(len(_BARS) - 1, int(gpu.utilization / 100 * len(_BARS)))]


def _watts(power: float) -> str:
    return f"{power:.0f}W" if power < 1000 else f"{power / 1000:.1f}kW"
