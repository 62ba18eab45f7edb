"""Detached runs on rented machines: they end without this computer, which gives back the rest at its next command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from skyward.cli.main import main
from skyward.machines.ledger import histories
from skyward.pool.run import Run
from tests.cloud.machines import CACHE, Hosts
from tests.support.cloud import Cloud
from tests.support.leftovers import watchdogs
from tests.support.waiting import until

PROGRAM = """
import os, sys, time
import skyward as sky
from skyward.providers.aws.api import Pace

@sky.compute
def add(a, b):
    return a + b

if __name__ == "__main__":
    pace = Pace(base=0.01, cap=0.1, budget=20.0, poll=0.1, settle=0.1, unanswered=1.0, boot=1.0)
    aws = sky.AWS(endpoint_url={endpoint!r}, ssh_from="192.0.2.1", username="sky", pace=pace, lease={lease})
    with sky.ComputePool(provider=aws, nodes=2, name="rented", console=False) as pool:
        print(add(1, 2) @ pool, [name for name in os.environ if "AWS" in name], flush=True)
        time.sleep({seconds})
    print("the end", flush=True)
"""

Submit = Callable[..., Run]


@pytest.fixture
def submit(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Submits the program in a process of its own, which is killed when it has."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def start(*words: str, seconds: float = 0, lease: float = 900, before: str = "") -> Run:
        text = PROGRAM.replace("{endpoint!r}", repr(cloud.endpoint)).replace("{lease}", str(lease))
        Path("train.py").write_text(text.replace("{seconds}", str(seconds)))
        code = f"import os\n{before}\nfrom skyward.cli.main import main\nmain()\nos.kill(os.getpid(), 9)"
        argv = [sys.executable, "-c", code, "run", "--detach", "train.py", "--name", "grid", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == -9, done.stderr
        assert "grid runs" in done.stdout, done.stderr
        return Run("grid")

    return start


def test_what_a_run_has_printed_is_fetched_and_its_machines_are_given_back(
    cloud: Cloud, hosts: Hosts, submit: Submit, capfd: pytest.CaptureFixture[str]
) -> None:
    submit()
    assert main(["attach", "grid"]) == 0
    captured = capfd.readouterr()
    assert captured.out == "[3, 3] []\nthe end\n", "no login of the cloud is on a machine"
    assert (cloud.running(), cloud.leftovers(), list(histories())) == ([], [], [])
    assert main(["logs", "grid"]) == 0
    assert capfd.readouterr().out == captured.out, "it is on this computer now"


def test_machines_end_by_themselves_when_nobody_comes_back(
    cloud: Cloud, hosts: Hosts, submit: Submit, capfd: pytest.CaptureFixture[str]
) -> None:
    submit(before="import skyward.pool.detached\nskyward.pool.detached._HOLD = 2.0")
    until(lambda: not cloud.running(), 180)
    (left,) = histories()
    assert left.detached_until
    assert main(["down", left.pool, "--yes", "--endpoint-url", cloud.endpoint]) == 0
    assert (cloud.leftovers(), list(histories())) == ([], [])


@pytest.fixture
def kept(hosts_cache: Path) -> Iterator[Path]:
    """A folder that machines and this computer see."""
    yield hosts_cache / "kept"
    shutil.rmtree(hosts_cache / "kept", ignore_errors=True)


def test_node_0_stays_as_long_as_wanted_and_not_for_long_when_its_files_are_elsewhere(
    cloud: Cloud, hosts: Hosts, submit: Submit, kept: Path
) -> None:
    run = submit("--hold", "2")
    until(lambda: not cloud.running(), 180)
    (left,) = histories()
    assert main(["down", left.pool, "--yes", "--endpoint-url", cloud.endpoint]) == 0
    assert run.status.stage == "lost", "nobody came by"
    assert main(["runs", "drop", "grid"]) == 0
    run = submit("--results", f"{CACHE}/kept", before="import skyward.pool.detached as d\nd._HOLD_COPIED = 2.0")
    assert run.wait(180).stage == "finished"
    until(lambda: not cloud.running(), 180)
    assert (kept / "grid" / "output").read_text() == "[3, 3] []\nthe end\n"


def test_before_a_spot_machine_is_taken_away_the_files_of_its_run_are_copied(
    cloud: Cloud, hosts: Hosts, submit: Submit, kept: Path
) -> None:
    run = submit("--results", f"{CACHE}/kept", seconds=600)
    until(lambda: b"[3, 3]" in b"".join(run.output()), 120)
    output = kept / "grid" / "output"
    assert not output.exists() or not output.read_text()
    for machine in cloud.running():
        cloud.notice(machine.id, 60)
    until(lambda: "[3, 3]" in output.read_text(), 50)
    assert main(["stop", "grid"]) == 0


def test_nobody_takes_a_run_for_garbage_and_it_can_be_stopped(
    cloud: Cloud, hosts: Hosts, submit: Submit, capfd: pytest.CaptureFixture[str]
) -> None:
    run = submit(seconds=600)
    until(lambda: b"[3, 3]" in b"".join(run.output()), 120)
    assert main(["down", "--all", "--yes", "--endpoint-url", cloud.endpoint]) == 1
    assert "a detached run has it" in capfd.readouterr().out
    assert len(cloud.running()) == 2
    assert main(["stop", "grid"]) == 0
    assert (cloud.running(), cloud.leftovers(), list(histories())) == ([], [], [])


def test_machines_end_with_their_lease_when_the_steward_is_gone(cloud: Cloud, hosts: Hosts, submit: Submit) -> None:
    run = submit(seconds=600, lease=10)
    until(lambda: b"[3, 3]" in b"".join(run.output()), 120)
    for instance in cloud.running():
        host = hosts.of[instance.id]
        for process in host.processes():
            if "skyward.node.steward" in process.argv:
                host.signal(process.pid, "KILL")
    until(lambda: not cloud.running(), 180)
    (left,) = histories()
    assert main(["down", left.pool, "--yes", "--endpoint-url", cloud.endpoint]) == 0


STEPS = {
    "the hand-over": ("skyward.api.provider", "Lease.hand_over"),
    "the watchdog": ("skyward.setup.fleet", "Fleet.let_go"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_machines_end_wherever_a_submission_is_killed(
    cloud: Cloud, hosts: Hosts, submit: Submit, step: str, when: str
) -> None:
    """With the watchdog until it has let go, then by themselves: the program is never begun."""
    module, name = STEPS[step]
    holder, _, attribute = f"module.{name}".rpartition(".")
    killed = dedent(f"""
        import importlib
        import skyward.pool.detached
        skyward.pool.detached._GO_WITHIN = skyward.pool.detached._HOLD = 2.0
        module = importlib.import_module({module!r})
        real = {holder}.{attribute}
        def dies(*args, **named):
            if {when!r} == "after":
                real(*args, **named)
            os.kill(os.getpid(), 9)
        {holder}.{attribute} = dies
        """)
    with pytest.raises(AssertionError):  # it is not said to run
        submit(seconds=600, before=killed)
    until(lambda: not cloud.running(), 180)
    until(lambda: not watchdogs(), 120)
    if step == "the watchdog":  # it has let go of the cloud
        (left,) = histories()
        assert main(["down", left.pool, "--yes", "--endpoint-url", cloud.endpoint]) == 0
    assert (cloud.leftovers(), list(histories())) == ([], [])
