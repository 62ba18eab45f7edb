"""Runs the test suite in lanes side by side: tests on hosts mostly wait, the others mostly compute.

    python tests/lanes.py [arguments for pytest]

Lines of all are printed as they come, each with the name of its lane. Fails if one of them fails.
"""

from __future__ import annotations

import os
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
    "ssh": ["tests/ssh", "tests/cloud/frameworks", "tests/simulation"],
    "cloud": [
        *("tests/cloud", "tests/setup", "tests/support", "tests/providers", "tests/testing"),
        "--ignore=tests/cloud/frameworks",
    ],
}
"""Tests on hosts and of clouds; all the others are a lane of their own. They take about equally long."""
_LEAVE = 60.0
"""Seconds that a lane has to tidy up when it is interrupted."""


def main(arguments: list[str]) -> int:
    """Runs all lanes to their ends; 0 if all passed."""
    elsewhere = [path for paths in LANES.values() for path in paths if not path.startswith("--")]
    lanes = {**LANES, "here": ["tests", *(f"--ignore={path}" for path in elsewhere)]}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, paths in lanes.items():
            started[name] = _start([*arguments, *paths])
        printers = [threading.Thread(target=_print, args=item, daemon=True) for item in started.items()]
        for printer in printers:
            printer.start()
        statuses = {name: process.wait() for name, process in started.items()}
        for printer in printers:
            printer.join(10)
    finally:
        _end([process for process in started.values() if process.poll() is None])
    failed = [f"{name} ended with {status}" for name, status in statuses.items() if status]
    print(", ".join(failed) or "all lanes passed", flush=True)
    return 1 if failed else 0


def _start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _print(name: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    began = time.monotonic()
    for line in process.stdout:
        print(f"{name:5} {time.monotonic() - began:4.0f} s | {line}", end="", flush=True)


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
