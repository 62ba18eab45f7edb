"""Values as HTML, for notebooks: a title and rows. Everything that is shown is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

__all__ = ["card"]


def card(title: str, rows: Mapping[str, object]) -> str:
    """A title over a table of two columns."""
    cells = "".join(
        f'<tr><td style="text-align:left;opacity:.7">{escape(name)}</td>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<div><b>{escape(title)}</b><table>{cells}</table></div>"
