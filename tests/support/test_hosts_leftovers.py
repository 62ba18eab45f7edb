"""Test hosts and the machine they are made on: nothing is left of them, and what cannot be is said in words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hosts import Network, machine
from tests.support.hosts.fixtures import hosts, hosts_possible
from tests.support.hosts.probes import answers
from tests.support.hosts.runs import link, locked, sweep
from tests.support.waiting import until

__all__ = ["hosts", "hosts_possible"]

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, time
from tests.support.hosts import Network
with Network(2) as net:
    net[0].start(["sleep", "1000"])
    print(net.directory, flush=True)
    if sys.argv[1] == "fail":
        raise RuntimeError("as tests do")
    time.sleep(1000)
"""


@contextmanager
def holder(end: str) -> Generator[tuple[subprocess.Popen[str], Path, dict[str, int]]]:
    """Another process that has made two hosts: it, their directory, and their first processes."""
    argv = [sys.executable, "-c", HOLDER, end]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout
        directory = Path(process.stdout.readline().strip())
        pids: dict[str, int] = {}
        if end != "fail":
            pids = json.loads((directory / "run.json").read_text())["pids"]
        yield process, directory, pids


def remains(directory: Path, pids: dict[str, int]) -> list[str]:
    """What is still there of a network."""
    found = [str(directory)] if directory.exists() else []
    found += [name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()]
    found += [name for name in os.listdir("/sys/class/net") if name == link(int(directory.name))]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{directory}/" in line]
    return found


@pytest.mark.parametrize("end", ["fail", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_however_a_run_ends(hosts_possible: None, end: str) -> None:
    with holder(end) as (process, directory, pids):
        if end != "fail":
            assert set(remains(directory, pids)) >= {"switch", "client", "outside", "h0", "h1", str(directory)}
            process.send_signal(getattr(signal, end))
        assert ("as tests do" in process.communicate(timeout=20)[1]) == (end == "fail")
        until(lambda: not remains(directory, pids))


def test_what_a_dead_run_could_not_remove_is_swept_by_the_next_and_live_runs_are_left_alone(hosts: Network) -> None:
    with holder("stay") as (process, directory, pids):
        machine.root(["kill", "-STOP", str(pids["switch"]), str(pids["client"])])  # those that would clean up hang
        with locked():  # other test runs sweep too
            process.kill()
            process.communicate()
            assert remains(directory, pids)
        sweep()  # as every new network does first
        until(lambda: not remains(directory, pids))
    assert answers(hosts[0].address)


def test_hosts_from_the_command_line_stay_until_they_are_told_to_go(hosts_possible: None) -> None:
    def hosts_command(*words: str) -> str:
        argv = [sys.executable, "-m", "tests.support.hosts", *words]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
        return done.stdout + done.stderr

    said = hosts_command("up", "2")
    number = said.split()[1].strip(":")
    do = ["do", "--network", number]
    try:
        login = next(line for line in said.splitlines() if line.startswith("  h1 ")).split("  ssh ")[1].split()
        assert subprocess.run(["ssh", *login, "hostname"], capture_output=True, text=True).stdout == "h1\n"
        assert said.splitlines()[0] in hosts_command("status")
        assert hosts_command(*do, "h1", "kill") == "done\n"
        assert "h1 is dead" in hosts_command(*do, "h1", "listeners")
        assert "There is no h7; there are net, h0, h1." in hosts_command(*do, "h7", "cut")
    finally:
        gone = hosts_command("down", number)
    assert "Removed 1 network(s)" in gone
    assert said.splitlines()[0] not in hosts_command("status")  # another test run may have taken the number by now
    assert "There are no hosts" in hosts_command("do", "--network", "999", "h1", "cut")


def test_a_machine_that_lacks_something_says_what(monkeypatch: pytest.MonkeyPatch, hosts_possible: None) -> None:
    why = machine.unavailable.__wrapped__
    assert why() is None
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_PATH", "/nowhere")
        assert "Test hosts need sshd, ssh," in str(why())
        assert "python -m tests.support.hosts install" in str(why())
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_TRIAL", "echo not here >&2; false")
        assert "does not let even root make namespaces" in str(why())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "run these tests on Linux" in str(why())


def test_two_runs_with_directories_of_their_own_take_different_networks(
    hosts: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are this machine's, whatever TMPDIR says; and a run leaves the network of another alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with holder("stay") as (process, directory, pids):
        assert directory.parent.parent == tmp_path
        assert directory.name != hosts.directory.name
        process.kill()
        process.communicate()
        until(lambda: not remains(directory, pids))
    assert answers(hosts[0].address)
