"""Warnings of bodies as lines: each once for each place, and afterwards on which other nodes it was given."""

from __future__ import annotations

from typing import Any

from skyward import events as on
from skyward.client.python_warnings import is_repeated, shown_by_program

__all__ = ["WarningLines", "shown_by_program"]

_WAIT = 1.0
_MOST = 1000

_Place = tuple[str, str, int, str]


class WarningLines:
    """The warnings of one pool."""

    def __init__(self) -> None:
        self._seen: set[tuple[Any, ...]] = set()
        self._nodes: dict[_Place, set[int]] = {}  # that have given it
        self._untold: dict[_Place, set[int]] = {}
        self._since: float | None = None

    def lines(self, event: on.Warned, now: float) -> list[str]:
        """What is written now, as Python writes a warning; nothing if the same was written before."""
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
        """Sentences about repeated ones, when they have waited for a moment."""
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
