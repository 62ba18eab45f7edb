"""Runs the test suite in lanes side by side: tests on hosts mostly wait, the others mostly compute.

    python tests/lanes.py [arguments for pytest]

Lines of all are printed as they come, each with the name of its lane. What failed is run once more afterwards, alone,
and told at the very end, where it is seen. A test that passes then is listed as unstable: it, or the product, is not
ready for a busy machine, and that is a defect to be found. Up to three of them do not fail the run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

__all__ = ["LANES", "main"]

ROOT = Path(__file__).parents[1]
LANES = {
    # torch is installed once, for hosts and for machines
    "ssh": [
        *("tests/ssh", "tests/ray", "tests/slurm", "tests/dask/frameworks", "tests/cloud/frameworks"),
        *("tests/seeds", "tests/simulation"),
        *("tests/client", "tests/machines", "tests/node", "tests/plugins", "tests/stress", "tests/transport"),
    ],
    "cloud": [
        *("tests/cloud", "tests/setup", "tests/support", "tests/providers", "tests/testing"),
        "--ignore=tests/cloud/frameworks",
    ],
}
"""Tests on hosts and of clouds; all the others are a lane of their own. They take about equally long."""
_LEAVE = 60.0
"""Seconds that a lane has to tidy up when it is interrupted."""
_UNSTABLE = 3
"""So many tests may fail beside other lanes and pass alone; more say that something is wrong."""
_FAILED = re.compile(r"(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$")
"""A line of pytest's summary."""


def main(arguments: list[str]) -> int:
    """Runs all lanes to their ends; 0 if all passed."""
    elsewhere = [path for paths in LANES.values() for path in paths if not path.startswith("--")]
    lanes = {**LANES, "here": ["tests", *(f"--ignore={path}" for path in elsewhere)]}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, paths in lanes.items():
            started[name] = _start([*arguments, *paths])
        summaries: list[str] = []
        printers = [threading.Thread(target=_print, args=(*i, summaries), daemon=True) for i in started.items()]
        for printer in printers:
            printer.start()
        statuses = {name: process.wait() for name, process in started.items()}
        for printer in printers:
            printer.join(10)
    finally:
        _end([process for process in started.values() if process.poll() is None])
    bad = {name: status for name, status in statuses.items() if status}
    if not bad:
        print("all lanes passed", flush=True)
        return 0
    failed = sorted({match[1] for line in summaries if (match := _FAILED.match(line))})
    # 1: tests failed; anything else, such as an error in collecting, is not mended by another try
    again = _alone(failed) if len(failed) <= _UNSTABLE and set(bad.values()) == {1} else failed
    print("\n".join(["", "What failed beside other lanes:", *summaries]))
    print(", ".join(f"{name} ended with {status}" for name, status in bad.items()))
    for test in failed:
        print(f"{'FAILED' if test in again else 'UNSTABLE: passed alone'}: {test}", flush=True)
    return 1 if again or not failed else 0


def _alone(tests: list[str]) -> list[str]:
    """Runs each of these by itself; those that fail again."""
    print(f"run again, one by one: {len(tests)}", flush=True)
    return [test for test in tests if _run_one(test)]


def _run_one(test: str) -> int:
    process = _start([test])
    try:
        _print("alone", process, [])
        return process.wait()
    finally:
        _end([process] if process.poll() is None else [])


def _start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "240"},  # pytest shortens its summary to the width
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _print(name: str, process: subprocess.Popen[str], summaries: list[str]) -> None:
    assert process.stdout is not None
    began = time.monotonic()
    for line in process.stdout:
        print(f"{name:5} {time.monotonic() - began:4.0f} s | {line}", end="", flush=True)
        if _FAILED.match(line.rstrip()):
            summaries.append(line.rstrip())


def _end(processes: list[subprocess.Popen[str]]) -> None:
    """Interrupts lanes, which lets them tidy up, and then ends them."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _LEAVE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
