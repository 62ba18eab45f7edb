"""What Ray and its machines do to a pool: each thing is killed once, and nothing of the pool is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import NodeLost
from tests.support.hosts import Host
from tests.support.leftovers import watchdogs
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import read_until, until

# A client that says where its nodes are, then sleeps in their bodies until it is told to close the pool.
CLIENT = """
import sys, time
import skyward as sky

@sky.compute
def where():
    import socket
    return socket.gethostname()

@sky.compute
def nap():
    import subprocess, time
    subprocess.Popen(["setsid", "sleep", "3600"])  # Ray would leave it
    time.sleep(3600)

with sky.ComputePool(provider=sky.Ray(*sys.argv[1:2]), nodes=2, console=False) as pool:
    print("open", where() @ pool, flush=True)
    calls = [nap() > pool for _ in range(2)]
    sys.stdin.readline()
    pool.close()  # the calls never end
print("closed", flush=True)
"""


@sky.compute
def where() -> str:
    import socket

    return socket.gethostname()


@sky.compute
def linger(seconds: float) -> str:
    """Waits for a notice; what it says of the time that is left."""

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if notice := sky.preempted():
            return f"{notice.seconds_left:.0f}"
        time.sleep(0.05)
    return ""


@pytest.fixture
def pool(provider: sky.Ray) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=provider, nodes=2, console=False, provision_timeout=120) as opened:
        yield opened


@pytest.fixture
def whole(cluster: RayCluster) -> Iterator[RayCluster]:
    """The cluster, for a test that breaks a node: afterwards it has all of them again."""
    yield cluster
    known = cluster.nodes()
    for host in cluster.network:
        if host.address not in known:
            cluster.restart(host)


def processes(host: Host, word: str) -> list[int]:
    return [process.pid for process in host.processes() if word in " ".join(process.argv)]


def host_of(cluster: RayCluster, name: str) -> Host:
    return next(host for host in cluster.network if host.name == name)


def replaced(pool: sky.ComputePool, seconds: float = 90.0) -> list[str]:
    """Where the nodes are, once all of them answer again."""

    def answer() -> list[str] | None:
        try:
            return list(where() @ pool)
        except NodeLost:
            return None

    return until(answer, seconds)


def test_a_killed_actor_is_followed_by_another_machine_of_the_pool(cluster: RayCluster, pool: sky.ComputePool) -> None:
    """As when the kernel runs out of memory: Ray's own process dies, and with it the place."""
    first = list(where() @ pool)
    host = host_of(cluster, first[1])
    (actor,) = processes(host, "ray::Joiner")
    joiners = set(processes(host, "/proc/self/fd/"))  # and the small process that cleans up after one
    assert joiners
    host.signal(actor)
    until(lambda: not joiners & set(processes(host, "/proc/self/fd/")))
    assert len(set(replaced(pool))) == 2


def test_a_machine_that_ray_loses_is_replaced_by_another(whole: RayCluster, pool: sky.ComputePool) -> None:
    first = list(where() @ pool)
    lost = next(name for name in first if name != "h0")
    host = host_of(whole, lost)
    (raylet,) = processes(host, "raylet/raylet")
    host.signal(raylet)
    until(lambda: not processes(host, "/proc/self/fd/") and not processes(host, "skyward.node."))
    again = replaced(pool)
    assert lost not in again
    assert len(set(again)) == 2


def test_bodies_hear_when_ray_takes_a_machine_away(whole: RayCluster, pool: sky.ComputePool) -> None:
    first = list(where() @ pool)
    lost = next(name for name in first if name != "h0")
    calls = [linger(60) > pool for _ in range(2)]
    node = whole.nodes()[host_of(whole, lost).address]["NodeID"]
    drain = [
        *("ray.scripts.scripts", "drain-node", f"--node-id={node}", f"--address={whole.head.address}:6379"),
        *("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=40"),
    ]
    whole.head.run([whole.python, "-m", *drain])
    until(lambda: any(call.done() for call in calls))
    (told,) = [call.result() for call in calls if call.done()]
    assert 5 < float(told) <= 40
    for call in calls:
        call.cancel()
    until(lambda: lost not in replaced(pool))


@pytest.mark.parametrize("by", ["job", "driver"])
def test_a_pool_whose_job_is_stopped_says_so_and_leaves_nothing(
    cluster: RayCluster, provider: sky.Ray, by: str
) -> None:
    with sky.ComputePool(provider=provider, nodes=2, console=False, replace=False) as pool:
        call = linger(120) > pool
        (job,) = [job for job in cluster.get("/api/jobs/") if job["status"] == "RUNNING"]
        if by == "job":
            stop = ["ray.scripts.scripts", "job", "stop", "--address", cluster.url, job["submission_id"]]
            cluster.head.run([cluster.python, "-m", *stop])
        else:
            cluster.head.signal(processes(cluster.head, "driver.py order.json")[0])
        with pytest.raises(NodeLost):
            call.result(timeout=90)
        until(lambda: not any(processes(host, "/proc/self/fd/") for host in cluster.network))


def test_a_job_ends_by_itself_when_client_and_watchdog_are_killed(cluster: RayCluster) -> None:
    env = {**os.environ, "RAY_AUTH_TOKEN": cluster.token or ""}
    argv = [sys.executable, "-c", CLIENT, cluster.url]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as client:
        read_until(client, "open")
        (watchdog,) = [pid for pid in watchdogs() if _parent(pid) == client.pid]
        os.kill(watchdog, signal.SIGKILL)
        client.send_signal(signal.SIGKILL)
        until(lambda: not cluster.left(), 120, cluster.left)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it has just ended


def test_a_killed_client_leaves_no_job_and_no_process(cluster: RayCluster, tmp_path: Path) -> None:
    env = {**os.environ, "RAY_AUTH_TOKEN": cluster.token or ""}
    argv = [sys.executable, "-c", CLIENT, cluster.url]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as client:
        read_until(client, "open")
        assert cluster.left()
        listed = subprocess.run(
            [sys.executable, "-m", "skyward", "ps"], env=env, capture_output=True, text=True, check=True
        ).stdout
        assert re.search(r"^\S+ +open +Ray ", listed, re.M)
        client.send_signal(signal.SIGKILL)
        until(lambda: not cluster.left(), 60, cluster.left)
    until(lambda: not list((tmp_path / "state" / "pools").glob("[!.]*")), 60, "the ledger to go")
