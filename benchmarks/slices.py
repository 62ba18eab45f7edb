"""What `run.py --against` measures, in slices: one measure of one checkout, in a process of its own.

python slices.py call-4     waits for lines on standard input; each is the seconds of a slice, and is answered with JSON

Only the public API of Skyward is used here, so that any two checkouts can run it.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import memory
import startup
from calls import IDEAL, NODES, SLEEP, SLEEPS, SLOTS, nothing
from streams import count_all, count_up
from timing import timed

__all__ = ["MEASURES", "Figure", "Measure"]

GATHERED, MAPPED, STREAMED, PRINTED = 1_000, 10_000, 20_000, 50
PATIENCE = 10.0  # seconds for a printed line that is late


@dataclass(frozen=True)
class Figure:
    """One row of the table: a name in a slice's answer, and how it is shown."""

    name: str
    what: str
    unit: str
    more_is_better: bool = False


@dataclass(frozen=True)
class Measure:
    """What is opened once in each process, and what a slice of so many seconds does with it."""

    figures: tuple[Figure, ...]
    slice: Callable[[Any, float], dict[str, float]]
    open: Callable[[], AbstractContextManager[Any]] = nullcontext
    needs: str | None = None
    """A package without which the measure is skipped."""
    slices_at_most: int | None = None
    """For figures that hardly vary and take long to get."""


def _pool(nodes: int = NODES, slots: int = 1) -> Any:
    import skyward as sky

    return sky.ComputePool(nodes=nodes, worker=sky.Worker(slots), console=False)


def _joblib_pool() -> Any:
    import skyward as sky

    return sky.integrations.JoblibPool(nodes=NODES, concurrency=SLOTS, console=False)


def _latency(pool: Any, seconds: float) -> dict[str, float]:
    import skyward as sky

    call = sky.compute(nothing)
    times = _lasting(seconds, lambda: call() >> pool)
    ranks = statistics.quantiles(times, n=20, method="inclusive") if len(times) > 1 else times * 19
    return {"p50": ranks[9] * 1000, "p95": ranks[18] * 1000}


def _gather(pool: Any, seconds: float) -> dict[str, float]:
    import skyward as sky

    call = sky.compute(nothing)
    times = _lasting(seconds, lambda: sky.gather(*[call() for _ in range(GATHERED)]) >> pool)
    return {"calls": GATHERED / statistics.median(times)}


def _map(pool: Any, seconds: float) -> dict[str, float]:
    times = _lasting(seconds, lambda: pool.map(nothing, range(MAPPED)))
    return {"items": MAPPED / statistics.median(times)}


def _slots(pool: Any, seconds: float) -> dict[str, float]:
    import skyward as sky

    call = sky.compute(time.sleep)

    def naps() -> None:
        for future in [call(SLEEP) > pool for _ in range(SLEEPS)]:
            future.result()

    return {"share": 100 * IDEAL / statistics.median(_lasting(seconds, naps))}


def _joblib(pool: Any, seconds: float) -> dict[str, float]:
    from joblib import Parallel, delayed

    times = _lasting(seconds, lambda: Parallel(n_jobs=-1)(delayed(time.sleep)(SLEEP) for _ in range(SLEEPS)))
    return {"share": 100 * IDEAL / statistics.median(times)}


def _stream(pool: Any, seconds: float) -> dict[str, float]:
    import skyward as sky

    out, into = sky.compute(count_up), sky.compute(count_all)
    outward = _lasting(seconds / 2, lambda: sum(1 for _ in out(STREAMED) >> pool))
    inward = _lasting(seconds / 2, lambda: into(iter(range(STREAMED))) >> pool)
    return {"out": STREAMED / statistics.median(outward), "in": STREAMED / statistics.median(inward)}


def _print(pool: Any, seconds: float) -> dict[str, float]:
    import skyward as sky

    heard = threading.Semaphore(0)
    stop = pool.on_event(lambda event: heard.release() if isinstance(event, sky.events.Output) else None)
    call = sky.compute(print)

    def printing() -> None:
        for number in range(PRINTED):
            _ = call("line", number) >> pool
        for number in range(PRINTED):
            if not heard.acquire(timeout=PATIENCE):
                raise RuntimeError(f"only {number} of {PRINTED} printed lines arrived")

    try:
        return {"took": statistics.median(_lasting(seconds, printing)) * 1000}
    finally:
        stop()


def _opening(_: object, seconds: float) -> dict[str, float]:
    return startup.CONTENDERS["skyward"](False)


def _memory(_: object, seconds: float) -> dict[str, float]:
    return memory.with_skyward(False)


def _per_second(name: str, what: str) -> Figure:
    return Figure(name, what, "/s", more_is_better=True)


def _latencies(nodes: str) -> tuple[Figure, ...]:
    return tuple(Figure(name, f"no-op >> latency, {nodes}, {name}", "ms") for name in ("p50", "p95"))


MEASURES = {
    "call-1": Measure(_latencies("1 node"), _latency, partial(_pool, 1)),
    "call-4": Measure(_latencies("4 nodes"), _latency, _pool),
    "gather": Measure((_per_second("calls", f"gather of {GATHERED:,} no-ops, calls"),), _gather, _pool),
    "map": Measure((_per_second("items", f"map of {MAPPED:,} tiny items"),), _map, _pool),
    "slots": Measure(
        (Figure("share", "400 x 50 ms on 40 slots, submits", "%", True),), _slots, partial(_pool, 4, SLOTS)
    ),
    "joblib": Measure(
        (Figure("share", "400 x 50 ms on 40 slots, joblib", "%", True),), _joblib, _joblib_pool, "joblib"
    ),
    "stream": Measure(
        (
            _per_second("out", f"stream of {STREAMED:,} items out of a node"),
            _per_second("in", f"stream of {STREAMED:,} items into a node"),
        ),
        _stream,
        _pool,
    ),
    "print": Measure((Figure("took", f"{PRINTED} calls that print, one by one", "ms"),), _print, _pool),
    "open": Measure((Figure("open", "pool open, 4 nodes, from process start", "s"),), _opening),
    "memory": Measure((Figure("idle", "memory of an idle node", "MB"),), _memory, slices_at_most=4),
}


def main() -> None:
    """Opens what the named measure needs, says where Skyward comes from, and measures until standard input ends."""
    measure = MEASURES[sys.argv[1]]
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # not inherited: what is printed here cannot end up among them
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with measure.open() as pool:
        answers.write(json.dumps(_origins(pool)) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(measure.slice(pool, float(line))) + "\n")


def _origins(pool: Any) -> list[str]:
    """The files from which this process and the nodes import Skyward."""
    import skyward as sky

    return [_origin(), *([] if pool is None else sky.compute(_origin)() @ pool)]


def _origin() -> str:
    return str(importlib.import_module("skyward").__file__)


def _lasting(seconds: float, act: Callable[[], object]) -> list[float]:
    """The seconds that each run took; runs until the time is over, at least once."""
    until = time.perf_counter() + seconds
    times = [timed(act)]
    while time.perf_counter() < until:
        times.append(timed(act))
    return times


if __name__ == "__main__":
    main()
