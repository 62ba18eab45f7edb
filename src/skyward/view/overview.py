"""What one pool is doing, as its events tell: sentences for the user, and rows of the live view. Writes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from skyward import events as on
from skyward.machines.price import money
from skyward.view.activity import Recent, counted, elapsed, group_text, progress_text
from skyward.view.gpus import gpu_cell
from skyward.view.terminal import Cell, clean

__all__ = ["NODE_COLOURS", "Bar", "Overview"]

_BOLD, _DIM, _RED, _GREEN, _CYAN = "1", "2", "31", "32", "36"
NODE_COLOURS = ("36", "33", "35", "32", "34", "96", "93", "95", "92", "94")
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

_Running = tuple[str, float, int | None]
"""The name of a call that runs, since when, and in which rank."""


@dataclass(slots=True)
class Bar:
    """The progress bar of a process: its last state, the one that was printed last, and when the next may be."""

    text: str = ""
    shown: str = ""
    due: float = 0.0
    due_at_end: float = 0.0
    """When the last state may be printed again because no call runs any more."""


@dataclass(slots=True)
class _Node:
    """What is known of a node."""

    phase: str = "waiting"
    since: float = field(default_factory=time.monotonic)
    down: str | None = None
    cpu: float | None = None
    memory: int = 0
    gpus: tuple[on.GpuSample, ...] = ()
    running: dict[str, _Running] = field(default_factory=dict[str, _Running])
    bars: dict[int, Bar] = field(default_factory=dict[int, Bar])  # by rank
    recent: Recent = field(default_factory=Recent)

    def cells(self, number: int, opening: bool, ranked: bool, slots: int, now: float) -> list[Cell]:
        name = (f"node-{number}", NODE_COLOURS[number % len(NODE_COLOURS)])
        if self.down is not None:
            return [("✗", _RED), name, ("down", _RED), (self.down, _RED)]
        if opening:
            return [(_SPINNER[int(now * 10) % 10], _CYAN), name, (self.phase, ""), (elapsed(now - self.since), _DIM)]
        share = self.recent.busy(now, [since for _, since, _ in self.running.values()], slots, self.since)
        figures = f"{self.cpu:4.0f} % CPU {self.memory / 1e6:8,.0f} MB" if self.cpu is not None else ""
        if self.gpus:
            figures += f"  {gpu_cell(self.gpus)}"
        calls = self._calls(ranked, now) or self.recent.text(now)
        return [
            ("●" if calls else "○", _GREEN),
            name,
            ("up", _GREEN),
            (f"{share:4.0%} busy", ""),
            (figures, ""),
            (calls, _BOLD),
        ]

    def _calls(self, ranked: bool, now: float) -> str:
        named: dict[str, list[_Running]] = {}
        for one in self.running.values():
            named.setdefault(one[0], []).append(one)
        return ", ".join(
            f"{called}{f' ×{len(ones)}' if len(ones) > 1 else ''} {elapsed(now - min(since for _, since, _ in ones))}"
            + (_ranks(ones) if ranked else "")
            for called, ones in named.items()
        )


class Overview:
    """Follows the events of one pool. Not thread-safe: its owner holds a lock."""

    def __init__(self, *, live: bool) -> None:
        self.live = live  # the view shows much of what is a sentence elsewhere
        self.pool = self.provider = self.stage = ""
        self.nodes: dict[int, _Node] = {}
        self.processes: int | str = 1  # a node; each is a rank
        self.slots = self.done = self.failed = self.queued = 0
        self.began = time.monotonic()
        self.groups: dict[int, tuple[on.GroupProgress, float]] = {}  # with when it was told
        self._hourly: float | None = None
        self._spent, self._priced = 0.0, 0.0  # dollars up to the time at which the price was last told

    def node(self, number: int) -> _Node:
        """A node; one that nobody sees for a call that never reached any."""
        if number < 0:
            return _Node()
        if number not in self.nodes:
            self.nodes[number] = _Node()
        return self.nodes[number]

    def bar(self, node: int, rank: int | None) -> Bar:
        """The progress bar of a node's process."""
        return self.node(node).bars.setdefault(rank or 0, Bar())

    def is_idle_after(self, event: on.Event) -> bool:
        """Whether no call runs any more when this one has ended."""
        ended = event.call if isinstance(event, on.CallEnded) else None
        return not any(call != ended for node in self.nodes.values() for call in node.running)

    def cost(self, now: float) -> str:
        """What machines cost an hour, and have cost so far; nothing where they cost nothing."""
        if self._hourly is None:
            return ""
        if not math.isfinite(self._hourly):
            return _rate(self._hourly)
        return f"{_rate(self._hourly)}, {money(self._spent_until(now))} so far"

    def rows(self, now: float) -> list[list[Cell]]:
        """The pool's part of the view."""
        if not self.stage:
            return []
        opening, ranked = self.stage == "opening", self.processes != 1
        head = [f"skyward {self.pool}", self.provider, counted(len(self.nodes), "node"), self.cost(now)]
        head += [] if opening else [counted(self.slots, "slot"), f"{self.done:,} done, {self.failed:,} failed"]
        head += [f"{self.queued:,} queued"] if self.queued else []
        head += [] if self.stage == "open" else [self.stage]
        rows = [[(" · ".join([*filter(None, head), elapsed(now - self.began)]), _BOLD)]]
        rows += [[(f"  {group_text(event, now - told)}", "")] for event, told in self.groups.values()]
        for number, node in sorted(self.nodes.items()):
            rows.append(node.cells(number, opening, ranked, self.slots // max(1, len(self.nodes)), now))
            for rank, bar in sorted(node.bars.items()):
                if bar.text:
                    rows.append([(f"   rank-{rank} {bar.text}" if ranked else f"   {bar.text}", "")])
        return [[(clean(text, colours=False), style) for text, style in row] for row in rows]

    def follow(self, event: on.Event, now: float) -> str | None:
        """Updates what is shown; returns a sentence for the user, if the event needs one."""
        match event:
            case on.CallStarted(call=call, name=name, node=number, rank=rank):
                self.node(number).running[call] = (name, now, rank)
            case on.CallEnded():
                self._ended(event, now)
            case on.NodeSample(node=number, cpu=cpu, memory=memory, gpus=gpus):
                node = self.node(number)
                node.cpu, node.memory, node.gpus = cpu, memory, gpus
            case on.QueueLength(calls=calls):
                self.queued = calls
            case on.GroupProgress(group=group, over=over):
                if over:
                    self.groups.pop(group, None)
                else:
                    self.groups[group] = event, now
            case on.PoolOpening(nodes=count, provider=provider, processes_per_node=processes):
                self.processes = processes
                self.pool, self.provider, self.stage = event.pool, provider, "opening"
                self.nodes = {number: _Node(since=now) for number in range(count)}
                self.began = now
                return None if self.live else f"opening {counted(count, 'node')} on {provider}"
            case on.PoolCost(hourly=hourly):
                before = self._hourly
                self._spent, self._priced, self._hourly = self._spent_until(now), now, hourly
                return None if self.live or before == hourly else f"machines cost {_rate(hourly)}"
            case on.NodePhase(node=number, phase=phase):
                return self._phase(number, phase, now)
            case on.PoolOpened(nodes=count, slots=slots, seconds=seconds):
                self.stage, self.slots = "open", slots
                for node in self.nodes.values():
                    node.since = now
                opened = f"{counted(count, 'node')}, {counted(slots, 'slot')}, {elapsed(seconds)}"
                return None if self.live else f"pool open: {opened}"
            case on.NodeDown(node=number, reason=reason):
                node = self.node(number)
                node.down = reason
                node.running.clear()
                return f"node {number} is down: {reason}"
            case on.NodeLeaving(node=number, seconds=seconds):
                self.node(number).phase = f"taken away in {elapsed(seconds)}"
            case on.NodeUp(node=number):
                node = self.node(number)
                node.down, node.since = None, now
                return f"node {number} is up again"
            case on.Notice(text=text, level=level):
                return f"warning: {text}" if level == "warning" else text
            case on.BroadcastStalled(text=text):
                return f"warning: {text}"
            case on.PoolClosing():
                self.stage = "closing"
            case on.PoolClosed(seconds=seconds, calls=calls):
                self.stage = ""
                if not (self.slots or calls):
                    return f"was not opened, {elapsed(seconds)}"
                counts = f"{counted(calls, 'call')}, {self.failed:,} failed, {counted(len(self.nodes), 'node')}"
                return f"closed: {counts}, {elapsed(seconds)}"
            case _:
                pass
        return None

    def recall(self, event: on.Event, now: float) -> None:
        """Updates what is shown by an event of a history, which needs no sentence any more."""
        if isinstance(event, on.Progress):
            self.bar(event.node, event.rank).text = progress_text(event)
        else:
            self.follow(event, now)

    def _ended(self, event: on.CallEnded, now: float) -> None:
        node = self.node(event.node)
        node.running.pop(event.call, None)
        node.recent.add(event.name, now, event.seconds)
        busy = {rank or 0 for _, _, rank in node.running.values()}
        for rank, bar in node.bars.items():
            if self.live and rank not in busy:
                bar.text = ""
        self.done += event.done
        self.failed += event.failed

    def _phase(self, number: int | None, phase: str, now: float) -> str | None:
        told = list(self.nodes.values()) if number is None else [self.node(number)]
        changed = [node for node in told if node.phase != phase]
        for node in changed:
            node.phase, node.since = phase, now
        if self.live or not (changed or not told):
            return None
        return phase if number is None else f"node {number}: {phase}"

    def _spent_until(self, now: float) -> float:
        if self._hourly is None or not math.isfinite(self._hourly):
            return self._spent
        return self._spent + self._hourly * max(0.0, now - self._priced) / 3600


def _rate(hourly: float) -> str:
    return f"{money(hourly)} an hour" if math.isfinite(hourly) else "an unknown price"


def _ranks(running: Sequence[_Running]) -> str:
    """The ranks that run a call, for the view."""
    ranks = sorted({rank for _, _, rank in running if rank is not None})
    return f" (rank{'' if len(ranks) == 1 else 's'} {' '.join(map(str, ranks))})" if ranks else ""
