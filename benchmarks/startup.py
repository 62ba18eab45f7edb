"""From the start of a process to a pool of four open nodes, and to a LocalCluster of four workers.

python startup.py skyward       the program whose time is taken: says "open" as soon as it can take calls
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

from contest import Medians, Row

__all__ = ["CONTENDERS", "rows"]

NODES = 4


def rows(seen: Medians) -> list[Row]:
    """The lines of this group."""
    return [
        Row(
            "pool open, 4 nodes, from process start",
            seen("skyward", "open"),
            "dask LocalCluster",
            seen("dask", "open"),
            "s",
            at_most=0.5,
        ),
        *(
            Row("pool open, 4 nodes, from process start", seen("skyward", "open"), peer, seen(peer, "open"), "s")
            for peer in ("loky", "monarch")
        ),
        Row(
            "pool closed again and process ended",
            seen("skyward", "close"),
            "dask LocalCluster",
            seen("dask", "close"),
            "s",
        ),
    ]


def _started(program: str, quick: bool) -> dict[str, float]:
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, __file__, program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        if "open\n" not in child.stdout:  # reads up to it; a peer may say something first
            raise RuntimeError(f"the {program} program ended before it was open")
        opened = time.perf_counter()
        child.stdout.read()
    return {"open": opened - began, "close": time.perf_counter() - opened}


CONTENDERS = {name: partial(_started, name) for name in ("skyward", "dask", "loky", "monarch")}


def _open_skyward() -> None:
    import skyward as sky

    with sky.ComputePool(nodes=NODES, console=False):
        print("open", flush=True)


def _open_dask() -> None:
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=NODES, threads_per_worker=1, dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            client.wait_for_workers(NODES)
            print("open", flush=True)


def _open_loky() -> None:
    from loky import get_reusable_executor

    executor = get_reusable_executor(max_workers=NODES)
    list(executor.map(abs, range(NODES * 20), chunksize=1))
    print("open", flush=True)
    executor.shutdown()


def _open_monarch() -> None:
    from monarch_actors import monarch_actors

    with monarch_actors(NODES):
        print("open", flush=True)


if __name__ == "__main__":
    {"skyward": _open_skyward, "dask": _open_dask, "loky": _open_loky, "monarch": _open_monarch}[sys.argv[1]]()
