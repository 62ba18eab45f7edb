"""The same DistributedDataParallel training under skyward and under torchrun: speed, and time to the first step.

torch may live in another environment than the peers of the other groups: SKYWARD_BENCH_TORCH names the interpreter
that has it; otherwise it is this one, or that of `.venv` beside this directory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from contest import Medians, Row

__all__ = ["CONTENDERS", "rows"]

PROCESSES = 2
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
            at_most=1.2,
        ),
    ]


def _trained(launch: list[str], quick: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        into = Path(directory) / "seen.json"
        began = time.time()  # compared with another process's clock
        subprocess.run([_python(), *launch, str(into), str(100 if quick else 1_500)], check=True)
        seen: dict[str, float] = json.loads(into.read_text())
    return {"first": seen["first"] - began, "rate": seen["rate"], "threads": seen["threads"]}


CONTENDERS = {
    "skyward": partial(_trained, [LOOP]),
    "torchrun": partial(
        _trained, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES), LOOP]
    ),
}


def _python() -> str:
    if named := os.environ.get("SKYWARD_BENCH_TORCH"):
        return named
    if importlib.util.find_spec("torch"):
        return sys.executable
    return str(Path(__file__).parents[1] / ".venv/bin/python")
