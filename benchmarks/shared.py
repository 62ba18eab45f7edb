"""Shared collections: operations a second of four nodes together, beside dask's Queue and Lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from contest import Medians, Row

__all__ = ["CONTENDERS", "NODES", "rows"]

NODES = 4


def rows(seen: Medians) -> list[Row]:
    """The lines of this group."""
    counter, queue, lock = (seen("skyward", what) for what in ("counter", "queue", "lock"))
    return [
        Row("shared counter, add/s, 4 nodes", counter, "aim", 5_000.0, "/s", at_least=1.0),
        Row("shared queue, put and get/s, 4 nodes", queue, "dask Queue", seen("dask", "queue"), "/s", at_least=10.0),
        Row("shared lock, operations/s, 4 nodes", lock, "dask Lock", seen("dask", "lock"), "/s", at_least=10.0),
    ]


def with_skyward(quick: bool) -> dict[str, float]:
    """Operations of one body on each node, all at once."""
    import skyward as sky

    @sky.compute
    def work(kind: str, count: int) -> float:
        counter, queue, lock = sky.counter("counter"), sky.queue("queue"), sky.lock("lock")
        sky.barrier(f"{kind}.{count}").wait()
        began = time.perf_counter()
        for _ in range(count):
            if kind == "counter":
                counter.add()
                counter.add()
            elif kind == "queue":
                queue.put(1)
                queue.get()
            else:
                lock.acquire()
                lock.release()
        return time.perf_counter() - began

    count = 100 if quick else 3_000
    with sky.ComputePool(nodes=NODES, console=False) as pool:
        for kind in ("counter", "queue", "lock"):
            _ = work(kind, 20) @ pool
        return {kind: 2 * count * NODES / max(work(kind, count) @ pool) for kind in ("counter", "queue", "lock")}


def with_dask(quick: bool) -> dict[str, float]:
    """The same of dask, on workers that are processes with one thread."""
    from distributed import Client, LocalCluster

    count = 20 if quick else 300
    with (
        LocalCluster(n_workers=NODES, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        workers = list(client.scheduler_info()["workers"])

        def everywhere(work: Callable[[str, int], float], kind: str, times: int) -> list[float]:
            return client.gather([client.submit(work, kind, times, workers=[w], pure=False) for w in workers])

        for kind in ("queue", "lock"):
            everywhere(_dask_work, kind, 5)
        return {kind: 2 * count * NODES / max(everywhere(_dask_work, kind, count)) for kind in ("queue", "lock")}


def _dask_work(kind: str, count: int) -> float:
    from distributed import Lock, Queue

    queue: Any = Queue("queue")
    lock: Any = Lock("lock")
    began = time.perf_counter()
    for _ in range(count):
        if kind == "queue":
            queue.put(1)
            queue.get()
        else:
            lock.acquire()
            lock.release()
    return time.perf_counter() - began


CONTENDERS = {"skyward": with_skyward, "dask": with_dask}
