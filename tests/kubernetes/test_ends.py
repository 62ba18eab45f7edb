"""Whatever becomes of client, pods or Job: nothing is left, and calls go on where they can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import NodeLost, SkywardError
from tests.kubernetes.conftest import USER
from tests.support.kubernetes.cluster import Cluster
from tests.support.leftovers import watchdogs
from tests.support.programs import USUAL_SIGNALS
from tests.support.waiting import read_until, until

PROGRAM = """
import time
import skyward as sky

@sky.compute
def nap():
    print("napping", flush=True)
    time.sleep(600)

provider = sky.Kubernetes(template={user}, lease=20)
pool = sky.ComputePool(provider=provider, nodes=2, console=False)
pool.on_event(lambda event: print(type(event).__name__, getattr(event, "phase", ""), flush=True))
with pool:
    nap() @ pool
"""

Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Start]:
    """Starts a client; it is killed at the end."""
    made: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        argv = [*USUAL_SIGNALS, sys.executable, "-c", PROGRAM.format(user=USER)]
        made.append(subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield start
    for program in made:
        program.kill()
        program.communicate()


def ledgers(environ: dict[str, str]) -> list[str]:
    pools = Path(environ["SKYWARD_STATE"], "pools")
    return sorted(path.name for path in pools.iterdir()) if pools.exists() else []


@sky.compute
def pod_name() -> str:
    return os.environ["HOSTNAME"]


@sky.compute
def slow(marker: int) -> str:
    time.sleep(3)
    return os.environ["HOSTNAME"]


@sky.compute(retries=3)
def patient() -> float:
    """How many seconds are left once the pod is about to be taken away."""
    began = time.monotonic()
    while time.monotonic() - began < 60:
        if (notice := sky.preempted()) is not None:
            return notice.seconds_left
        time.sleep(0.1)
    return -1.0


@pytest.mark.parametrize("moment", ["asking Kubernetes for pods", "CallStarted"])
def test_a_killed_client_leaves_neither_job_nor_ledger(
    cluster: Cluster, environ: dict[str, str], start: Start, moment: str
) -> None:
    program = start()
    read_until(program, moment)
    program.kill()
    until(lambda: not cluster.items("jobs"), 120, "no Job")
    until(lambda: not ledgers(environ), 120, "no ledger")


def test_pods_end_by_themselves_when_client_and_watchdog_are_gone(
    cluster: Cluster, environ: dict[str, str], start: Start
) -> None:
    program = start()
    read_until(program, "CallStarted")
    os.kill(program.pid, signal.SIGSTOP)  # no new watchdog while the old ones die
    for pid in watchdogs():
        os.kill(pid, signal.SIGKILL)
    program.kill()
    until(lambda: cluster.items("jobs")[0]["status"].get("succeeded") == 2, 120, "the pods end when the lease is over")
    (left,) = ledgers(environ)
    argv = [sys.executable, "-m", "skyward", "down", left, "--yes"]
    said = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    assert ledgers(environ) == []


def test_ctrl_c_ends_the_job_in_order(cluster: Cluster, start: Start) -> None:
    program = start()
    read_until(program, "CallStarted")
    program.send_signal(signal.SIGINT)
    assert program.wait(90) != 0
    assert cluster.items("jobs") == []


def test_an_evicted_pod_is_replaced_by_one_with_the_same_number(cluster: Cluster, provider: sky.Kubernetes) -> None:
    with sky.ComputePool(provider=provider, nodes=2, console=False) as pool:
        before = pod_name() @ pool
        evict(cluster, before[1])
        until(lambda: _names(pool) not in ([], before), 120, "another pod")
        after = pod_name() @ pool
        assert after[0] == before[0]
        assert after[1].rpartition("-")[0] == before[1].rpartition("-")[0]
        assert after[1] != before[1]


def _names(pool: sky.ComputePool) -> list[str]:
    try:
        return pod_name() @ pool
    except NodeLost:
        return []


def test_a_drained_node_gives_its_pod_to_another_one(cluster: Cluster, provider: sky.Kubernetes) -> None:
    with sky.ComputePool(provider=provider, nodes=2, console=False) as pool:
        before = pod_name() @ pool
        (node,) = (p["spec"]["nodeName"] for p in cluster.items("pods") if p["metadata"]["name"] == before[0])
        try:
            cluster.kubectl("drain", node, "--delete-emptydir-data", "--force", "--timeout=90s")
            until(lambda: _names(pool) not in ([], before), 120, "another pod")
            after = pod_name() @ pool
            where = {p["metadata"]["name"]: p["spec"]["nodeName"] for p in cluster.items("pods")}
            assert where[after[0]] != node
        finally:
            cluster.kubectl("uncordon", node)


def test_a_pod_that_is_taken_away_gives_its_bodies_notice(cluster: Cluster, provider: sky.Kubernetes) -> None:
    with sky.ComputePool(provider=provider, nodes=1, console=False) as pool:
        (name,) = pod_name() @ pool
        waiting = patient() > pool
        time.sleep(2)
        evict(cluster, name)
        assert waiting.result(120) != -1.0


def test_a_job_that_somebody_deletes_ends_the_pool(cluster: Cluster, provider: sky.Kubernetes) -> None:
    with sky.ComputePool(provider=provider, nodes=1, console=False) as pool:
        assert len(pod_name() @ pool) == 1
        (job,) = cluster.items("jobs")
        cluster.kubectl("delete", "job", job["metadata"]["name"], "--wait=false")
        until(lambda: "somebody has deleted it" in _error(pool), 120, lambda: _error(pool))
        assert not cluster.items("jobs"), "nobody has made another one"


def _error(pool: sky.ComputePool) -> str:
    try:
        return f"no error, on {pod_name() @ pool}"
    except SkywardError as exc:
        return str(exc)


def test_a_pool_outlives_an_api_server_that_is_away_for_more_than_a_minute(cluster: Cluster) -> None:
    with sky.ComputePool(provider=sky.Kubernetes(template=USER), nodes=2, console=False) as pool:
        before = pod_name() @ pool
        call = slow(1) > pool
        cluster.stop_server()
        time.sleep(65)
        cluster.start_server()
        assert call.result(180) in before
        assert pod_name() @ pool == before


@sky.compute
def reversed_bytes(data: bytes) -> bytes:
    return data[::-1]


def test_a_pool_outlives_the_end_of_every_kubectl_also_in_the_middle_of_a_transfer(
    cluster: Cluster, provider: sky.Kubernetes
) -> None:
    with sky.ComputePool(provider=provider, nodes=2, console=False) as pool:
        before = pod_name() @ pool
        call, data = slow(1) > pool, os.urandom(40 << 20)
        transfer = reversed_bytes(data) > pool
        for _ in range(3):
            for process in _children("kubectl"):
                os.kill(process, signal.SIGKILL)
            time.sleep(0.3)
        assert call.result(120) in before
        assert transfer.result(120) == data[::-1]
        assert pod_name() @ pool == before


def _children(program: str) -> list[int]:
    import psutil

    mine = psutil.Process().children(recursive=True)
    return [child.pid for child in mine if child.name() == program]


def evict(cluster: Cluster, pod: str) -> None:
    """What draining a node does with its pods."""
    body = f'{{"apiVersion":"policy/v1","kind":"Eviction","metadata":{{"name":"{pod}","namespace":"default"}}}}'
    cluster.kubectl("create", "--raw", f"/api/v1/namespaces/default/pods/{pod}/eviction", "-f", "-", data=body)
