"""Listens to a pool's events: draws on a terminal or in a notebook, or writes plain lines.

events ──► Console ──► Overview (what one pool is doing)
              ├─lines──► Feed (bounded) ──thread──► Terminal, or plain streams
              └────────► Cells (HTML in a notebook)
"""

from __future__ import annotations

import atexit
import difflib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from skyward import events as on
from skyward.api.html import State, bar, status
from skyward.client.output import is_repeated, shown_by_program
from skyward.errors import InvalidArgument
from skyward.history.state import PoolState
from skyward.view.overview import NODE_COLOURS, Overview, group_text, progress_text
from skyward.view.terminal import Cell, Feed, Terminal, clean, is_terminal, plain, styled

__all__ = ["Cells", "Console", "WarningLines", "attach", "in_notebook", "shown_by_program"]


Publish = Callable[[str, str, str, bool], None]
"""Shows HTML, and the same as text, under an id; True replaces what has this id."""

_EVERY = 0.25
_REFRESH = 1.0  # time goes on also while nothing ends
_LEAST = 0.5  # a group that is done sooner is not shown
_MOST_ROWS = 8  # displays of groups in a cell: a loop that makes more takes those again that are over
_AT_ONCE = 10.0
_ids = itertools.count(1)


def in_notebook() -> bool:
    module = sys.modules.get("IPython")
    return module is not None and hasattr(module.get_ipython(), "kernel")


def _publish(id: str, html: str, text: str, update: bool) -> None:
    from IPython.display import display  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    display({"text/html": html, "text/plain": text}, raw=True, display_id=id, update=update)


def _current_cell() -> object:
    return sys.modules["IPython"].get_ipython().execution_count


@dataclass
class _Display:
    cell: object
    id: str = field(default_factory=lambda: f"skyward-{os.getpid()}-{next(_ids)}")
    shown: str = ""
    at: float = 0.0
    over: bool = False


class Cells:
    def __init__(self, show: Publish = _publish, cell: Callable[[], object] = _current_cell) -> None:
        self._show, self._cell = show, cell
        self._opening: _Display | None = None
        self._groups: dict[int, tuple[_Display, on.GroupProgress, float]] = {}  # with when it was told
        self._ended: list[_Display] = []  # of groups that are over, in the cell that runs
        self._reports: _Display | None = None
        self._rows: dict[tuple[int, int | None], on.Progress] = {}
        self._state = PoolState()
        self._stale = False
        self._at_once, self._counted = _AT_ONCE, 0.0  # how many more may be shown at once, and when that was counted

    def hear(self, event: on.Event, sentence: str | None, now: float) -> bool:
        """False if a sentence about the event is still to be written."""
        changed = self._state.apply(event, now)
        match event:
            case on.PoolOpening():
                self._open(event.pool, sentence or "", now, "running", at_once=True)
            case on.NodePhase() if self._opening is not None:
                if sentence:
                    self._open(event.pool, sentence, now, "running")
            case on.PoolOpened():
                self._open(event.pool, (sentence or "").removeprefix("pool "), now, "done", at_once=True)
                self._opening = None
            case on.GroupProgress():
                self._group(event, now)
            case on.Progress():
                self._report(event, now)
            case on.CallEnded():
                self._stale = self._stale or any((call.node, call.rank) in self._rows for call in changed)
                self._refresh_reports(now, at_once=not self._state.calls)
                return False
            case on.NodeSample():
                self._tick(now)
                return False
            case on.PoolClosed():
                if self._opening is not None:
                    self._open(event.pool, "was not opened", now, "failed", at_once=True)
                self._refresh_reports(now, at_once=True)
                return False
            case _:
                return False
        return True

    def _open(self, pool: str, text: str, now: float, state: State, at_once: bool = False) -> None:
        if self._opening is None:
            self._opening = _Display(self._cell())
        if at_once or now - self._opening.at >= _EVERY:
            self._put(self._opening, status(pool, text, state), f"skyward: {pool}: {text}", now)

    def _group(self, event: on.GroupProgress, now: float) -> None:
        found = self._groups.pop(event.group, None)
        display = found[0] if found else self._group_display()
        if not event.over:
            self._groups[event.group] = display, event, now
        if event.seconds >= _LEAST or display.shown:
            self._draw_group(display, event, now, now)
        if event.over and display.shown:
            display.over = True
            self._ended.append(display)

    def _group_display(self) -> _Display:
        cell = self._cell()
        self._ended = [display for display in self._ended if display.cell == cell]
        here = len(self._ended) + sum(one.cell == cell for one, _, _ in self._groups.values())
        return self._ended.pop(0) if here >= _MOST_ROWS and self._ended else _Display(cell)

    def _draw_group(self, display: _Display, event: on.GroupProgress, told: float, now: float) -> None:
        text = group_text(event, now - told)
        state: State = "running"
        if event.over:
            state = "done" if event.done + event.failed == event.total else "stopped"
        share = event.done / event.total if event.total else None
        failed = event.failed / event.total if event.total else 0.0
        words = text.removeprefix(f"{event.name}: ")
        self._put(display, bar(event.name, words, share, state, failed), text, now)

    def _report(self, event: on.Progress, now: float) -> None:
        cell = self._cell()
        if self._reports is None or self._reports.cell != cell:
            busy = self._busy()
            self._rows = {key: row for key, row in self._rows.items() if key in busy}
            self._reports = _Display(cell)
        self._rows[event.node, event.rank] = event
        self._stale = True
        self._refresh_reports(now)

    def _refresh_reports(self, now: float, at_once: bool = False) -> None:
        display = self._reports
        if display is None or not self._stale or not (now - display.at >= _EVERY or (at_once and self._allowed(now))):
            return
        self._stale = False
        parts, lines, busy = list[str](), list[str](), self._busy()
        for (node, rank), event in sorted(self._rows.items(), key=lambda row: (row[0][0], row[0][1] or 0)):
            name = f"node-{node} rank-{rank}" if self._state.processes != 1 else f"node-{node}"
            call = self._state.calls.get(event.call or "")
            share = event.step / event.total if event.total else None
            done = event.total is not None and event.step >= event.total
            state: State = "running" if (node, rank) in busy and not done else "done" if done else "stopped"
            if share is None and state != "running":
                share = 0.0
            words = progress_text(event)
            parts.append(bar(name, f"{call.name} {words}" if call is not None else words, share, state))
            lines.append(f"[{name}] {words}")
        self._put(display, "".join(parts), "\n".join(lines), now)

    def _busy(self) -> set[tuple[int, int | None]]:
        return {(call.node, call.rank) for call in self._state.calls.values()}

    def _allowed(self, now: float) -> bool:
        """Very many short bodies would flood the notebook."""
        self._at_once = min(_AT_ONCE, self._at_once + (now - self._counted) / _EVERY)
        self._counted = now
        self._at_once -= self._at_once >= 1
        return self._at_once >= 1

    def _tick(self, now: float) -> None:
        for display, event, told in list(self._groups.values()):
            if display.shown and now - display.at >= _REFRESH:
                self._draw_group(display, event, told, now)
        self._refresh_reports(now)

    def _put(self, display: _Display, html: str, text: str, now: float) -> None:
        if html == display.shown:
            return
        self._show(display.id, html, text, bool(display.shown))
        display.shown, display.at = html, now


log = logging.getLogger("skyward.console")

_MODES = ("auto", "live", "plain", "silent")
_CI = ("CI", "TF_BUILD", "TEAMCITY_VERSION", "JENKINS_URL")
_PROGRESS_EVERY = 5.0
_LONG = 1.0  # a call whose last report is shown in any case
_GROUP_EVERY = 10.0
_DIM, _RED, _YELLOW = "2", "31", "33"

_guard = threading.RLock()
_attached: list[Console] = []
_terminal: Terminal | None = None


def attach(mode: bool | str = "auto", *, file: TextIO | None = None, recorded: bool = False) -> Console:
    """With `recorded`, things happen at the events' own times."""
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
            console = Console(_terminal.feed, live=True, recorded=recorded)
        else:
            shows = how != "plain" and file is None and in_notebook()
            console = Console(Feed(plain(file)), cells=Cells() if shows else None, recorded=recorded)
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
        and not in_notebook()
    )


def _rows(width: int) -> list[list[Cell]]:
    return [row for console in list(_attached) if console.live for row in console.rows(width)]


def _in_fork() -> None:
    """A fork has no writing thread, and locks may be held for ever."""
    global _guard, _terminal
    if _terminal:
        _terminal.abandon()
    for console in _attached:
        console.silence()
    _guard, _terminal = threading.RLock(), None
    _attached.clear()


os.register_at_fork(after_in_child=_in_fork)


class Console:
    def __init__(
        self, feed: Feed | None, *, live: bool = False, cells: Cells | None = None, recorded: bool = False
    ) -> None:
        self.live = live
        self._shift = time.monotonic() - time.time() if recorded else None  # from an event's time to that of the view
        self._feed, self._lock, self._cells = feed, threading.Lock(), cells
        self._overview = Overview(live=live)
        self._tags: dict[tuple[int, int | None, bool], str] = {}
        self._unwritten = self._has_bars = False
        self._warned: WarningLines | None = None
        self._due: dict[int, float] = {}  # when the next line about a group may be written, in its own time
        self._stderr = styled("|", _RED).split("|") if live else ["", ""]

    def __call__(self, event: on.Event) -> None:
        feed = self._feed
        if feed is None:
            return
        if isinstance(event, on.Output):
            self._show(feed, event)
            return
        if isinstance(event, on.Warned):
            self._warn(feed, event)
            return
        if isinstance(event, on.Progress) and self._cells is None:
            text = progress_text(event)
            self._show(feed, on.Output(event.pool, event.node, "stdout", text, event.call, True, event.rank))
            return
        if self._warned is not None:
            self._tell_repeated(feed, self._warned, event)
        if isinstance(event, on.PoolClosing):
            self._end_bars(feed)
        elif isinstance(event, on.CallEnded) and self._has_bars and not self.live:
            with self._lock:
                idle = self._overview.is_idle_after(event)
            if idle:  # not only at closing, long after what the program prints next
                self._end_bars(feed, at_once=event.seconds >= _LONG)
        if isinstance(event, on.CallEnded | on.PoolOpened) and self._unwritten and not self.live:
            self._unwritten = False
            feed.flush()  # the lines of a call come before what the program prints of its result
        now = self._time(event)
        with self._lock:
            sentence = self._overview.follow(event, now)
        shown = self._cells is not None and self._shown_in_cell(self._cells, feed, event, sentence, now)
        is_group = isinstance(event, on.GroupProgress)
        if is_group and not shown:
            self._tell_group(feed, event)
        if sentence and (is_group or not shown):
            # Without the lock: the feed may make this thread wait for the one that draws, and that one needs the lock.
            self._tell(feed, event, sentence)

    def _warn(self, feed: Feed, event: on.Warned) -> None:
        if shown_by_program():
            return
        self._warned = self._warned or WarningLines()
        for line in self._warned.lines(event, time.monotonic()):
            self._show(feed, on.Output(event.pool, event.node, "stderr", line, event.call, False, event.rank))

    def _tell_repeated(self, feed: Feed, warned: WarningLines, event: on.Event) -> None:
        if not isinstance(event, on.NodeSample | on.CallEnded | on.PoolClosing | on.PoolClosed):
            return
        with self._lock:
            at_once = not isinstance(event, on.NodeSample) and self._overview.is_idle_after(event)
        for text in warned.rest(time.monotonic(), at_once):
            self._tell(feed, on.Notice(event.pool, text, "warning"), text)
            self._unwritten = True

    def catch_up(self, event: on.Event) -> None:
        with self._lock:
            self._overview.recall(event, self._time(event))

    def _time(self, event: on.Event) -> float:
        return time.monotonic() if self._shift is None else event.time + self._shift

    def close(self) -> None:
        global _terminal
        feed, self._feed = self._feed, None
        if feed is None:
            return
        atexit.unregister(self.close)
        self._end_bars(feed)
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

    def _end_bars(self, feed: Feed, at_once: bool = True) -> None:
        now = time.monotonic()
        for number, marks in self._overview.marks.items():
            for rank, shown in marks.bars.items():
                if shown.text and not self.live and (at_once or now >= shown.due_at_end):
                    feed.put("stdout", f"{self._tag(number, rank)}{shown.text}\n")
                    shown.text, shown.due_at_end, self._unwritten = "", now + _PROGRESS_EVERY, True

    def silence(self) -> None:
        self._feed = None

    def rows(self, width: int = sys.maxsize) -> list[list[Cell]]:
        with self._lock:
            return self._overview.rows(time.monotonic(), width)

    def _tell(self, feed: Feed, event: on.Event, sentence: str) -> None:
        warns = isinstance(event, on.NodeDown | on.BroadcastStalled | on.CallEnded)
        warns = warns or (isinstance(event, on.Notice) and event.level == "warning")
        if isinstance(event, on.PoolClosed):
            sentence = f"pool {f'{event.pool} ' if len(_attached) > 1 else ''}{sentence}"
        if self.live:
            lines = f"skyward: {sentence}".split("\n")
            text = "".join(styled(clean(line, colours=False), _YELLOW if warns else _DIM) + "\n" for line in lines)
            feed.put("stderr", text)
            return
        # a notebook has a colour of warnings for all that comes on stderr
        feed.put("stdout" if self._cells is not None and not warns else "stderr", f"skyward: {sentence}\n")
        if isinstance(event, on.PoolOpened | on.PoolClosed | on.CallEnded):
            feed.flush()  # it is there before the program's next line, and in the same cell of a notebook

    def _tell_group(self, feed: Feed, event: on.GroupProgress) -> None:
        if self.live:
            return  # it is a row of the view
        due = self._due.setdefault(event.group, _GROUP_EVERY)
        if event.over:
            del self._due[event.group]
        if event.seconds >= due and not (event.over and due == _GROUP_EVERY):
            feed.put("stderr", f"skyward: {group_text(event)}\n")
            if not event.over:
                self._due[event.group] = event.seconds + _GROUP_EVERY

    def _shown_in_cell(self, cells: Cells, feed: Feed, event: on.Event, sentence: str | None, now: float) -> bool:
        try:
            if isinstance(event, on.GroupProgress | on.Progress):
                feed.flush()  # lines that came before stand above it
            return cells.hear(event, sentence, now)
        except Exception as exc:  # whatever shows notebooks here: calls go on, and lines do
            self._cells = None
            log.warning("progress cannot be shown in this notebook, plain lines are written instead: %r", exc)
            return False

    def _show(self, feed: Feed, event: on.Output) -> None:
        marks = self._overview.marks.get(event.node)
        bar = marks.bars.get(event.rank or 0) if marks is not None else None
        if bar is None:
            with self._lock:
                bar = self._overview.bar(event.node, event.rank)
        if event.progress:
            now = time.monotonic()
            bar.text, self._has_bars = event.text, True
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

    def _tag(self, node: int, rank: int | None) -> str:
        state = self._overview.state
        processes, nodes = state.processes, state.nodes
        key = (node, rank if processes != 1 else None, len(_attached) > 1)
        if key not in self._tags:
            pool = f"{state.pool} " if key[2] else ""
            last = max(nodes, default=0)
            name, longest, colour = f"{pool}node-{node}", f"{pool}node-{last}", node
            if key[1] is not None:
                each = processes if isinstance(processes, int) else 8
                name, longest, colour = f"{name} rank-{key[1]}", f"{longest} rank-{(last + 1) * each - 1}", key[1]
            tag = styled(f"{name:<{len(longest)}} │", NODE_COLOURS[colour % len(NODE_COLOURS)])
            self._tags[key] = f"{tag} " if self.live else f"[{name}] "
        return self._tags[key]


_WAIT = 1.0
_MOST = 1000

_Place = tuple[str, str, int, str]


class WarningLines:
    def __init__(self) -> None:
        self._seen: set[tuple[Any, ...]] = set()
        self._nodes: dict[_Place, set[int]] = {}  # that have given it
        self._untold: dict[_Place, set[int]] = {}
        self._since: float | None = None

    def lines(self, event: on.Warned, now: float) -> list[str]:
        place = (event.category, event.path, event.line, event.text)
        repeated = is_repeated(event, self._seen)
        if len(self._nodes) >= _MOST:
            self._nodes.clear()
        known = self._nodes.setdefault(place, set())
        if repeated and event.node not in known:
            self._untold.setdefault(place, set()).add(event.node)
            self._since = now if self._since is None else self._since
        known.add(event.node)
        if repeated:
            return []
        written = f"{event.path}:{event.line}: {event.category}: {event.text}"
        return [*written.split("\n"), *([f"  {event.source}"] if event.source else [])]

    def rest(self, now: float, at_once: bool = False) -> list[str]:
        if self._since is None or not (at_once or now - self._since >= _WAIT):
            return []
        untold, self._untold, self._since = self._untold, {}, None
        return [
            f"the same {category} ({path}:{line}) on {_nodes(sorted(nodes))}"
            for (category, path, line, _), nodes in untold.items()
        ]


def _nodes(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"node {numbers[0]}"
    shown = [str(number) for number in numbers[:20]]
    more = f" and {len(numbers) - 20} more" if len(numbers) > 20 else ""
    return f"nodes {', '.join(shown)}{more}" if more else f"nodes {', '.join(shown[:-1])} and {shown[-1]}"
