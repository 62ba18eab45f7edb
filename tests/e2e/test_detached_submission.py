"""Whoever submits a detached run is killed at some moment: there is a whole run afterwards, or none."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import InvalidArgument
from skyward.transport.blobs import Store
from skyward.transport.private import is_locked
from tests.support.detached_runs import elsewhere, text_of  # noqa: F401 - a fixture
from tests.support.leftovers import leftover_processes
from tests.support.waiting import until

CALLS = 200
MOMENTS = 50 * int(os.environ.get("SKYWARD_SOAK", "0")) or 5

PROGRAM = """
import os, sys
import skyward as sky
import skyward.pool.detached, skyward.setup.hosts
for each in (skyward.pool.detached, skyward.setup.hosts):
    each.LOCAL_LEASE = 5.0
skyward.pool.detached._GO_WITHIN = 3.0

@sky.compute
def square(x):
    with open("ended", "a") as file:
        file.write(f"{x}\\n")
    return x * x

def main(count):
    values = [square(x) for x in range(count)]
    results = sky.gather(*values) >> sky
    for result in results:
        print(result, flush=True)
    return sum(results)

if __name__ == "__main__":
    print("begin", flush=True)
    run = sky.detach(main, int(sys.argv[1]), pool=sky.ComputePool(nodes=2, console=False), name="grid")
    print(run.result(), flush=True)
"""


def submitted_until(moment: float) -> None:
    """Submits the run and is killed then, in seconds after the submission began."""
    Path("grid.py").write_text(PROGRAM)
    command = [sys.executable, "grid.py", str(CALLS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begin\n"
        try:
            process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.read()


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_a_submission_that_is_killed_at_any_moment_loses_and_repeats_no_call(seed: int) -> None:
    begin = time.time()
    submitted_until(4.0 * random.Random(seed).random() ** 2)  # most of them while it is submitted
    took = time.time() - begin
    try:
        run = sky.attach("grid")
    except InvalidArgument:
        stage = "none"
    else:
        until(lambda: run.status.over, 180)
        stage = run.status.stage
    ended = sorted(map(int, Path("ended").read_text().split())) if Path("ended").exists() else []
    if stage == "finished":
        assert run.result() == sum(x * x for x in range(CALLS))
        assert [line for line in text_of(run).splitlines() if line.isdigit()] == [str(x * x) for x in range(CALLS)]
        assert ended == list(range(CALLS))
        assert run.fetch().writing == []
    else:
        assert stage in ("none", "lost", "expired")
        assert ended == []
    until(lambda: not leftover_processes(), 180)
    Store().close()  # the next pool removes what a killed one could not
    until(lambda: not unused_directories(begin), 60)
    print(f"killed after {took:.2f} s: {stage}")


def unused_directories(since: float) -> list[Path]:
    """Directories of pools that no process has, also of other programs'."""
    found: list[Path] = []
    for base in ("/dev/shm", tempfile.gettempdir()):
        for path in Path(base).glob("skyward-[0-9]*-*"):
            with suppress(FileNotFoundError):  # it is removed at this moment
                if (path / "lock").stat().st_ctime > since and not is_locked(path / "lock"):
                    found.append(path)
    return found
