"""Calls that do nothing, one at a time and many at once, and calls that wait."""

from __future__ import annotations

import statistics
import time
from itertools import cycle, islice

from contest import Medians, Row
from monarch_actors import with_monarch
from peers import ray_actors
from timing import repeated, timed

__all__ = ["CONTENDERS", "IDEAL", "NODES", "SLEEP", "SLEEPS", "SLOTS", "nothing", "rows"]

NODES, SLOTS = 4, 10
MAPPED = 20_000
SLEEPS, SLEEP = 400, 0.05
IDEAL = SLEEPS * SLEEP / (NODES * SLOTS)  # seconds


def rows(seen: Medians) -> list[Row]:
    """The lines of this group."""
    latency, gathered, mapped = (seen("skyward", what) for what in ("latency", "gather", "map"))
    broadcast, monarch = seen("skyward", "broadcast"), "Monarch actor"
    return [
        Row("no-op >> latency, p50", latency, "ray actor call", seen("ray", "latency"), "ms", at_most=1.0),
        Row("no-op >> latency, p50", latency, "loky", seen("loky", "latency"), "ms", at_most=1.0),
        Row("no-op >> latency, p50", latency, monarch, seen("monarch", "latency"), "ms", at_most=0.8),
        Row("@ to 4 nodes, p50", broadcast, f"{monarch}s", seen("monarch", "broadcast"), "ms", at_most=0.8),
        Row("no-op calls/s through gather", gathered, "ray actor calls", seen("ray", "gather"), "/s", at_least=3.0),
        Row("no-op calls/s through gather", gathered, f"{monarch}s", seen("monarch", "gather"), "/s", at_least=1.0),
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
    """Latency of a call that is waited for, and items through map."""
    from loky import get_reusable_executor

    one_by_one, _, items = _counts(quick)
    executor = get_reusable_executor(max_workers=NODES)
    list(executor.map(nothing, range(NODES * 20), chunksize=1))
    repeated(lambda: executor.submit(nothing).result(), one_by_one // 10)
    latencies = repeated(lambda: executor.submit(nothing).result(), one_by_one)
    mapped = statistics.median(repeated(lambda: list(executor.map(nothing, range(items), chunksize=200)), 5))
    executor.shutdown()
    return {"latency": statistics.median(latencies) * 1000, "map": items / mapped}


def with_monarch_actors(quick: bool) -> dict[str, float]:
    """Latency of a call to one of Monarch's actors, of one to all, and of calls to all in turn."""
    one_by_one, many, _ = _counts(quick)
    return with_monarch(NODES, one_by_one, one_by_one // 4, many)


CONTENDERS = {
    "skyward": with_skyward,
    "ray": with_ray,
    "loky": with_loky,
    "skyward-slots": with_skyward_slots,
    "monarch": with_monarch_actors,
}


def _counts(quick: bool) -> tuple[int, int, int]:
    return (200, 500, 2_000) if quick else (2_000, 10_000, MAPPED)
