"""The same DistributedDataParallel training under skyward and under torchrun: speed, and time to the first step.

torch may live in another environment than the peers of the other groups: SKYWARD_BENCH_TORCH names the interpreter
that has it; otherwise it is this one, or that of `.venv` beside this directory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from contest import Medians, Row

__all__ = ["CONTENDERS", "rows"]

PROCESSES = 2
NODES, RANKS = 2, 2
LOOP = str(Path(__file__).with_name("ddp_loop.py"))


def rows(seen: Medians) -> list[Row]:
    """The lines of this group."""
    return [
        Row(
            f"DDP training, 2 nodes, steps/s ({seen('skyward', 'threads'):.0f} threads each)",
            seen("skyward", "rate"),
            f"torchrun ({seen('torchrun', 'threads'):.0f} threads each)",
            seen("torchrun", "rate"),
            "/s",
            at_least=0.98,
        ),
        Row(
            "from process start to the first step, 2 nodes",
            seen("skyward", "first"),
            "torchrun",
            seen("torchrun", "first"),
            "s",
            at_most=1.0,
        ),
        Row(
            f"DDP training, {NODES} nodes with {RANKS} ranks each, steps/s",
            seen("skyward, ranks", "rate"),
            f"torchrun, {NODES} agents with {RANKS} processes each",
            seen("torchrun, ranks", "rate"),
            "/s",
            at_least=0.98,
        ),
        Row(
            f"from process start to the first step, {NODES} nodes with {RANKS} ranks each",
            seen("skyward, ranks", "first"),
            "torchrun",
            seen("torchrun, ranks", "first"),
            "s",
        ),
    ]


def _trained(launches: Callable[[], list[list[str]]], steps: int, quick: bool) -> dict[str, float]:
    """Starts one program, or one for each node of torchrun, and reads what rank 0 saw."""
    with tempfile.TemporaryDirectory() as directory:
        into = Path(directory) / "seen.json"
        commands = [[_python(), *launch, str(into), str(100 if quick else steps)] for launch in launches()]
        env = {"OMP_NUM_THREADS": "1", **os.environ} if len(commands) > 1 else None  # as our ranks on few cores
        began = time.time()  # compared with another process's clock
        started = [subprocess.Popen(command, env=env) for command in commands]
        if any(process.wait() for process in started):
            raise RuntimeError("a training failed")
        seen: dict[str, float] = json.loads(into.read_text())
    return {"first": seen["first"] - began, "rate": seen["rate"], "threads": seen["threads"]}


def _agents() -> list[list[str]]:
    """The command lines of torchrun on all nodes, which are all on this computer."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    place = ["--nnodes", str(NODES), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    launch = ["-m", "torch.distributed.run", *place, "--nproc-per-node", str(RANKS)]
    return [[*launch, "--node-rank", str(node), LOOP] for node in range(NODES)]


_ALONE = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES), LOOP]
CONTENDERS = {
    "skyward": partial(_trained, lambda: [[LOOP]], 1_500),
    "torchrun": partial(_trained, lambda: [_ALONE], 1_500),
    "skyward, ranks": partial(_trained, lambda: [[LOOP, "--ranks", str(RANKS)]], 600),
    "torchrun, ranks": partial(_trained, _agents, 600),
}


def _python() -> str:
    if named := os.environ.get("SKYWARD_BENCH_TORCH"):
        return named
    if importlib.util.find_spec("torch"):
        return sys.executable
    return str(Path(__file__).parents[1] / ".venv/bin/python")
