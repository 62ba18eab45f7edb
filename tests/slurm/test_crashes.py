"""Whatever becomes of the client, no job and no process is left: watchdog, joiners and lease, on a real Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.leftovers import watchdogs
from tests.support.programs import USUAL_SIGNALS
from tests.support.slurm import Cluster
from tests.support.waiting import read_until, until

PROGRAM = """
import sys, time
import skyward as sky

@sky.compute
def nap():
    print("napping", flush=True)
    time.sleep(600)

pool = sky.ComputePool(provider=sky.Slurm(options={options}), nodes=2, console=False)
pool.on_event(lambda event: print(type(event).__name__, getattr(event, "phase", ""), flush=True))
with pool:
    nap() @ pool
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Start]:
    """Starts a client; it is killed at the end."""
    made: list[subprocess.Popen[str]] = []

    def start(options: dict[str, str] | None = None) -> subprocess.Popen[str]:
        argv = [*USUAL_SIGNALS, sys.executable, "-c", PROGRAM.format(options=options or {})]
        made.append(subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield start
    for program in made:
        program.kill()
        program.communicate()


def ledgers(environ: dict[str, str]) -> list[str]:
    pools = Path(environ["SKYWARD_STATE"], "pools")
    return sorted(path.name for path in pools.iterdir()) if pools.exists() else []


@pytest.mark.parametrize("moment", ["submitting a job", "waiting: ", "have joined", "starting", "CallStarted"])
def test_a_killed_client_leaves_neither_job_nor_process(
    cluster: Cluster, environ: dict[str, str], start: Start, moment: str
) -> None:
    held = {"begin": "now+1hour"} if moment == "waiting: " else None
    program = start(held)
    read_until(program, moment)
    program.kill()
    until(lambda: not cluster.jobs(), 90, "no job")
    until(lambda: not ledgers(environ), 90, "no ledger")


def test_the_job_ends_by_itself_when_client_and_watchdog_are_gone(
    cluster: Cluster, environ: dict[str, str], start: Start
) -> None:
    program = start()
    read_until(program, "CallStarted")
    os.kill(program.pid, signal.SIGSTOP)  # no new watchdog while the old ones die
    for pid in watchdogs():
        os.kill(pid, signal.SIGKILL)
    program.kill()
    until(lambda: not cluster.jobs(), 90, "no job: nobody listens any more, so the joiners end")
    (left,) = ledgers(environ)
    said = subprocess.run(
        [sys.executable, "-m", "skyward", "down", left, "--yes"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert ledgers(environ) == []


def test_ctrl_c_ends_the_job_in_order(cluster: Cluster, start: Start) -> None:
    program = start()
    read_until(program, "CallStarted")
    program.send_signal(signal.SIGINT)
    assert program.wait(60) != 0
    assert cluster.jobs() == []


def test_sky_ps_and_sky_down_work_without_the_ledger(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    note = "skyward pool=lost-1a2b3c expires=1794820000"
    wrap = ["--output=/dev/null", "-N2", "--wrap", "sleep 600"]
    cluster.run("sbatch", "--job-name=skyward-lost-1a2b3c", f"--comment={note}", *wrap)
    cluster.run("sbatch", "--job-name=somebody-elses", *wrap)
    until(lambda: all(job.endswith("RUNNING") for job in cluster.jobs()))

    def sky(*argv: str) -> str:
        argv = (sys.executable, "-m", "skyward", *argv)
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    try:
        assert re.search(r"lost-1a2b3c.*(expired|elsewhere)", sky("ps"))
        assert "Slurm has ended job" in sky("down", "lost-1a2b3c", "--yes")
        assert [job.split()[1] for job in cluster.jobs()] == ["somebody-elses"]
    finally:
        cluster.cancel_all()
