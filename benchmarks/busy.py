"""Calls while every core is busy, as data loaders keep them: each has a process that only counts."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

from calls import NODES, nothing
from contest import Medians, Row
from monarch_actors import with_monarch
from timing import repeated

__all__ = ["CONTENDERS", "rows"]

CALLS, BROADCASTS = 1_000, 300


def rows(seen: Medians) -> list[Row]:
    """The lines of this group."""
    ours, theirs = (lambda what: seen("skyward", what)), (lambda what: seen("monarch", what))
    return [
        Row(
            "no-op >> latency, p50, all cores busy",
            ours("latency"),
            "Monarch actor",
            theirs("latency"),
            "ms",
            at_most=1.2,
        ),
        Row(
            "@ to 4 nodes, p50, all cores busy",
            ours("broadcast"),
            "Monarch actors",
            theirs("broadcast"),
            "ms",
            at_most=1.2,
        ),
    ]


@contextmanager
def all_cores_busy() -> Generator[None]:
    """Has one process for each core that does not wait for anything."""
    count = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def with_skyward(quick: bool) -> dict[str, float]:
    """Latency of a call, and of a broadcast."""
    import skyward as sky

    call, (one_by_one, broadcasts) = sky.compute(nothing), _counts(quick)
    with all_cores_busy(), sky.ComputePool(nodes=NODES, console=False) as pool:
        repeated(lambda: call() >> pool, one_by_one // 10)
        latencies = repeated(lambda: call() >> pool, one_by_one)
        repeated(lambda: call() @ pool, broadcasts // 10)
        together = repeated(lambda: call() @ pool, broadcasts)
    return {"latency": statistics.median(latencies) * 1000, "broadcast": statistics.median(together) * 1000}


def with_busy_monarch(quick: bool) -> dict[str, float]:
    """The same of Monarch's actors."""
    with all_cores_busy():
        return with_monarch(NODES, *_counts(quick), 0)


CONTENDERS = {"skyward": with_skyward, "monarch": with_busy_monarch}


def _counts(quick: bool) -> tuple[int, int]:
    return (100, 50) if quick else (CALLS, BROADCASTS)
