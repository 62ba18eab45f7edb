"""Items of a generator that come out of a node, and of an iterator that go into one; no peer, plain aims."""

from __future__ import annotations

import time
from collections.abc import Iterator

from contest import Medians, Row

__all__ = ["CONTENDERS", "count_all", "count_up", "rows"]


def rows(seen: Medians) -> list[Row]:
    """The lines of this group."""
    return [
        Row("stream items/s out of a node", seen("skyward", "out"), "wanted", 50_000, "/s", at_least=1.0),
        Row("stream items/s into a node", seen("skyward", "in"), "wanted", 100_000, "/s", at_least=1.0),
    ]


def count_up(count: int) -> Iterator[int]:
    """Yields numbers."""
    yield from range(count)


def count_all(items: Iterator[int]) -> int:
    """How many items came."""
    return sum(1 for _ in items)


def with_skyward(quick: bool) -> dict[str, float]:
    """One stream at a time, on one of four nodes."""
    import skyward as sky

    count = 20_000 if quick else 300_000
    out, into = sky.compute(count_up), sky.compute(count_all)
    with sky.ComputePool(nodes=4, console=False) as pool:
        for number in (1_000, count):
            began = time.perf_counter()
            came = sum(1 for _ in out(number) >> pool)
            outward = time.perf_counter() - began
            began = time.perf_counter()
            went = into(iter(range(number))) >> pool
            inward = time.perf_counter() - began
            assert came == went == number
    return {"out": count / outward, "in": count / inward}


CONTENDERS = {"skyward": with_skyward}
