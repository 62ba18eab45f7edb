"""Calls that do nothing, one at a time and many at once, and calls that wait."""

from __future__ import annotations

import statistics
import time
from itertools import cycle, islice

from contest import Medians, Row
from monarch_actors import INSTALLED, NOT_INSTALLED, with_monarch
from peers import ray_actors
from timing import repeated, timed

__all__ = ["CONTENDERS", "IDEAL", "MISSING", "NODES", "SLEEP", "SLEEPS", "SLOTS", "nothing", "rows"]

NODES, SLOTS = 4, 10
MAPPED = 20_000
SLEEPS, SLEEP = 400, 0.05
IDEAL = SLEEPS * SLEEP / (NODES * SLOTS)  # seconds


def rows(seen: Medians) -> list[Row]:
    """The lines of this group."""
    latency, gathered, mapped = (seen("skyward", what) for what in ("latency", "gather", "map"))
    found = [
        Row("no-op >> latency, p50", latency, "ray actor call", seen("ray", "latency"), "ms", at_most=1.0),
        Row("no-op calls/s through gather", gathered, "ray actor calls", seen("ray", "gather"), "/s", at_least=3.0),
        Row("map, no-op items/s", mapped, "ray, a call for each", seen("ray", "gather"), "/s", at_least=50.0),
        Row("map, no-op items/s", mapped, "ray, one after another", seen("ray", "sequence"), "/s", at_least=50.0),
        Row("map, no-op items/s", mapped, "loky, chunksize=200", seen("loky", "map"), "/s", at_least=0.9),
        Row(
            "400 calls of 50 ms on 4 x 10 slots, part of ideal",
            seen("skyward-slots", "share"),
            "ideal",
            1.0,
            "",
            at_least=0.95,
        ),
    ]
    if seen.has("monarch"):
        theirs = {what: seen("monarch", what) for what in ("latency", "broadcast", "gather")}
        broadcast = seen("skyward", "broadcast")
        found += [
            Row("no-op >> latency, p50", latency, "Monarch actor", theirs["latency"], "ms", at_most=0.8),
            Row("@ to 4 nodes, p50", broadcast, "Monarch actors", theirs["broadcast"], "ms", at_most=0.8),
            Row("no-op calls/s through gather", gathered, "Monarch actors", theirs["gather"], "/s", at_least=1.0),
        ]
    return found


def nothing(item: object = None) -> object:
    """The body of every call here."""
    return item


def with_skyward(quick: bool) -> dict[str, float]:
    """Latency, that of a broadcast, calls through gather, items through map."""
    import skyward as sky

    call = sky.compute(nothing)
    one_by_one, many, items = _counts(quick)
    with sky.ComputePool(nodes=NODES, console=False) as pool:
        _ = call() @ pool
        repeated(lambda: call() >> pool, one_by_one // 10)
        latencies = repeated(lambda: call() >> pool, one_by_one)
        together = repeated(lambda: call() @ pool, one_by_one // 4)
        sky.gather(*[call() for _ in range(100)]) >> pool
        gather = timed(lambda: sky.gather(*[call() for _ in range(many)]) >> pool)
        pool.map(nothing, range(100))
        mapped = statistics.median(repeated(lambda: pool.map(nothing, range(items)), 5))
    return {
        "latency": statistics.median(latencies) * 1000,
        "broadcast": statistics.median(together) * 1000,
        "gather": many / gather,
        "map": items / mapped,
    }


def with_skyward_slots(quick: bool) -> dict[str, float]:
    """The part of the ideal that calls which only wait reach on 40 slots."""
    import skyward as sky

    call = sky.compute(time.sleep)
    with sky.ComputePool(nodes=NODES, worker=sky.Worker(SLOTS), console=False) as pool:
        sky.gather(*[call(0.001) for _ in range(NODES * SLOTS)]) >> pool
        took = repeated(lambda: sky.gather(*[call(SLEEP) for _ in range(SLEEPS)]) >> pool, 3)
    return {"share": IDEAL / statistics.median(took)}


def with_ray(quick: bool) -> dict[str, float]:
    """The same of ray's actors; `sequence` is what one call after another gives."""
    one_by_one, many, _ = _counts(quick)
    with ray_actors(NODES, nothing) as (ray, actors):
        turn = cycle(actors)
        ray.get([actor.nothing.remote() for actor in islice(turn, 100)])
        repeated(lambda: ray.get(next(turn).nothing.remote()), one_by_one // 10)
        latencies = repeated(lambda: ray.get(next(turn).nothing.remote()), one_by_one)
        gather = timed(lambda: ray.get([actor.nothing.remote() for actor in islice(turn, many)]))
    return {
        "latency": statistics.median(latencies) * 1000,
        "sequence": len(latencies) / sum(latencies),
        "gather": many / gather,
    }


def with_loky(quick: bool) -> dict[str, float]:
    """Items through loky's map."""
    from loky import get_reusable_executor

    items = _counts(quick)[2]
    executor = get_reusable_executor(max_workers=NODES)
    list(executor.map(nothing, range(NODES * 20), chunksize=1))
    mapped = statistics.median(repeated(lambda: list(executor.map(nothing, range(items), chunksize=200)), 5))
    executor.shutdown()
    return {"map": items / mapped}


def with_monarch_actors(quick: bool) -> dict[str, float]:
    """Latency of a call to one of Monarch's actors, of one to all, and of calls to all in turn."""
    one_by_one, many, _ = _counts(quick)
    return with_monarch(NODES, one_by_one, one_by_one // 4, many)


CONTENDERS = {
    "skyward": with_skyward,
    "ray": with_ray,
    "loky": with_loky,
    "skyward-slots": with_skyward_slots,
}
if INSTALLED:
    CONTENDERS["monarch"] = with_monarch_actors
MISSING = "" if INSTALLED else NOT_INSTALLED


def _counts(quick: bool) -> tuple[int, int, int]:
    return (200, 500, 2_000) if quick else (2_000, 10_000, MAPPED)
