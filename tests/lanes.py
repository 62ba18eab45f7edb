"""Runs the test suite in parts, several side by side: tests on hosts mostly wait, the others mostly compute.

    python tests/lanes.py [arguments for pytest]

A part is a run of pytest of its own; a lane takes the next part when it is done with one. Lines of all are printed as
they come, each with the name of its part and the seconds since the beginning. What failed is listed at the very end. A
few failed tests are run once more, alone: one that passes then is called unstable. It fails the run all the same, since
the test or the product is not ready for a busy machine, which is a defect to be found.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["PARTS", "arguments_of", "main"]

ROOT = Path(__file__).parents[1]
PARTS = {
    "ssh": ["tests/ssh"],
    "nodes": ["tests/e2e/frameworks"],
    # torch is installed once, for hosts and for machines
    "hosts": [f"tests/{folder}/frameworks" for folder in ("ssh", "slurm", "ray", "dask", "cloud")],
    "cloud": ["tests/cloud"],
    "slurm": ["tests/slurm"],
    "kubernetes": ["tests/kubernetes"],
    "e2e": ["tests/e2e", "tests/cli"],
    "setup": ["tests/setup", "tests/support", "tests/testing"],
    "ray": ["tests/ray", "tests/dask"],
    "aws": ["tests/providers"],
    "rest": ["tests"],
}
"""Folders, each without those of other parts, in the order in which they are begun: the longest first."""
_LANES = 4
"""So many parts run at once: each waits for more than half of its time."""
_LEAVE = 60.0
"""Seconds that a part has to tidy up when it is interrupted."""
_ALONE = 5
"""So many failed tests are run once more, to tell a defect from one that shows on a busy machine only."""
_FAILED = re.compile(r"(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$")
"""A line of pytest's summary."""


def arguments_of(part: str) -> list[str]:
    """What pytest is told so that it runs the tests of a part: its folders, without those of other parts."""
    others = [path for name, paths in PARTS.items() if name != part for path in paths]
    inside = [path for path in others if any(path.startswith(f"{own}/") for own in PARTS[part])]
    return [*PARTS[part], *(f"--ignore={path}" for path in inside)]


class _Run:
    """The parts that run and have run."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.summaries: list[str] = []
        self.statuses: dict[str, int] = {}
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[str]] = []
        self._ended = False

    def part(self, name: str, arguments: list[str]) -> int:
        """Runs pytest to its end, and prints what it says; its status."""
        with self._lock:
            if self._ended:
                return 1
            process = _start(arguments)
            self._running.append(process)
        printer = threading.Thread(target=self._print, args=(name, process), daemon=True)
        printer.start()
        try:
            status = self.statuses[name] = process.wait()
            printer.join(10)
        finally:
            with self._lock:
                self._running.remove(process)
        return status

    def end(self) -> None:
        """Interrupts what runs, which lets it tidy up, and then ends it."""
        with self._lock:
            self._ended = True
            running = [*self._running]
        for process in running:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _LEAVE
        while time.monotonic() < deadline and any(process.poll() is None for process in running):
            time.sleep(0.1)
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def _print(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{name:5} {time.monotonic() - self.began:4.0f} s | {line}", end="", flush=True)
            if name != _AGAIN and _FAILED.match(line.rstrip()):
                self.summaries.append(line.rstrip())


_AGAIN = "alone"


def main(arguments: list[str]) -> int:
    """Runs all parts to their ends; 0 if all passed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run = _Run()
    lanes = ThreadPoolExecutor(_LANES)
    try:
        parts = [lanes.submit(run.part, name, [*arguments, *arguments_of(name)]) for name in PARTS]
        for part in parts:
            part.result()
        bad = {name: status for name, status in run.statuses.items() if status}
        if not bad:
            print(f"all parts passed in {time.monotonic() - run.began:.0f} s", flush=True)
            return 0
        failed = sorted({match[1] for line in run.summaries if (match := _FAILED.match(line))})
        unstable = {test for test in failed if len(failed) <= _ALONE and not run.part(_AGAIN, [test])}
    finally:
        run.end()
        lanes.shutdown(cancel_futures=True)
    print("\n".join(["", "What failed beside other parts:", *run.summaries]))
    print(", ".join(f"{name} ended with {status}" for name, status in bad.items()))
    for test in failed:
        print(f"{'UNSTABLE (passed alone)' if test in unstable else 'FAILED'}: {test}", flush=True)
    return 1


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
