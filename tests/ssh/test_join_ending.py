"""Whatever is killed on a machine that has joined, nothing of ours is left there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import skyward as sky
from skyward import events
from tests.ssh.joining import join, joiners, opened
from tests.ssh.places import left, ours
from tests.support.hosts import Host, Network
from tests.support.waiting import until

CLIENT = """
import sys, time
import skyward as sky

with sky.ComputePool(provider=sky.Join(file=sys.argv[1], addresses=[sys.argv[2]]), console=False) as pool:
    print("open", flush=True)
    time.sleep(1000)
"""


@sky.compute
def nap(seconds: float) -> str:
    import time

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (notice := sky.preempted()) is not None:
            return f"notice: {notice.seconds_left:.0f}"
        time.sleep(0.05)
    return "nothing"


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


def tree(host: Host) -> dict[str, list[int]]:
    """The processes of ours on a host, by what they are; of two joiners the one with children is the joiner itself."""
    found: dict[str, list[int]] = {}
    for process in host.processes(user="sky"):
        line = " ".join(process.argv)
        status = host.run(["cat", f"/proc/{process.pid}/status"], user="root", check=False).stdout
        if not status:
            continue  # it has just ended
        if "/home/sky/join.py" in line:
            session = "guard" if "SigIgn:\t0000000000000000" not in status and _ignores_term(status) else "joiner"
            found.setdefault(session, []).append(process.pid)
        elif "skyward.node.keeper" in line:
            name = status.partition("\n")[0].removeprefix("Name:").strip()
            kinds = {"skyward-agent": "agent", "skyward-forks": "fork server", "skyward-runner": "runner"}
            found.setdefault(kinds.get(name, "keeper"), []).append(process.pid)
    return found


def _ignores_term(status: str) -> bool:
    mask = int(next(line for line in status.splitlines() if line.startswith("SigIgn:")).split()[1], 16)
    return bool(mask & 1 << (signal.SIGTERM - 1))


def nothing_is_left(host: Host) -> bool:
    return not ours(host) and not joiners(host) and not left(host)


@pytest.mark.parametrize("killed", [["joiner"], ["guard", "joiner"], ["keeper", "joiner"]], ids=" and ".join)
def test_nothing_is_left_when_the_joiner_was_killed(net: Network, tmp_path: Path, killed: list[str]) -> None:
    host = net[0]
    with opened([host], tmp_path / "join.py", addresses=[net.address]) as pool:
        assert add(1, 2) >> pool == 3
        processes = tree(host)
        pids = [str(pid) for kind in killed for pid in processes[kind]]
        host.run(["kill", "-KILL", *pids], user="root", check=False)  # at once: what is left ends by itself, too
        until(lambda: not ours(host) and not joiners(host), 60)
        if killed != ["guard", "joiner"]:  # then nobody is there to remove the directory but the keeper itself
            until(lambda: nothing_is_left(host), 60)
    until(lambda: nothing_is_left(host), 60)


@pytest.mark.parametrize("killed", ["guard", "agent", "fork server", "runner"])
def test_the_pool_goes_on_when_another_process_was_killed(net: Network, tmp_path: Path, killed: str) -> None:
    host = net[0]
    with opened([host], tmp_path / "join.py", addresses=[net.address]) as pool:
        assert add(1, 2) >> pool == 3
        for pid in tree(host)[killed]:
            host.signal(pid)
        until(lambda: _works(pool), 60)
    until(lambda: nothing_is_left(host), 60)


def _works(pool: sky.ComputePool) -> bool:
    try:
        return add(2, 3) >> pool == 5
    except sky.SkywardError:
        return False


def test_the_end_of_standard_input_ends_everything(net: Network, tmp_path: Path) -> None:
    host, path = net[0], tmp_path / "join.py"
    provider = sky.Join(file=path, addresses=[net.address])
    pool = sky.ComputePool(provider=provider, console=False, nodes=1)
    seen: list[str] = []
    starting: list[subprocess.Popen[bytes]] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.NodePhase) and "0 of 1" in event.phase and not starting:
            starting.append(
                join(host, path.read_text(), "--stdin", "--file", "/home/sky/join.py", stdin=subprocess.PIPE)
            )

    pool.on_event(listen)
    with pool:
        assert add(1, 2) >> pool == 3
        assert starting[0].stdin is not None
        starting[0].stdin.close()
        until(lambda: nothing_is_left(host), 60)
        assert starting[0].wait(30) == 1
    assert seen == []


def test_everything_ends_when_the_client_was_killed(net: Network, tmp_path: Path) -> None:
    host, path = net[0], tmp_path / "join.py"
    argv = [sys.executable, "-c", CLIENT, str(path), net.address]
    client = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(os.environ))
    assert client.stdout is not None
    with client:
        until(lambda: path.exists() and path.read_text().endswith("main())\n"), 60)
        process = join(host, path.read_text(), stderr=subprocess.DEVNULL)
        assert client.stdout.readline() == b"open\n"
        client.kill()
    assert process.wait(90) == 1
    until(lambda: nothing_is_left(host), 60)


def test_sigterm_to_every_process_is_a_notice_and_ends_nothing(net: Network, tmp_path: Path) -> None:
    host = net[0]
    with opened([host], tmp_path / "join.py", addresses=[net.address]) as pool:
        napping = nap(60) > pool
        until(lambda: "runner" in tree(host), 30)
        before = tree(host)
        for pids in before.values():
            for pid in pids:
                host.signal(pid, "TERM")
        assert napping.result(60).startswith("notice: ")
        after = tree(host)
        assert {kind: after[kind] for kind in ("joiner", "guard", "keeper", "agent", "fork server")} == {
            kind: before[kind] for kind in ("joiner", "guard", "keeper", "agent", "fork server")
        }
    until(lambda: nothing_is_left(host), 60)
