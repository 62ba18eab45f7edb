"""Bad links and lost nodes: what faults.md promises, on real hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.errors import NodeLost
from tests.ssh.places import left, ours, reached
from tests.support.hosts import Network
from tests.support.listener import Listener
from tests.support.programs import USUAL_SIGNALS
from tests.support.waiting import read_until, until

CUT = 60 if os.environ.get("SKYWARD_SOAK") else 15


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@sky.compute
def ticks(seconds: float, mark: str) -> tuple[int, int | None]:
    """Ticks for a while; every start leaves a line in a file of the host that all hosts see."""
    info: Any = sky.instance_info()  # no assert in here: pytest would have to travel along
    with open(f"/run/cache/{mark}", "a") as file:
        file.write(f"{info.node} {info.attempt}\n")
    for i in range(int(seconds * 10)):
        print(f"tick {i}", flush=True)
        time.sleep(0.1)
    return info.node, info.attempt


@sky.compute
def pid() -> int:
    return os.getpid()


@pytest.fixture
def broken(net: Network, whole: Network) -> Iterator[tuple[sky.ComputePool, Listener, Network]]:
    """A pool of its own on hosts that may break."""
    with sky.ComputePool(provider=reached(net), console=False) as pool:
        yield pool, Listener(pool), net


def starts(cache: Path, mark: str) -> list[list[int]]:
    """Node and attempt of every start of `ticks`."""
    path = cache / mark
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


Broken = tuple[sky.ComputePool, Listener, Network]


@pytest.mark.timeout(400)
def test_calls_survive_a_link_that_is_cut(broken: Broken, cache: Path) -> None:
    """Rows 13b, 28, 29: one goes on, one ends meanwhile; each runs once, its output without a gap or a repeat."""
    pool, listener, net = broken
    calls = [ticks(CUT + 10, "long") > pool, ticks(3, "short") > pool]
    until(lambda: listener.lines().count("tick 5") == 2)
    net.cut_client()
    time.sleep(CUT)  # not for luck: a link is given up after ten seconds of silence
    assert not any(future.done() for future in calls)
    net.heal_client()
    assert [future.result(60)[1] for future in calls] == [0, 0]
    assert [len(starts(cache, mark)) for mark in ("long", "short")] == [1, 1]
    until(lambda: len(listener.lines()) >= (CUT + 13) * 10)
    for count in ((CUT + 10) * 10, 30):
        assert [f"tick {i}" for i in range(count)] in [
            [e.text for e in listener.output if e.call == call] for call in {e.call for e in listener.output}
        ]
    assert add(1, 2) @ pool == [3, 3, 3]


SLEEPER = """
import json, sys, time
import skyward as sky

@sky.compute
def slow(seconds):
    for i in range(int(seconds * 5)):
        print("tick", i, flush=True)
        time.sleep(0.2)
    return "awake"

hosts, key, known, seconds, lease = json.loads(sys.argv[1])
provider = sky.SSH(hosts=hosts, user="sky", key=key, known_hosts=known, lease=lease)
with sky.ComputePool(provider=provider, console="plain") as pool:
    print("open", flush=True)
    print(slow(seconds) >> pool, flush=True)
"""


@pytest.fixture
def client(net: Network, whole: Network, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a client program of its own."""
    begun: list[subprocess.Popen[str]] = []

    def start(seconds: float, lease: float = 900, hosts: int = 3) -> subprocess.Popen[str]:
        path = tmp_path / "program.py"
        path.write_text(SLEEPER)
        addresses = [host.address for host in net][:hosts]
        about = json.dumps([addresses, str(net.key), str(net.known_hosts), seconds, lease])
        process = subprocess.Popen(
            [*USUAL_SIGNALS, sys.executable, str(path), about],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.timeout(400)
def test_a_laptop_that_sleeps_finds_its_call_at_work(
    client: Callable[..., subprocess.Popen[str]], net: Network
) -> None:
    """Row 30: link down and client stopped."""
    program = client(CUT + 5)
    read_until(program, "tick 3")
    net.cut_client()
    os.killpg(program.pid, signal.SIGSTOP)
    time.sleep(CUT)
    os.killpg(program.pid, signal.SIGCONT)
    net.heal_client()
    assert program.stdout is not None
    rest = program.stdout.read()
    assert program.wait(60) == 0
    assert "awake" in rest
    numbers = [int(line.split()[-1]) for line in rest.splitlines() if " tick " in line]
    assert numbers == list(range(4, (CUT + 5) * 5))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("moment", ["open", "tick 3"])
def test_nothing_is_left_of_a_client_that_is_killed(
    client: Callable[..., subprocess.Popen[str]], net: Network, moment: str
) -> None:
    """Row 31: the watchdog ends everything within seconds."""
    program = client(600)
    read_until(program, moment)
    os.kill(program.pid, signal.SIGKILL)
    until(lambda: not [line for host in net for line in ours(host)], 60)
    _nothing_of(net)


@pytest.mark.timeout(400)
def test_the_lease_ends_everything_when_client_and_watchdog_are_gone(
    client: Callable[..., subprocess.Popen[str]], net: Network
) -> None:
    """Row 31: even the client's machine may be gone."""
    program = client(600, lease=6)
    read_until(program, "tick 3")
    net.cut_client()
    os.killpg(program.pid, signal.SIGKILL)
    mark = f"SKYWARD_TEST_RUN={os.environ['SKYWARD_TEST_RUN']}".encode()
    for entry in Path("/proc").iterdir():  # it is in a session of its own; those of other test runs are left alone
        if b"skyward/machines/watchdog.py" in _content(entry / "cmdline") and mark in _content(entry / "environ"):
            os.kill(int(entry.name), signal.SIGKILL)
    until(lambda: not [line for host in net for line in ours(host)], 60)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_client_that_is_asked_to_end_closes_its_pool(
    client: Callable[..., subprocess.Popen[str]], net: Network, number: int
) -> None:
    """Row 35."""
    program = client(600)
    read_until(program, "tick 3")
    os.kill(program.pid, number)
    program.communicate(timeout=120)
    assert program.returncode != 0
    until(lambda: not [line for host in net for line in ours(host)], 60)
    _nothing_of(net)


@pytest.mark.timeout(400)
def test_ctrl_c_twice_hands_over_to_the_watchdog(client: Callable[..., subprocess.Popen[str]], net: Network) -> None:
    """Row 33."""
    program = client(600)
    read_until(program, "tick 3")
    os.kill(program.pid, signal.SIGINT)
    time.sleep(0.3)
    for _ in range(2):
        try:
            os.kill(program.pid, signal.SIGINT)
        except ProcessLookupError:
            break
    program.communicate(timeout=120)
    until(lambda: not [line for host in net for line in ours(host)], 60)


@pytest.mark.timeout(400)
def test_an_agent_that_is_killed_is_started_again(broken: Broken, cache: Path) -> None:
    """Row 5: its calls run again as infrastructure loss; broadcasts work afterwards."""
    pool, listener, net = broken
    future = ticks(3, "agent") > pool
    node = until(lambda: [e.node for e in listener.of(events.CallStarted)])[0]
    net[node].signal(pool._engine.greetings()[node]["pid"], "KILL")
    assert future.result(60)[1] == 1
    assert add(1, 2) @ pool == [3, 3, 3]


@pytest.mark.timeout(400)
def test_a_host_that_dies_loudly_loses_nothing_but_time(broken: Broken, cache: Path) -> None:
    """Rows 13, 14: its call runs elsewhere; `@` is refused until the host is back, and then works again."""
    pool, listener, net = broken
    future = ticks(4, "loud") > pool
    node = until(lambda: [e.node for e in listener.of(events.CallStarted)])[0]
    net[node].kill()
    other, attempt = future.result(60)
    assert (other != node, attempt) == (True, 1)
    assert pool.current_nodes() == 2
    assert f"node {node} is lost" in listener.notices()
    assert pool.map(lambda x: x + 1, range(20)) == list(range(1, 21))
    with pytest.raises(NodeLost) as caught:
        add(1, 2) @ pool
    assert caught.value.node == node
    net[node].restart()
    until(lambda: pool.current_nodes() == 3, 120)
    assert add(1, 2) @ pool == [3, 3, 3]


@pytest.mark.timeout(400)
def test_calls_outlive_a_reboot_of_all_hosts_at_once(broken: Broken, cache: Path) -> None:
    """Row 14: what ran is started again, and what waits is kept, until a host is back."""
    pool, listener, net = broken
    future = ticks(4, "reboot") > pool
    until(lambda: starts(cache, "reboot"))
    for host in net.hosts:
        host.kill()
    until(lambda: all(f"node {node} is lost" in listener.notices() for node in range(3)), 60)
    later = add(1, 2) > pool
    for host in net.hosts:
        host.restart()
    assert future.result(180)[1] == 1
    assert later.result(180) == 3
    until(lambda: pool.current_nodes() == 3, 120)
    assert add(1, 2) @ pool == [3, 3, 3]


@pytest.mark.timeout(400)
def test_a_host_that_falls_silent_is_replaced_and_fenced_when_it_is_back(broken: Broken, cache: Path) -> None:
    """Rows 13, 23: detected while the others answer; what it still ran is killed when it is reached again."""
    pool, listener, net = broken
    future = ticks(30, "silent") > pool
    node = until(lambda: [e.node for e in listener.of(events.CallStarted)])[0]
    began = time.monotonic()
    net[node].cut()
    until(lambda: pool.current_nodes() == 2 and f"node {node} is lost" in listener.notices(), 120)
    assert time.monotonic() - began < 40
    until(lambda: len(starts(cache, "silent")) == 2)
    assert ours(net[node])
    net[node].heal()
    until(lambda: pool.current_nodes() == 3, 120)
    keepers = [line for line in ours(net[node]) if "skyward.node.keeper" in line]
    assert len({line.split()[6] for line in keepers}) == 1  # one pool directory: what it ran before is gone
    assert future.result(60)[1] == 1
    assert len(starts(cache, "silent")) == 2
    numbers = [line for line in listener.lines() if line == "tick 299"]
    assert numbers == ["tick 299"]


@pytest.mark.timeout(400)
def test_a_call_without_retries_is_not_started_twice(broken: Broken, cache: Path) -> None:
    """`retries=0` is at most once."""
    pool, listener, net = broken
    once = sky.compute(ticks.fn, retries=0)
    future = once(30, "once") > pool
    node = until(lambda: [e.node for e in listener.of(events.CallStarted)])[0]
    net[node].kill()
    with pytest.raises(NodeLost):
        future.result(60)
    assert len(starts(cache, "once")) == 1


@pytest.mark.timeout(400)
def test_a_broadcast_that_loses_a_host_fails_as_one_and_names_it(broken: Broken, cache: Path) -> None:
    """Row 15: the others are stopped."""
    pool, listener, net = broken
    errors: list[BaseException] = []

    def run() -> None:
        try:
            ticks(60, "gang") @ pool
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: len(listener.of(events.CallStarted)) == 3)
    net[1].kill()
    thread.join(60)
    assert isinstance(errors[0], NodeLost)
    assert errors[0].node == 1
    assert len(starts(cache, "gang")) == 3
    assert add(1, 2) >> pool == 3


@pytest.mark.timeout(400)
def test_the_pool_goes_on_without_its_head(broken: Broken) -> None:
    """Row 19: the head runs nothing that calls of other nodes need."""
    pool, _, net = broken
    net[0].kill()
    assert pool.map(lambda x: x + 1, range(30)) == list(range(1, 31))
    until(lambda: pool.current_nodes() == 2, 120)
    with pytest.raises(NodeLost):
        add(1, 2) @ pool


@pytest.mark.timeout(400)
def test_hosts_that_lose_each_other_for_a_while_lose_no_call(broken: Broken) -> None:
    """Row 23: the client sees them all."""
    pool, _, net = broken
    net[1].cut_from(net[2])
    assert add(1, 2) @ pool == [3, 3, 3]
    time.sleep(5)
    net[1].heal_from(net[2])
    assert add(1, 2) @ pool == [3, 3, 3]


@pytest.mark.timeout(400)
def test_resets_on_the_link_are_survived(broken: Broken, cache: Path) -> None:
    """Row 28: connections are torn down, not just silent."""
    pool, listener, net = broken
    future = ticks(8, "reset") > pool
    node = until(lambda: [e.node for e in listener.of(events.CallStarted)])[0]
    net[node].reset_client()
    time.sleep(1.5)
    net[node].heal_client()
    assert future.result(60) == (node, 0) or len(starts(cache, "reset")) == 2
    assert add(1, 2) @ pool == [3, 3, 3]


@pytest.mark.timeout(400)
def test_what_finds_no_room_in_memory_goes_by_way_of_the_disk(broken: Broken) -> None:
    """Row 26: the blobs of a node lie in memory first; a container has 64 MB of it."""
    pool, _, net = broken
    large = b"x" * 32_000_000
    for host in net:
        host.run(["mount", "-o", "remount,size=8m", "/dev/shm"], user="root")
    try:
        assert sky.compute(len)(large) @ pool == [len(large)] * 3
        assert len(sky.compute(bytes)(32_000_000) >> pool) == 32_000_000
        assert sky.compute(len)(sky.compute(bytes)(32_000_000).keep() >> pool) @ pool == [32_000_000] * 3
    finally:
        for host in net:
            host.run(["mount", "-o", "remount,size=1g", "/dev/shm"], user="root")
    assert sky.compute(len)(large) @ pool == [len(large)] * 3


def _nothing_of(net: Network) -> None:
    for host in net:
        assert left(host) == []


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
