"""Values as HTML for notebooks. Everything is escaped; colours work on light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from skyward.api.brief import brief

__all__ = ["PageAddress", "State", "bar", "call_card", "card", "status", "table"]

State = Literal["running", "done", "failed", "stopped"]

_COLOURS: Mapping[State, str] = {"running": "#3b82f6", "done": "#2da44e", "failed": "#e5534b", "stopped": "#8b949e"}
_LINE = "padding-left:.4em;display:flex;align-items:center;gap:.6em;line-height:1.6;font-variant-numeric:tabular-nums"
_TRACK = "display:inline-block;flex:none;width:12em;height:.5em;border-radius:.25em;overflow:hidden;"
_CELL = "text-align:left;vertical-align:top;padding:.1em .8em .1em 0"


def card(title: str, rows: Mapping[str, object]) -> str:
    cells = "".join(
        f'<tr><td style="{_CELL};opacity:.7">{escape(name)}</td><td style="{_CELL}">{_lines(value)}</td></tr>'
        for name, value in rows.items()
    )
    return f'<div><b>{escape(title)}</b><table style="margin:.2em 0">{cells}</table></div>'


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], notes: Iterable[str] = ()) -> str:
    head = "".join(f'<th style="{_CELL};opacity:.7;font-weight:normal">{escape(name)}</th>' for name in columns)
    cells = ("".join(f'<td style="{_CELL}">{_lines(cell)}</td>' for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    below = "".join(f"<div>{_lines(note)}</div>" for note in notes)
    filled = f'<table style="margin:.2em 0"><tr>{head}</tr>{body}</table>' if body else ""
    return f"<div><b>{escape(title)}</b>{filled}{below}</div>"


def bar(name: str, text: str, share: float | None, state: State, failed: float = 0.0) -> str:
    """Indeterminate without a share. `failed` is a share too."""
    colour = _COLOURS[state]
    if share is None:
        share, colour = 1.0, f"repeating-linear-gradient(-45deg,{colour} 0 .4em,transparent .4em .8em)"
    filled = _part(share, colour) + (_part(failed, _COLOURS["failed"]) if failed else "")
    return (
        f'<div style="{_LINE}"><span style="{_TRACK}background:rgba(128,128,128,.3)">{filled}</span>'
        f"<span><b>{escape(name)}</b> {escape(text)}</span></div>"
    )


def _part(share: float, colour: str) -> str:
    width = min(1.0, max(0.0, share)) * 100
    return f'<span style="float:left;width:{width:.1f}%;height:100%;background:{colour}"></span>'


def status(name: str, text: str, state: State) -> str:
    dot = f"flex:none;width:.6em;height:.6em;border-radius:50%;background:{_COLOURS[state]}"
    return f'<div style="{_LINE}"><span style="{dot}"></span><span><b>{escape(name)}</b> {escape(text)}</span></div>'


def _lines(value: object) -> str:
    return "<br>".join(map(escape, str(value).split("\n")))


def call_card(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float | None) -> str:
    limits = {"time limit": f"{timeout:g} s"} if timeout is not None and timeout < math.inf else {}
    given = {**{f"[{i}]": brief(v) for i, v in enumerate(args)}, **{k: brief(v) for k, v in kwargs.items()}}
    return card(f"{name}(...), not sent yet: {name}(...) >> pool", {**given, **limits})


@dataclass(frozen=True)
class PageAddress:
    """Where a pool's page is; it can be opened once. A notebook shows the page itself."""

    address: str
    pool: str = ""

    def __str__(self) -> str:
        return self.address

    def _repr_html_(self) -> str:
        where = escape(self.address, quote=True)
        page = f'<iframe src="{where}" style="width:100%;height:720px;border:1px solid #8886"></iframe>'
        later = f"This page is shown while the kernel runs; afterwards: <code>sky view {escape(self.pool)}</code>."
        return f"{page}<div>{later}</div>"
