"""The console of a pool: a listener of its events that draws on a terminal or in a notebook, or writes plain lines.

events ──► Console ──► Overview (what one pool is doing)
              ├─lines──► Feed (bounded) ──thread──► Terminal, or plain streams
              └────────► Cells (HTML in a notebook)
prints of the script, while a terminal is drawn on ──► the same Feed
"""

from __future__ import annotations

import atexit
import difflib
import logging
import os
import sys
import threading
import time
from typing import Any, TextIO

from skyward import events as on
from skyward.client.output import is_repeated, shown_by_program
from skyward.errors import InvalidArgument
from skyward.view.cells import Cells, in_notebook
from skyward.view.overview import NODE_COLOURS, Overview, group_text, progress_text
from skyward.view.terminal import Cell, Feed, Terminal, clean, is_terminal, plain, styled

__all__ = ["Console", "WarningLines", "attach", "shown_by_program"]


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
    """A console to be called with every event of one pool, until its `close()`.

    `mode` is "auto" or True, "live" (wherever there is a terminal), "plain", "silent" or False. `recorded`: the events
    come from a history, so that things happen at the events' own times, and not now.
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
    """Leave drawing to the process that began it: here no thread writes, and locks may be held for ever."""
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
        """Says which other nodes gave a warning that was shown: when the last call has ended, or a moment later."""
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
        """Writes the last state of progress bars that were cut off; else, for short calls, only now and then."""
        now = time.monotonic()
        for number, marks in self._overview.marks.items():
            for rank, bar in marks.bars.items():
                if bar.text and not self.live and (at_once or now >= bar.due_at_end):
                    feed.put("stdout", f"{self._tag(number, rank)}{bar.text}\n")
                    bar.text, bar.due_at_end, self._unwritten = "", now + _PROGRESS_EVERY, True

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
