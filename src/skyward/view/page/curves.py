"""Figures over time with as few points as a curve needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["SAMPLES", "thinned"]

SAMPLES = 20_000
"""How many figures of a kind are kept."""
_POINTS = 300


def thinned(points: Iterable[tuple[float, float]], since: float) -> Sequence[tuple[float, float]]:
    """At most so many points that a curve needs: of each stretch the one that differs most from the one before."""
    found = [point for point in points if point[0] >= since and math.isfinite(point[1])]
    if len(found) <= _POINTS:
        return found
    size, chosen = len(found) / (_POINTS - 2), [found[0]]
    for index in range(_POINTS - 2):
        stretch = found[int(index * size) : max(int((index + 1) * size), int(index * size) + 1)]
        chosen.append(max(stretch, key=lambda point: abs(point[1] - chosen[-1][1])))
    return [*chosen, found[-1]]
