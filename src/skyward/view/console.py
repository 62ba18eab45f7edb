"""The live view: a listener of a pool's events that draws on a terminal, or writes plain lines where there is none.

events ──► Console (what one pool is doing) ──lines──► Feed (bounded) ──thread──► Terminal, or plain streams
prints of the script, while a terminal is drawn on ──────┘
"""

from __future__ import annotations

import atexit
import difflib
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

from skyward import events as on
from skyward.errors import InvalidArgument
from skyward.machines.price import money
from skyward.view.activity import Recent, elapsed, group_text, progress_text
from skyward.view.gpus import gpu_cell
from skyward.view.terminal import Cell, Feed, Terminal, clean, is_terminal, plain, styled

__all__ = ["Console", "attach"]

_MODES = ("auto", "live", "plain", "silent")
_CI = ("CI", "TF_BUILD", "TEAMCITY_VERSION", "JENKINS_URL")
_PROGRESS_EVERY = 5.0
_GROUP_EVERY = 10.0
_BOLD, _DIM, _RED, _GREEN, _YELLOW, _CYAN = "1", "2", "31", "32", "33", "36"
_NODE_COLOURS = ("36", "33", "35", "32", "34", "96", "93", "95", "92", "94")
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

_Running = tuple[str, float, int | None]
"""The name of a call that runs, since when, and in which rank."""

_guard = threading.RLock()
_attached: list[Console] = []
_terminal: Terminal | None = None


def attach(mode: bool | str = "auto", *, file: TextIO | None = None) -> Console:
    """A console to be called with every event of one pool, until its `close()`.

    `mode` is "auto" or True, "live" (wherever there is a terminal), "plain", "silent" or False.
    """
    global _terminal
    how = "auto" if mode is True else "silent" if mode is False else mode
    if how not in _MODES:
        near = difflib.get_close_matches(str(how), _MODES, 1)
        raise InvalidArgument(
            f"console={mode!r} is not a kind of console{f'; perhaps {near[0]!r} was meant' if near else ''}. "
            f"Use True, False or one of {', '.join(map(repr, _MODES))}."
        )
    if how == "silent":
        return Console(None)
    with _guard:
        if _wants_view(how, file) and (_terminal is None or file in (None, _terminal.out)):
            _terminal = _terminal or Terminal(file or sys.stdout, _rows)
            console = Console(_terminal.feed, live=True)
        else:
            console = Console(Feed(plain(file)))
        _attached.append(console)
    atexit.register(console.close)
    return console


def _wants_view(how: str, file: TextIO | None) -> bool:
    streams = (file,) if file else (sys.stdout, sys.stderr)
    if how == "live":
        return is_terminal(streams[0])
    return (
        how == "auto"
        and all(map(is_terminal, streams))
        and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        and all(os.environ.get(name, "").lower() in ("", "0", "false") for name in _CI)
        and not _in_notebook()
    )


def _in_notebook() -> bool:
    module = sys.modules.get("IPython")
    return module is not None and hasattr(module.get_ipython(), "kernel")


def _rows() -> list[list[Cell]]:
    return [row for console in list(_attached) if console.live for row in console.rows()]


def _in_fork() -> None:
    """Leave drawing to the process that began it: here no thread writes, and locks may be held for ever."""
    global _guard, _terminal
    if _terminal:
        _terminal.abandon()
    for console in _attached:
        console.silence()
    _guard, _terminal = threading.RLock(), None
    _attached.clear()


os.register_at_fork(after_in_child=_in_fork)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _rate(hourly: float) -> str:
    return f"{money(hourly)} an hour" if math.isfinite(hourly) else "an unknown price"


def _ranks(running: Sequence[_Running]) -> str:
    """The ranks that run a call, for the view."""
    ranks = sorted({rank for _, _, rank in running if rank is not None})
    return f" (rank{'' if len(ranks) == 1 else 's'} {' '.join(map(str, ranks))})" if ranks else ""


class Console:
    """Shows what one pool does; called with its events, by any thread."""

    def __init__(self, feed: Feed | None, *, live: bool = False) -> None:
        self.live = live
        self._feed, self._lock = feed, threading.Lock()
        self._pool = self._provider = self._stage = self._cost = ""
        self._nodes: dict[int, _Node] = {}
        self._tags: dict[tuple[int, int | None, bool], str] = {}
        self._processes: int | str = 1  # a node; each is a rank
        self._slots = self._done = self._failed = 0
        self._began = time.monotonic()
        self._unwritten = False
        self._groups: dict[int, tuple[on.GroupProgress, float]] = {}  # with when a line about it is due
        self._stderr = styled("|", _RED).split("|") if live else ["", ""]

    def __call__(self, event: on.Event) -> None:
        feed = self._feed
        if feed is None:
            return
        if isinstance(event, on.Output):
            self._show(feed, event)
            return
        if isinstance(event, on.Progress):
            text = progress_text(event)
            self._show(feed, on.Output(event.pool, event.node, "stdout", text, event.call, True, event.rank))
            return
        if isinstance(event, on.GroupProgress):
            self._show_group(feed, event)
            return
        if isinstance(event, on.CallEnded | on.PoolOpened) and self._unwritten and not self.live:
            self._unwritten = False
            feed.flush()  # the lines of a call come before what the program prints of its result
        with self._lock:
            sentence = self._follow(event)
        # Without the lock: the feed may make this thread wait for the one that draws, and that one needs the lock.
        if sentence and self.live:
            warns = isinstance(event, on.NodeDown | on.BroadcastStalled)
            warns = warns or (isinstance(event, on.Notice) and event.level == "warning")
            feed.put("stderr", styled(f"skyward: {clean(sentence, colours=False)}", _YELLOW if warns else _DIM) + "\n")
        elif sentence:
            feed.put("stderr", f"skyward: {sentence}\n")
            if isinstance(event, on.PoolOpened | on.PoolClosed):
                feed.flush()  # it is there before the program's next line, and in the same cell of a notebook

    def close(self) -> None:
        """Write what is left and take the view away; a second call does nothing."""
        global _terminal
        feed, self._feed = self._feed, None
        if feed is None:
            return
        atexit.unregister(self.close)
        for number, node in self._nodes.items():
            for rank, bar in node.bars.items():
                if bar.text and not self.live:
                    feed.put("stdout", f"{self._tag(number, rank)}{bar.text}\n")
        with _guard:
            _attached.remove(self)
            last, terminal = not any(console.live for console in _attached), _terminal
            if self.live and last:
                _terminal = None
        if not self.live:
            feed.close()
        elif terminal and last:
            terminal.close()
        else:
            feed.flush()

    def silence(self) -> None:
        """Show nothing from here on."""
        self._feed = None

    def rows(self) -> list[list[Cell]]:
        """The pool's part of the view."""
        now = time.monotonic()
        with self._lock:
            if not self._stage:
                return []
            opening = self._stage == "opening"
            head = [f"skyward {self._pool}", self._provider, _counted(len(self._nodes), "node"), self._cost]
            head += [] if opening else [_counted(self._slots, "slot"), f"{self._done:,} done, {self._failed:,} failed"]
            head += [] if self._stage == "open" else [self._stage]
            rows = [[(" · ".join([*filter(None, head), elapsed(now - self._began)]), _BOLD)]]
            rows += [[(f"  {group_text(event)}", "")] for event, _ in self._groups.values()]
            for number, node in sorted(self._nodes.items()):
                rows.append(node.cells(number, opening, self._processes != 1, now))
                for rank, bar in sorted(node.bars.items()):
                    if bar.text:
                        rows.append([(f"   rank-{rank} {bar.text}" if self._processes != 1 else f"   {bar.text}", "")])
        return [[(clean(text, colours=False), style) for text, style in row] for row in rows]

    def _show_group(self, feed: Feed, event: on.GroupProgress) -> None:
        """Keeps a row of the live view up to date; elsewhere a line now and then, if it takes long at all."""
        with self._lock:
            over, due = (
                event.done >= event.total,
                self._groups.get(event.group, (None, event.seconds + _GROUP_EVERY))[1],
            )
            if over:
                self._groups.pop(event.group, None)
            else:
                told = event.seconds >= due and not self.live
                self._groups[event.group] = event, event.seconds + _GROUP_EVERY if told else due
                if told:
                    feed.put("stderr", f"skyward: {group_text(event)}\n")

    def _show(self, feed: Feed, event: on.Output) -> None:
        bar = self._bar(event.node, event.rank)
        if event.progress:
            now = time.monotonic()
            bar.text = event.text
            if self.live or now < bar.due:
                return
            bar.due = now + _PROGRESS_EVERY
            bar.shown = event.text
        elif event.text == bar.shown and not self.live:
            bar.text = bar.shown = ""
            return  # the last state of a progress bar that was printed already
        bar.text = ""
        self._unwritten = True
        tag = self._tag(event.node, event.rank)
        if self.live:
            before, after = self._stderr if event.stream == "stderr" else ("", "")
            feed.put(event.stream, f"{tag}{before}{clean(event.text)}{after}\n")
        else:
            feed.put(event.stream, f"{tag}{event.text}\n")

    def _bar(self, node: int, rank: int | None) -> _Bar:
        """The progress bar of a node's process."""
        known = self._nodes.get(node)
        bar = known.bars.get(rank or 0) if known is not None else None
        if bar is None:
            with self._lock:
                bar = self._node(node).bars.setdefault(rank or 0, _Bar())
        return bar

    def _tag(self, node: int, rank: int | None) -> str:
        """What stands before a line: its node, and its rank where nodes have several."""
        key = (node, rank if self._processes != 1 else None, len(_attached) > 1)
        if key not in self._tags:
            pool = f"{self._pool} " if key[2] else ""
            last = max(self._nodes, default=0)
            name, longest, colour = f"{pool}node-{node}", f"{pool}node-{last}", node
            if key[1] is not None:
                each = self._processes if isinstance(self._processes, int) else 8
                name, longest, colour = f"{name} rank-{key[1]}", f"{longest} rank-{(last + 1) * each - 1}", key[1]
            tag = styled(f"{name:<{len(longest)}} │", _NODE_COLOURS[colour % len(_NODE_COLOURS)])
            self._tags[key] = f"{tag} " if self.live else f"[{name}] "
        return self._tags[key]

    def _node(self, number: int) -> _Node:
        if number < 0:
            return _Node()  # of a call that never reached one
        if number not in self._nodes:
            self._nodes[number] = _Node()
        return self._nodes[number]

    def _follow(self, event: on.Event) -> str | None:
        """Updates what is shown; returns a sentence for the user, if the event needs one."""
        match event:
            case on.CallStarted(call=call, name=name, node=number, rank=rank):
                self._node(number).running[call] = (name, time.monotonic(), rank)
            case on.CallEnded(call=call, name=name, node=number, outcome=outcome):
                node = self._node(number)
                node.running.pop(call, None)
                node.recent.add(name, time.monotonic())
                busy = {rank or 0 for _, _, rank in node.running.values()}
                for rank, bar in node.bars.items():
                    if self.live and rank not in busy:
                        bar.text = ""
                self._done += outcome == "ok"
                self._failed += outcome not in ("ok", "cancelled")
            case on.NodeSample(node=number, cpu=cpu, memory=memory, gpus=gpus):
                node = self._node(number)
                node.cpu, node.memory, node.gpus = cpu, memory, gpus
            case on.PoolOpening(nodes=count, provider=provider, processes_per_node=processes):
                self._processes = processes
                self._pool, self._provider, self._stage = event.pool, provider, "opening"
                self._nodes = {number: _Node() for number in range(count)}
                self._began = time.monotonic()
                return None if self.live else f"opening {_counted(count, 'node')} on {provider}"
            case on.PoolCost(hourly=hourly):
                before, self._cost = self._cost, _rate(hourly)
                return None if self.live or before == self._cost else f"machines cost {self._cost}"
            case on.NodePhase(node=number, phase=phase):
                told = list(self._nodes.values()) if number is None else [self._node(number)]
                changed = [node for node in told if node.phase != phase]
                for node in changed:
                    node.phase, node.since = phase, time.monotonic()
                if not self.live and (changed or not told):
                    return phase if number is None else f"node {number}: {phase}"
            case on.PoolOpened(nodes=count, slots=slots, seconds=seconds):
                self._stage, self._slots = "open", slots
                opened = f"{_counted(count, 'node')}, {_counted(slots, 'slot')}, {elapsed(seconds)}"
                return None if self.live else f"pool open: {opened}"
            case on.NodeDown(node=number, reason=reason):
                node = self._node(number)
                node.down = reason
                node.running.clear()
                return f"node {number} is down: {reason}"
            case on.NodeLeaving(node=number, seconds=seconds):
                self._node(number).phase = f"taken away in {elapsed(seconds)}"
            case on.NodeUp(node=number):
                self._node(number).down = None
                return f"node {number} is up again"
            case on.Notice(text=text, level=level):
                return f"warning: {text}" if level == "warning" else text
            case on.BroadcastStalled(text=text):
                return f"warning: {text}"
            case on.PoolClosing():
                self._stage = "closing"
            case on.PoolClosed(seconds=seconds, calls=calls):
                self._stage = ""
                pool = f"pool {self._pool}" if len(_attached) > 1 else "pool"
                counts = f"{_counted(calls, 'call')}, {self._failed:,} failed, {_counted(len(self._nodes), 'node')}"
                return f"{pool} closed: {counts}, {elapsed(seconds)}"
            case _:
                pass
        return None


@dataclass(slots=True)
class _Bar:
    """The progress bar of a process: its last state, the one that was printed last, and when the next may be."""

    text: str = ""
    shown: str = ""
    due: float = 0.0


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
    bars: dict[int, _Bar] = field(default_factory=dict[int, _Bar])  # by rank
    recent: Recent = field(default_factory=Recent)

    def cells(self, number: int, opening: bool, ranked: bool, now: float) -> list[Cell]:
        name = (f"node-{number}", _NODE_COLOURS[number % len(_NODE_COLOURS)])
        if self.down is not None:
            return [("✗", _RED), name, ("down", _RED), (self.down, _RED)]
        if opening:
            return [(_SPINNER[int(now * 10) % 10], _CYAN), name, (self.phase, ""), (elapsed(now - self.since), _DIM)]
        busy = f"{self.cpu:4.0f} % CPU {self.memory / 1e6:8,.0f} MB" if self.cpu is not None else ""
        if self.gpus:
            busy += f"  {gpu_cell(self.gpus)}"
        named: dict[str, list[_Running]] = {}
        for one in self.running.values():
            named.setdefault(one[0], []).append(one)
        calls = ", ".join(
            f"{called}{f' ×{len(ones)}' if len(ones) > 1 else ''} {elapsed(now - min(since for _, since, _ in ones))}"
            + (_ranks(ones) if ranked else "")
            for called, ones in named.items()
        ) or self.recent.text(now)
        return [("●" if calls else "○", _GREEN), name, ("up", _GREEN), (busy, ""), (calls, _BOLD)]
