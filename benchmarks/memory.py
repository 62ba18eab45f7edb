"""What an idle node costs in memory, and whether cost and memory stay the same over many calls.

Memory is the proportional set size (PSS) of /proc/PID/smaps_rollup: a page that several processes share counts once,
in equal parts. Skyward's figure for a node is everything but the client (keeper, agents, fork server, runners) divided
by the number of nodes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from contest import Medians, Row
from peers import dask_client

__all__ = ["CONTENDERS", "rows"]

NODES = 4
IDLE = 2.0  # seconds until whatever a start leaves behind has been let go
BATCH = 1_000


def rows(seen: Medians) -> list[Row]:
    """The lines of this group."""
    idle = seen("skyward", "idle")
    few, many = (seen("skyward-many", what) for what in ("few", "many"))
    rows = [
        Row(
            "memory of an idle node",
            idle,
            "dask worker + nanny + scheduler / 4",
            seen("dask", "programs"),
            "MB",
            at_most=1.0,
        ),
        Row("memory of an idle node", idle, "LocalCluster worker, nanny left out", seen("dask", "local"), "MB"),
        Row("cost per call, last of 100,000 (gathers of 1,000)", many, "first 1,000s", few, "us", at_most=1.1),
        Row(
            "cost per call, one gather of 100,000",
            seen("skyward-gather", "large"),
            "one of 1,000",
            seen("skyward-gather", "small"),
            "us",
            at_most=1.1,
        ),
    ]
    for who in ("client", "node"):
        first, middle, last = (seen("skyward-many", f"{who} {when}") for when in ("first", "middle", "last"))
        # The first of these sees the allocator's pools fill up, too; the second one sees nothing but a leak.
        rows.append(Row(f"memory of {who} after 100,000 calls", last, "after 1,000", first, "MB", at_most=1.05))
        rows.append(Row(f"memory of {who} after 100,000 calls", last, "after 20,000", middle, "MB", at_most=1.05))
    return rows


def nothing() -> None:
    """The body of every call here."""


def with_skyward(quick: bool) -> dict[str, float]:
    """An idle node's memory."""
    import skyward as sky

    with sky.ComputePool(nodes=NODES, console=False):
        time.sleep(IDLE)
        return {"idle": _pss(_descendants(os.getpid())) / NODES}


def with_skyward_many(quick: bool) -> dict[str, float]:
    """Cost per call in the first gathers after the warm-up and in the last ones, and memory on the way."""
    import skyward as sky

    batches = 10 if quick else 100
    call = sky.compute(nothing)
    with sky.ComputePool(nodes=NODES, console=False) as pool:
        microseconds: list[float] = []
        memory: dict[str, float] = {}
        moments = {0: "first", batches // 5: "middle", batches: "last"}
        for number in range(batches + 1):
            began = time.perf_counter()
            sky.gather(*[call() for _ in range(BATCH)]) >> pool
            microseconds.append((time.perf_counter() - began) / BATCH * 1e6)
            if number in moments:
                client, node = _pss([os.getpid()]), _pss(_descendants(os.getpid())) / NODES
                memory |= {f"client {moments[number]}": client, f"node {moments[number]}": node}
    few, many = (sorted(part)[2] for part in (microseconds[1:6], microseconds[-5:]))
    return {"few": few, "many": many, **memory}


def with_skyward_gather(quick: bool) -> dict[str, float]:
    """Cost per call in a small group and in a large one."""
    import skyward as sky

    call = sky.compute(nothing)
    seen: dict[str, float] = {}
    with sky.ComputePool(nodes=NODES, console=False) as pool:
        sky.gather(*[call() for _ in range(BATCH)]) >> pool
        for name, count in (("small", BATCH), ("large", 5 * BATCH if quick else 100 * BATCH)):
            began = time.perf_counter()
            sky.gather(*[call() for _ in range(count)]) >> pool
            seen[name] = (time.perf_counter() - began) / count * 1e6
    return seen


def with_dask(quick: bool) -> dict[str, float]:
    """A worker's memory: with scheduler and nannies as programs of their own, and with both inside the client."""
    with dask_client(NODES):
        time.sleep(IDLE)
        local = _pss(_descendants(os.getpid())) / NODES
    return {"local": local, "programs": _dask_programs()}


CONTENDERS = {
    "skyward": with_skyward,
    "dask": with_dask,
    "skyward-many": with_skyward_many,
    "skyward-gather": with_skyward_gather,
}


def _dask_programs() -> float:
    from distributed import Client

    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        meeting = Path(directory) / "scheduler.json"
        common = ["--scheduler-file", str(meeting), "--no-dashboard"]
        worker = ["worker", "--nthreads", "1", "--local-directory", directory]
        programs = [["scheduler", "--host", "127.0.0.1", "--port", "0"], *[worker] * NODES]
        for program in programs:
            child = subprocess.Popen([sys.executable, "-m", "dask", *program, *common])
            stack.enter_context(child)
            stack.callback(child.terminate)
        while not meeting.exists():
            time.sleep(0.05)
        with Client(scheduler_file=str(meeting)) as client:
            client.wait_for_workers(NODES)
            time.sleep(IDLE)
            return _pss(_descendants(os.getpid())) / NODES


def _descendants(pid: int) -> list[int]:
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [found for child in children for found in (child, *_descendants(child))]


def _pss(pids: Iterable[int]) -> float:
    """Megabytes of all these processes together."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # it has ended since
        found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        total += int(found[1]) if found else 0
    return total / 1000
