"""Whatever becomes of the client, no machine, key or group is left: watchdog, lease and reaper, on real machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from skyward.machines.ledger import histories
from skyward.testing import Call
from tests.cloud.clients import BLOWS, Clients, Strike
from tests.cloud.machines import Hosts
from tests.support.cloud import Cloud
from tests.support.leftovers import watchdogs
from tests.support.waiting import read_until, until

SOAK = int(os.environ.get("SKYWARD_SOAK", "0"))

Client = Callable[..., "subprocess.Popen[str]"]


def gone(cloud: Cloud) -> bool:
    return not cloud.leftovers() and not list(histories())


def after(cloud: Cloud, action: str) -> threading.Event:
    """Set when the cloud has carried out the first such call that could tell of something."""
    done = threading.Event()

    def look(call: Call) -> None:
        if call.action == action and cloud.leftovers():
            done.set()

    cloud.on_done = look
    return done


@pytest.mark.parametrize("action", ["AuthorizeSecurityGroupIngress", "DescribeInstances"])
def test_a_client_that_is_killed_while_opening_leaves_nothing(cloud: Cloud, client: Client, action: str) -> None:
    """Row 31: the watchdog runs `sky down`; nothing, or two machines, are there at that moment."""
    done = after(cloud, action)
    program = client()
    assert done.wait(30)
    os.kill(program.pid, signal.SIGKILL)
    assert cloud.leftovers()
    until(lambda: gone(cloud), 120)


@pytest.mark.parametrize("moment", ["setting up", "tick 3"])
def test_a_client_that_is_killed_with_machines_leaves_nothing(cloud: Cloud, client: Client, moment: str) -> None:
    """Row 31: whether nodes are being set up or calls run."""
    program = client()
    read_until(program, "connecting to" if moment == "setting up" else moment)
    os.kill(program.pid, signal.SIGKILL)
    assert len(cloud.running()) == 2
    until(lambda: gone(cloud), 120)


def test_a_client_that_is_killed_while_closing_leaves_nothing(cloud: Cloud, client: Client) -> None:
    """Row 31: machines are ended, key and group still there."""
    done = after(cloud, "TerminateInstances")
    program = client(seconds=0.1)
    assert done.wait(60)
    os.kill(program.pid, signal.SIGKILL)
    until(lambda: gone(cloud), 120)


def test_the_lease_ends_machines_when_client_and_watchdog_are_gone(cloud: Cloud, hosts: Hosts, client: Client) -> None:
    """Row 31, SEC-31: nobody is left to call anything; the reaper removes what costs nothing, later."""
    program = client(lease=6)
    read_until(program, "tick 3")
    machines = [instance.id for instance in cloud.running()]
    os.kill(program.pid, signal.SIGSTOP)  # no new watchdog while the old ones die
    for pid in watchdogs():
        os.kill(pid, signal.SIGKILL)
    os.kill(program.pid, signal.SIGKILL)
    until(lambda: not cloud.running(), 120)
    assert sorted(hosts.switched_off[-2:]) == sorted(machines)
    until(lambda: len(cloud.leftovers()) == 2)  # disks go with their machines
    argv = [sys.executable, "-m", "skyward", "down", "--all"]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=240).stdout
    assert "would end" in told
    assert len(cloud.leftovers()) == 2
    told = subprocess.run([*argv, "--yes"], capture_output=True, text=True, check=True, timeout=240).stdout
    assert "ended" in told
    assert "total $" in told
    assert gone(cloud)


def test_ctrl_c_gives_everything_back_before_the_program_ends(cloud: Cloud, client: Client) -> None:
    """Row 32."""
    program = client()
    read_until(program, "tick 3")
    os.kill(program.pid, signal.SIGINT)
    said, _ = program.communicate(timeout=120)
    assert "KeyboardInterrupt" in said
    assert "confirmed gone" in said
    assert gone(cloud)


def test_ctrl_c_twice_leaves_giving_back_to_the_watchdog(cloud: Cloud, client: Client) -> None:
    """Row 33: the second comes while machines are being ended."""
    program = client()
    read_until(program, "tick 3")
    cloud.times.shutdown = 4  # so that the client has to wait for it
    done = after(cloud, "TerminateInstances")
    os.kill(program.pid, signal.SIGINT)
    assert done.wait(60)
    os.kill(program.pid, signal.SIGINT)
    program.communicate(timeout=120)
    assert program.returncode != 0
    assert not gone(cloud)
    until(lambda: gone(cloud), 120)


def test_ctrl_c_twice_leaves_giving_back_to_the_watchdog_also_where_the_program_lives_on(
    cloud: Cloud, hosts: Hosts, client: Client
) -> None:
    """Row 33: as in a notebook; the second comes while nodes take their leave, before anything was given back."""
    program = client(lives=True)
    read_until(program, "tick 3")
    for instance in cloud.running():
        hosts.of[instance.id].cut()  # so that their leave has to be waited for
    os.kill(program.pid, signal.SIGINT)
    read_until(program, "leaving")
    os.kill(program.pid, signal.SIGINT)
    read_until(program, "alive")
    until(lambda: gone(cloud), 120)
    assert program.poll() is None


def test_ctrl_c_twice_while_opening_leaves_giving_back_to_the_watchdog(cloud: Cloud, client: Client) -> None:
    """Rows 32, 33: first while machines are waited for, then while they are ended."""
    cloud.times.boot, cloud.times.shutdown = 60, 4
    looked, ended = threading.Event(), threading.Event()

    def look(call: Call) -> None:
        if call.action == "DescribeInstances" and cloud.running():
            looked.set()
        if call.action == "TerminateInstances":
            ended.set()

    cloud.on_done = look
    program = client()
    assert looked.wait(30)
    os.kill(program.pid, signal.SIGINT)
    assert ended.wait(30)
    os.kill(program.pid, signal.SIGINT)
    program.communicate(timeout=120)
    assert not gone(cloud)
    until(lambda: gone(cloud), 120)


def test_a_client_that_is_asked_to_end_gives_everything_back(cloud: Cloud, client: Client) -> None:
    """Row 35."""
    program = client()
    read_until(program, "tick 3")
    os.kill(program.pid, signal.SIGTERM)
    program.communicate(timeout=120)
    assert program.returncode == 128 + signal.SIGTERM
    assert gone(cloud)


@pytest.fixture
def clients(cloud: Cloud, tmp_path: Path) -> Iterator[Clients]:
    """Clients that can be struck at any call."""
    made = Clients(cloud, tmp_path)
    yield made
    made.close()


def strikes(calls: Sequence[Call]) -> Iterator[Strike]:
    """Every call in two of eight ways for each SKYWARD_SOAK; without, each action once, every way at least once.

    That nothing is left by a kill at any call whatever is seen without machines in tests/providers/aws/test_crashes.py.
    """
    counts: dict[str, int] = {}
    ways = 0
    for number, call in enumerate(calls):
        counts[call.action] = counts.get(call.action, 0) + 1
        turned = [BLOWS[(number + 3 * turn) % len(BLOWS)] for turn in range(min(2 * SOAK, len(BLOWS)))]
        blows = turned if SOAK else [BLOWS[3 * ways % len(BLOWS)]] if counts[call.action] == 1 else []
        ways += bool(blows)
        for blow in blows:
            yield Strike(call.action, counts[call.action], blow, again=1 + number % 4)


@pytest.mark.timeout(7200 if SOAK else 1200)
def test_a_client_struck_at_any_call_leaves_nothing(cloud: Cloud, clients: Clients) -> None:
    """Rows 31 to 35: killed, asked to end, interrupted once and twice, at each call of opening and closing a pool."""
    assert clients.run() == 0, clients.log.read_text()
    calls, done = [*cloud.calls], list[Strike]()
    assert len(calls) >= 25
    for strike in strikes(calls):
        status = clients.run(strike)
        assert not strike.struck or status, f"{strike} went by unnoticed\n{clients.log.read_text()}"
        until(lambda: gone(cloud) and not watchdogs(), 60, f"the end of everything after {strike}")
        done += [strike] if strike.struck else []
    assert {strike.action for strike in done} == {call.action for call in calls}
    assert {strike.blow for strike in done} == set(BLOWS)


@pytest.mark.timeout(7200 if SOAK else 1200)
def test_a_client_struck_while_a_machine_is_replaced_leaves_nothing(cloud: Cloud, clients: Clients) -> None:
    """Rows 21, 31 to 35: the same at each call while a pool runs, which there are when a spot machine is taken away."""
    status, calls = clients.run_replaced()
    assert status == 0, clients.log.read_text()
    assert "RunInstances" in {call.action for call in calls}
    until(lambda: gone(cloud) and not watchdogs(), 120)
    if not SOAK:  # how a machine is chosen was struck above
        calls = [call for call in calls if call.action.endswith("Instances")]
    for strike in strikes(calls):
        status, _ = clients.run_replaced(strike)
        assert not strike.struck or status, f"{strike} went by unnoticed\n{clients.log.read_text()}"
        until(lambda: gone(cloud) and not watchdogs(), 60, f"the end of everything after {strike}")
