"""How far things are, in a notebook: HTML in the cell that runs, updated in place; the last state stays.

One line for a pool that opens, one for each group of calls, and one for each process whose body reports with
`sky.progress`. No widgets: a notebook that is stored, or shown by something else, has what was shown last.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from skyward import events as on
from skyward.api.html import State, bar, status
from skyward.history.state import PoolState
from skyward.view.overview import group_text, progress_text

__all__ = ["Cells", "in_notebook"]

Publish = Callable[[str, str, str, bool], None]
"""Shows HTML, and the same as text, under an id; True if what has this id is to be replaced."""

_EVERY = 0.25
_REFRESH = 1.0  # time goes on also while nothing ends
_LEAST = 0.5  # a group that is done sooner is not shown
_MOST = 8  # displays of groups in a cell: a loop that makes more takes those again that are over
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
    """Shows the progress of one pool. Not thread-safe: the console calls it in the thread of listeners."""

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
        """Shows what the event says; False if the sentence about it, if there is one, is still to be written."""
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
        return self._ended.pop(0) if here >= _MOST and self._ended else _Display(cell)

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
        """Whether the last state of a body may be shown at once: very many short ones would flood the notebook."""
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
