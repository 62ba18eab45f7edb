"""A plugin of your own: it adds a package, times every call on the nodes, and sums up when the pool closes."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import skyward as sky

PROVIDERS = {"local": sky.Local}


def timed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Around every function, on the nodes."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return fn(*args, **kwargs)
        finally:
            print(f"{fn.__name__} took {time.perf_counter() - began:.3f} s")

    return call


@contextmanager
def greeting(info: sky.InstanceInfo) -> Iterator[None]:
    """Around the life of each process that runs calls, on the nodes."""
    print(f"node {info.node} of {info.total_nodes} is ready")
    yield


@contextmanager
def stopwatch(pool: sky.ComputePool, cluster: sky.Cluster) -> Iterator[None]:
    """Around the open pool, on this computer."""
    began = time.perf_counter()
    yield
    print(f"pool of {cluster.nodes} nodes was open for {time.perf_counter() - began:.1f} s")


timing = (
    sky.Plugin.create("timing")
    .with_image_transform(lambda image, cluster: image.adding(env={"TIMING_NODES": str(cluster.nodes)}))
    .with_decorator(timed)
    .with_around_app(greeting)
    .with_around_client(stopwatch)
)


@sky.compute
def count_to(number: int) -> int:
    """Something to time."""
    return sum(1 for _ in range(number))


def main() -> None:
    """Open a pool with the plugin and run one call on every node."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--provider", choices=PROVIDERS, default="local")
    options.add_argument("--nodes", type=int, default=2)
    args = options.parse_args()

    with sky.ComputePool(provider=PROVIDERS[args.provider](), nodes=args.nodes, plugins=[timing]) as pool:
        print(count_to(1_000_000) @ pool)


if __name__ == "__main__":
    main()
