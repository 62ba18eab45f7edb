"""What bodies report with `sky.progress`, as curves: metrics by step, and how far each call is over time."""

from __future__ import annotations

import math
from typing import Any

from skyward import events
from skyward.view.page.curves import Curve

__all__ = ["Reports"]

_CURVES = 400
_POINTS = 12_000  # in one answer
_OF_A_CURVE = 300

Key = tuple[str, int, int | None, str | None]


class Reports:
    """Curves by name, node, rank and call; the calls that reported first go when there are too many."""

    def __init__(self) -> None:
        self._curves: dict[Key, Curve] = {}
        self._shares: dict[Key, Curve] = {}

    def add(self, event: events.Progress, began: float) -> None:
        """A body has said how far it is; the pool was opened at `began`."""
        where = (event.node, event.rank, event.call)
        for name, value in event.metrics.items():
            _append(self._curves, (name[:200], *where), event.step, value)
        if event.total and math.isfinite(event.total):
            _append(self._shares, ("progress", *where), event.time - began, 100.0 * event.step / event.total)

    def curves(self) -> list[dict[str, Any]]:
        """All of them, each with no more points than there is room for; `by` is what their points are counted by."""
        found = [("time", key, curve) for key, curve in self._shares.items()]
        found += [("step", key, curve) for key, curve in sorted(self._curves.items(), key=lambda item: item[0][:2])]
        most = min(_OF_A_CURVE, max(20, _POINTS // max(1, len(found))))
        return [
            {"by": by, "name": name, "node": node, "rank": rank, "call": call, "points": curve.points(most)}
            for by, (name, node, rank, call), curve in found
        ]


def _append(curves: dict[Key, Curve], key: Key, at: float, value: float) -> None:
    if not math.isfinite(value):
        return
    (curves.get(key) or curves.setdefault(key, Curve())).add(at, value)
    while len(curves) > _CURVES:
        del curves[next(iter(curves))]
