"""Submissions of detached runs that are killed at moments by seed, and what must be true of each."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from skyward.history import runs
from skyward.pool.run import Run
from tests.support.waiting import until

__all__ = ["SEEDS", "check", "killed"]

SEEDS = int(os.environ.get("SKYWARD_SWEEP_SEEDS", "0"))
"""How many moments each place is tried with; the default of a place if 0."""
CALLS = 200

PROGRAM = """
import os
import sys
import skyward as sky
import skyward.pool.detached
from skyward.api.shell import SshTarget
from skyward.providers.aws.api import Pace

skyward.pool.detached._GO_WITHIN = 5.0

@sky.compute
def double(n, path):
    with open(path, "a") as file:
        print(n, file=file)
    print("call", n, flush=True)
    return 2 * n

def work(count, path):
    for n in range(10):
        print("line", n, flush=True)
    found = list(sky.gather(*[double(n, path) for n in range(count)]) >> sky)
    print("all done", flush=True)
    return found

if __name__ == "__main__":
    print("begun", flush=True)
    pool = sky.ComputePool(provider={provider}, nodes=2, grace=2, console=False)
    sky.detach(work, {calls}, {path!r}, pool=pool, name="swept")
    print("submitted", flush=True)
    input()
"""


def killed(seed: int, provider: str, path: str, usual: float) -> bool:
    """Submits 200 calls, which write to `path` on their nodes, and kills the submitting process; whether it was done.

    `usual`: how many seconds a submission takes.
    """
    chance = random.Random(seed)
    text = PROGRAM.replace("{provider}", provider).replace("{calls}", str(CALLS)).replace("{path!r}", repr(path))
    Path("submit.py").write_text(text)
    argv = [sys.executable, "submit.py"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        time.sleep(chance.uniform(0, usual) if chance.random() < 0.8 else chance.uniform(usual, 3 * usual))
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
    assert b"Traceback" not in err, err.decode()
    return out == b"submitted\n"


def check(submitted: bool, ran: Callable[[], str]) -> str:
    """Each call has ended once and output and result are whole, or nothing was begun; how the run ended."""
    if not runs.runs():
        assert not submitted
        return "none"
    run = Run("swept")
    until(lambda: run.status.over, 240)
    stage = run.wait(60).stage
    said = b"".join(run.output()).decode() if stage != "lost" else ""
    assert stage == "finished" or not submitted, said
    if stage == "finished":
        assert sorted(map(int, ran().split())) == list(range(CALLS)), "each call has run once"
        assert run.result() == [2 * n for n in range(CALLS)]
        lines = said.splitlines()
        assert [line for line in lines if line.startswith("line")] == [f"line {n}" for n in range(10)]
        assert lines[-1] == "all done"
    else:
        assert stage in ("expired", "lost"), said
        assert ran() == ""
    print(f"{'submitted' if submitted else 'cut'}: {stage}")
    return stage
