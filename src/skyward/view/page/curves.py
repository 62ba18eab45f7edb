"""Figures over time with as few points as a curve needs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["SAMPLES", "Curve", "thinned"]

SAMPLES = 20_000
"""How many figures of a kind are kept."""

Point = tuple[float, float]


class Curve:
    """Figures in their order, the newest of them kept."""

    __slots__ = ("at", "values")

    def __init__(self) -> None:
        self.at: list[float] = []
        self.values: list[float] = []

    def add(self, at: float, value: float) -> None:
        """One more figure; what is no number is left out."""
        if not math.isfinite(value) or not math.isfinite(at):
            return
        self.at.append(at)
        self.values.append(value)
        if len(self.at) >= 2 * SAMPLES:
            del self.at[:SAMPLES], self.values[:SAMPLES]

    def points(self, most: int, since: float = -math.inf) -> list[Point]:
        """The curve from `since` on, with at most so many points."""
        first = 0 if since == -math.inf else bisect_left(self.at, since)
        return thinned(list(zip(self.at[first:], self.values[first:], strict=True)), most)


def thinned(found: Sequence[Point], most: int) -> list[Point]:
    """At most so many points: of each stretch the one that differs most from the one before."""
    most = max(3, most)
    if len(found) <= most:
        return [_short(point) for point in found]
    size, chosen = len(found) / (most - 2), [found[0]]
    for index in range(most - 2):
        stretch = found[int(index * size) : max(int((index + 1) * size), int(index * size) + 1)]
        chosen.append(max(stretch, key=lambda point: abs(point[1] - chosen[-1][1])))
    return [_short(point) for point in [*chosen, found[-1]]]


def _short(point: Point) -> Point:
    """A point with as many digits as can be seen."""
    at, value = point
    return round(at, 2), float(f"{value:.5g}")
