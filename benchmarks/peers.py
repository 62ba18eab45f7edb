"""How the peers are opened, each in the way its own documentation shows for one computer."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

__all__ = ["dask_client", "ray_actors"]


@contextmanager
def ray_actors(count: int, *bodies: Callable[..., Any]) -> Generator[tuple[Any, list[Any]]]:
    """Ray and `count` actors, one process each, whose methods are `bodies`; all of them have answered once."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as directory, ExitStack() as stack:
        ray.init(num_cpus=count, _temp_dir=directory, **quiet)
        stack.callback(ray.shutdown)
        methods = {body.__name__: staticmethod(body) for body in bodies}
        node = ray.remote(num_cpus=1)(type("Node", (), {**methods, "ready": staticmethod(_ready)}))
        actors = [node.remote() for _ in range(count)]
        ray.get([actor.ready.remote() for actor in actors])
        yield ray, actors


@contextmanager
def dask_client(workers: int) -> Generator[tuple[Any, list[str]]]:
    """A client of a LocalCluster of processes, and the addresses of its workers."""
    from distributed import Client, LocalCluster

    # Large arguments in a task graph are what is measured; dask's advice against them would only fill the log.
    warnings.filterwarnings("ignore", message="Sending large graph")
    with LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            client.wait_for_workers(workers)
            yield client, list(client.scheduler_info(n_workers=-1)["workers"])


def _ready() -> None:
    pass
