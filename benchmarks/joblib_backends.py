"""joblib and scikit-learn on a pool against joblib's own process pool and its dask backend, in one run.

`python benchmarks/joblib_backends.py [tiny] [naps] [grid]`: every figure is a ratio of medians; peers take turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from joblib import Parallel, delayed, parallel_config
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import GridSearchCV

import skyward as sky

__all__: list[str] = []

ROUNDS = 7


def square(x: int) -> int:
    return x * x


def nap(x: int) -> int:
    time.sleep(0.05)
    return x


class Mean(ClassifierMixin, BaseEstimator):
    """Reads all of X once: the cost of a fit is that of getting at the data."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def fit(self, X: Any, y: Any) -> Mean:
        self.classes_ = np.unique(y)
        self.mean_ = float(X[:: 1 + self.number % 3].mean())
        return self

    def predict(self, X: Any) -> Any:
        return np.zeros(len(X))


@contextmanager
def dask_cluster(processes: int) -> Iterator[None]:
    """joblib's dask backend over as many single-threaded worker processes."""
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=processes, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
        yield


def timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def taking_turns(acts: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """The median time of each, after one run of each that does not count."""
    for act in acts.values():
        act()
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            times[name].append(timed(act))
    return {name: statistics.median(taken) for name, taken in times.items()}


def on(backend: str, act: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with parallel_config(backend, n_jobs=4):
            return act()

    return run


def tiny() -> None:
    """2,000 tiny tasks on four slots."""

    def tasks() -> Any:
        return Parallel()(delayed(square)(i) for i in range(2000))

    with sky.integrations.JoblibPool(nodes=2, concurrency=2, console=False), dask_cluster(4):
        taken = taking_turns({name: on(name, tasks) for name in ("skyward", "loky", "dask")})
    report("2,000 tiny tasks on 4 slots", taken)
    print(
        f"  {taken['loky'] / taken['skyward']:.2f} x loky (aim 1.0), {taken['dask'] / taken['skyward']:.1f} x dask (4)"
    )


def naps() -> None:
    """400 tasks of 50 ms on forty slots."""
    with sky.integrations.JoblibPool(nodes=4, concurrency=10, console=False):
        taken = taking_turns({"skyward": lambda: Parallel(n_jobs=-1)(delayed(nap)(i) for i in range(400))})
    report("400 tasks of 50 ms on 40 slots", taken)
    print(f"  {0.5 / taken['skyward']:.1%} of ideal (aim 95 %)")


def grid() -> None:
    """GridSearchCV with an X of 200 MB: 24 fits, X sent once."""
    table = np.random.default_rng(0).normal(size=(250_000, 100))
    labels = np.arange(len(table)) % 2

    def search() -> Any:
        return GridSearchCV(Mean(), {"number": list(range(12))}, cv=2, refit=False).fit(table, labels)

    with sky.integrations.ScikitLearnPool(nodes=2, concurrency=2, console=False) as pool:
        taken = taking_turns({"skyward": on("skyward", search)}, 3)
        sent = sum(size for _, size in pool._store._blobs.values())
    with dask_cluster(4):
        taken |= taking_turns({"dask": on("dask", search)}, 3)
    report(f"GridSearchCV, 24 fits, X of {table.nbytes / 1e6:.0f} MB", taken)
    print(f"  {sent / 1e6:.0f} MB sent in 4 searches = {sent / table.nbytes:.2f} x the size of X (aim: once)")
    print(f"  {taken['dask'] / taken['skyward']:.1f} x dask (aim: above 1)")


def report(title: str, taken: dict[str, float]) -> None:
    print(f"{title}: " + ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in taken.items()))


if __name__ == "__main__":
    for name in sys.argv[1:] or ["tiny", "naps", "grid"]:
        {"tiny": tiny, "naps": naps, "grid": grid}[name]()
