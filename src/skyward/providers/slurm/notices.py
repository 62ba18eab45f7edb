"""Waits on a node until its job's time is nearly over, or Slurm has sent SIGTERM."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping

__all__ = ["WARNING", "wait"]

WARNING = 120.0
"""Seconds; in a short job, a quarter of its time."""
_POLL = 0.5


def wait(
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
    ask: Callable[[str], str] | None = None,
) -> float:
    path, job = environ.get("SKYWARD_NOTICE", ""), environ.get("SLURM_JOB_ID", "")
    end = _moment(environ.get("SKYWARD_JOB_END", ""))
    warning = min(WARNING, (end - clock()) / 4)
    while True:
        try:
            with open(path) as file:
                return max(0.0, float(file.read()) - clock())
        except (OSError, ValueError):
            pass  # not yet
        if clock() >= end - warning:
            told = _moment((ask or _end_of)(job))  # the limit may have been raised meanwhile
            if math.isinf(told) or told - clock() <= warning:
                return max(0.0, end - clock())
            end = told
        pause(_POLL)


def _moment(text: str) -> float:
    return float(text) if text.strip().isdigit() else math.inf


def _end_of(job: str) -> str:
    try:
        env = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
        argv = ["squeue", "-h", "-j", job, "-o", "%e"]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
