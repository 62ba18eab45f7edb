"""Detached runs in a job of Slurm: the program runs on the job's first node, and the job ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from skyward.api.shell import SshTarget
from skyward.cli.main import main
from skyward.machines.ledger import histories
from skyward.pool.run import Run, take_note
from tests.support.leftovers import watchdogs
from tests.support.slurm import Cluster
from tests.support.waiting import until

PROGRAM = """
import os, socket, sys, time
import skyward as sky
from skyward.api.shell import SshTarget

@sky.compute
def square(x):
    return x * x, socket.gethostname()

if __name__ == "__main__":
    with sky.ComputePool(provider=sky.Slurm({settings}), nodes=2, grace=2, name="batch", console=False) as pool:
{body}
    print("the end", flush=True)
"""
WAIT = """
print("ready", *(square(3) @ pool), flush=True)
try:
    time.sleep(600)
finally:
    print("clean", flush=True)
"""

Submit = Callable[..., Run]


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Submits the program in a process of its own, which is killed when it has."""
    for name in ("state", "work"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path / "work")

    def start(body: str, settings: str = "", before: str = "", words: tuple[str, ...] = ()) -> Run:
        lines = "\n".join(f"        {line}" for line in dedent(body).strip().splitlines())
        Path("train.py").write_text(PROGRAM.replace("{settings}", settings).replace("{body}", lines))
        code = f"import os, sys\n{before}\nfrom skyward.cli.main import main\nmain()\nos.kill(os.getpid(), 9)"
        argv = [sys.executable, "-c", code, "run", "--detach", "train.py", "--name", "grid", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == -9, done.stderr
        assert before or "grid runs" in done.stdout, done.stderr
        (tmp_path / "said").write_text(done.stdout)
        return Run("grid")

    return start


@pytest.fixture
def login(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Settings for a computer without Slurm, which nodes cannot reach."""
    monkeypatch.setenv("PATH", os.environ["PATH"].removeprefix(cluster.environ["PATH"].partition(":")[0] + ":"))
    network = cluster.network
    for node in cluster.nodes:
        node.cut_client()
    target = SshTarget(cluster.login.address, "sky", key=str(network.key), known_hosts=str(network.known_hosts))
    yield f"login={target!r}"
    for node in cluster.nodes:
        node.heal_client()


def attached(name: str = "grid") -> subprocess.CompletedProcess[str]:
    """`sky attach` in another process."""
    argv = [sys.executable, "-m", "skyward", "attach", name]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


def text_of(run: Run) -> str:
    return b"".join(run.output()).decode()


def test_a_run_goes_on_in_its_job_when_whoever_submitted_it_is_killed(cluster: Cluster, submit: Submit) -> None:
    run = submit("for i in range(200):\n    print(i, *(square(i) @ pool), flush=True)\ntime.sleep(3)")
    assert run.status.stage == "running"
    done = attached()
    assert done.returncode == 0, done.stderr
    lines = [f"{i} ({i * i}, 'h1') ({i * i}, 'h2')" for i in range(200)]
    assert done.stdout.splitlines() == [*lines, "the end"]
    assert (cluster.jobs(), list(histories())) == ([], [])
    assert text_of(run) == done.stdout, "it is on this computer now"


def test_its_files_are_read_on_the_login_node_when_its_job_is_over(
    cluster: Cluster, submit: Submit, login: str
) -> None:
    before = {process.pid for process in cluster.login.processes("sky")}
    submit("print(*(square(3) @ pool), flush=True)", login)
    until(lambda: not cluster.jobs(), 60, "the job to end with its program")
    until(lambda: {process.pid for process in cluster.login.processes("sky")} <= before, 30, "no relay")
    done = attached()
    assert (done.returncode, done.stdout) == (0, "(9, 'h1') (9, 'h2')\nthe end\n"), done.stderr
    assert list(histories()) == []


def test_a_run_can_be_looked_at_and_stopped_over_the_login_node(
    cluster: Cluster, submit: Submit, login: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = submit(WAIT, login)
    until(lambda: "ready (9, 'h1') (9, 'h2')" in text_of(run), 60)
    assert main(["down", "--all", "--yes"]) == 1
    assert "a detached run has it" in capfd.readouterr().out
    assert main(["stop", "grid"]) == 0
    assert "grid is over: stopped" in capfd.readouterr().out
    assert "clean" in text_of(run)
    assert (cluster.jobs(), list(histories())) == ([], [])


def test_a_program_that_fails_is_a_failed_run_with_its_traceback(cluster: Cluster, submit: Submit) -> None:
    submit("raise ValueError('no data')")
    done = attached()
    assert done.returncode == 1
    assert "ValueError: no data" in done.stdout
    assert "grid is over: failed, exit status 1" in done.stderr
    assert cluster.jobs() == []


def test_the_job_s_time_limit_ends_a_run_and_is_said(
    cluster: Cluster, submit: Submit, login: str, tmp_path: Path
) -> None:
    submit(WAIT, f"{login}, time='1:00', partition='main'")
    number = cluster.jobs()[0].split()[0]
    assert f"(the time limit of job {number})" in (tmp_path / "said").read_text()
    done = attached()
    assert "clean" in done.stdout
    assert f"grid is over: expired, by the time limit of job {number}" in done.stderr


def test_scancel_stops_a_run(cluster: Cluster, submit: Submit, login: str) -> None:
    run = submit(WAIT, login)
    until(lambda: "ready" in text_of(run), 60)
    cluster.admin("scancel", cluster.jobs()[0].split()[0])
    assert run.wait(120).stage == "stopped", text_of(run)
    assert "clean" in text_of(run)


STEPS = {
    "the hand-over": ("skyward.setup.joined.arrivals", "JoinedLease.hand_over"),
    "the watchdog": ("skyward.setup.fleet", "Fleet.let_go"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_its_job_ends_wherever_a_submission_is_killed(cluster: Cluster, submit: Submit, step: str, when: str) -> None:
    """With the watchdog until it has let go, then by itself: the program is never begun."""
    module, name = STEPS[step]
    holder, _, attribute = f"module.{name}".rpartition(".")
    killed = dedent(f"""
        import importlib, skyward.pool.detached
        skyward.pool.detached._GO_WITHIN = 3.0
        module = importlib.import_module({module!r})
        real = {holder}.{attribute}
        def dies(*args, **named):
            if {when!r} == "after":
                real(*args, **named)
            os.kill(os.getpid(), 9)
        {holder}.{attribute} = dies
        """)
    run = submit("print('begun', flush=True)", before=killed)
    until(lambda: not cluster.jobs(), 120)
    until(lambda: not watchdogs(), 60)
    assert run.status.stage in ("lost", "expired", "submitting")


def test_what_a_function_returns_comes_back_and_the_submitting_program_may_stay(
    cluster: Cluster, submit: Submit, login: str, tmp_path: Path
) -> None:
    program = f"""
        import skyward as sky
        from skyward.api.shell import SshTarget

        @sky.compute
        def square(x):
            return x * x

        def squares(count):
            return sum(sky.gather(*[square(n) for n in range(count)]) >> sky)

        if __name__ == "__main__":
            pool = sky.ComputePool(provider=sky.Slurm({login}), nodes=1, console=False)
            run = sky.detach(squares, 200, pool=pool, name="squares")
            print(run.status.stage, run.result())
    """
    Path("detach.py").write_text(dedent(program))
    done = subprocess.run([sys.executable, "detach.py"], capture_output=True, text=True, timeout=300, check=False)
    stage, result = done.stdout.split()
    assert (stage in ("running", "finished"), int(result)) == (True, sum(n * n for n in range(200))), done.stderr
    assert (cluster.jobs(), list(histories())) == ([], [])


def test_another_computer_finds_a_run_on_the_login_node(
    cluster: Cluster, submit: Submit, login: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(WAIT, login)
    network = cluster.network
    for host in network:  # a login has no variable for it here
        host.run(["sh", "-c", "mkdir -p ~/.cache && ln -sfn /run/cache ~/.cache/skyward"])
    (tmp_path / "other").mkdir(mode=0o700)
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "other"))
    config = f"-o UserKnownHostsFile={network.known_hosts} -i {network.key}"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh {config} "$@"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    take_note("grid", f"sky@{cluster.login.address}")
    run = Run("grid")
    until(lambda: "ready" in text_of(run), 60)
    assert run.stop().stage == "stopped"
    assert "clean" in text_of(run)
    until(lambda: not cluster.jobs(), 60)
