"""What engines set for the processes that they start does not reach the nodes of a pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.setup.joined.arrivals import JoinShell, join_program, open_arrivals
from tests.support.waiting import until

IGNORED = [signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGALRM, signal.SIGTSTP]

STEP = {
    **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_STEP_ID"), "0"),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"), "1"),
    **dict.fromkeys(("SLURM_STEP_NUM_NODES", "SLURM_TASKS_PER_NODE", "SLURM_JOB_NUM_NODES"), "1"),
    **dict.fromkeys(("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"), "0"),
}
JOB = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_CPUS_PER_TASK": "4"}


def _as_engines_do() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], JoinShell]]:
    """A machine whose engine blocks and ignores signals, and counts cores its own way."""
    (tmp_path / "join.py").write_text(join_program())
    arrivals = open_arrivals("inherited", ttl=3600, lease=60, host="127.0.0.1")
    env = {**os.environ, "SKYWARD_JOIN": arrivals.text, "OMP_NUM_THREADS": "1", **STEP, **JOB}
    argv = [sys.executable, "-I", str(tmp_path / "join.py")]
    process = subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL, preexec_fn=_as_engines_do)
    try:
        (found,) = arrivals.wait([0], time.monotonic() + 60, lambda text: None)
        assert found.joined is not None
        yield process, found.joined.open_shell()
    finally:
        arrivals.close()
        assert process.wait(30) in (0, 1)


def _masks(status: str) -> dict[str, set[int]]:
    """Which signals a process blocks and ignores, by what /proc calls that."""
    rows = (line.split(":") for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn")))
    return {name: {n for n in range(1, 32) if int(mask, 16) & 1 << (n - 1)} for name, mask in rows}


def test_blocked_and_ignored_signals_are_as_usual_in_the_joiner_and_in_what_it_starts(
    joined: tuple[subprocess.Popen[bytes], JoinShell],
) -> None:
    process, machine = joined
    own = _masks(Path(f"/proc/{process.pid}/status").read_text())
    assert own == {"SigBlk": set(), "SigIgn": {signal.SIGPIPE, signal.SIGXFSZ}}
    started = _masks(machine.run(["cat", "/proc/self/status"]).out.decode())
    assert started == {"SigBlk": set(), "SigIgn": set()}
    assert machine.run(["sh", "-c", "exit 7"]).code == 7  # is not known where SIGCHLD is ignored
    assert b"OMP_NUM_THREADS" not in machine.run(["env"]).out


def test_the_ranks_of_a_launcher_are_taken_away_and_what_it_says_of_the_job_stays(
    joined: tuple[subprocess.Popen[bytes], JoinShell],
) -> None:
    _, machine = joined
    seen = dict(line.partition("=")[::2] for line in machine.run(["env"]).out.decode().splitlines())
    assert not set(STEP) & set(seen)
    assert seen.items() >= JOB.items()


def test_a_joiner_that_nohup_started_stays_when_the_terminal_is_closed(
    joined: tuple[subprocess.Popen[bytes], JoinShell],
) -> None:
    process, machine = joined
    process.send_signal(signal.SIGHUP)
    assert machine.run(["echo", "here"]).out == b"here\n"
    assert process.poll() is None


def test_ctrl_c_ends_a_joiner_whose_engine_blocks_it(joined: tuple[subprocess.Popen[bytes], JoinShell]) -> None:
    process, machine = joined
    assert machine.run(["true"]).code == 0
    process.send_signal(signal.SIGINT)
    until(lambda: process.poll() is not None, 30)
