"""Pools on the test cloud with real machines behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.machines.ledger import histories
from skyward.providers.aws.provider import AWS
from tests.cloud.machines import Hosts, specs
from tests.cloud.spot import Seen
from tests.support.cloud import Cloud
from tests.support.hosts import Network, lacks_python, unavailable
from tests.support.leftovers import watchdogs
from tests.support.programs import USUAL_SIGNALS
from tests.support.waiting import until


@pytest.fixture(scope="module")
def served(hosts_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cloud, Hosts]]:
    """A cloud and its hosts, for a module."""
    if reason := unavailable() or lacks_python():
        pytest.skip(reason)
    with Network(specs(hosts_cache, 48), internet=True, idle=True) as network:
        hosts = Hosts(network, tmp_path_factory.mktemp("machines"))
        with Cloud(hosts) as cloud:
            hosts.end = cloud.end
            yield cloud, hosts
        hosts.close()


@pytest.fixture
def hosts(served: tuple[Cloud, Hosts]) -> Hosts:
    """What stands behind the machines."""
    return served[1]


@pytest.fixture
def cloud(
    served: tuple[Cloud, Hosts], client_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cloud]:
    """A cloud in which nothing has happened yet, and in which nothing may be left when the test is over."""
    cloud, _ = served
    cloud.forget()
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("SKYWARD_CACHE", str(client_cache))
    for name, value in cloud.environ.items():
        monkeypatch.setenv(name, value)
    before = set(watchdogs())  # those of earlier pools may still try to reach a host that a test took away
    yield cloud
    assert (cloud.leftovers(), list(histories())) == ([], [])
    until(lambda: not set(watchdogs()) - before, 120)


@pytest.fixture
def aws(cloud: Cloud) -> Callable[..., AWS]:
    """The provider, with the user that the hosts have."""
    return lambda **settings: cloud.aws(**{"username": "sky", **settings})


@pytest.fixture
def opened(aws: Callable[..., AWS]) -> Callable[..., tuple[sky.ComputePool, Seen]]:
    """Makes a pool of spot machines that is to be entered, and what it tells."""

    def make(nodes: int = 2, **how: Any) -> tuple[sky.ComputePool, Seen]:
        pool = sky.ComputePool(provider=aws(), nodes=nodes, allocation="spot", console=False, **how)
        seen = Seen()
        pool.on_event(seen.append)
        return pool, seen

    return make


CLIENT = """
import sys, time
import skyward as sky
from skyward.providers.aws.api import Pace

@sky.compute
def slow(seconds):
    for i in range(int(seconds * 10)):
        print("tick", i, flush=True)
        time.sleep(0.1)
    return sky.instance_info().node

endpoint, seconds, lease, lives = sys.argv[1], *map(float, sys.argv[2:])
pace = Pace(base=0.01, cap=0.1, budget=20.0, poll=0.1, settle=0.1, unanswered=1.0, boot=1.0)
aws = sky.AWS(endpoint_url=endpoint, ssh_from="192.0.2.1", username="sky", lease=lease, pace=pace)
pool = sky.ComputePool(provider=aws, nodes=2, name="killed", console="plain")
pool.on_event(lambda event: isinstance(event, sky.events.PoolClosing) and print("leaving", flush=True))
try:
    with pool:
        print("open", flush=True)
        print(slow(seconds) >> pool, flush=True)
        print("closing", flush=True)
    print("closed", flush=True)
except KeyboardInterrupt:
    if lives:
        print("alive", flush=True)
        time.sleep(600)
    raise
"""


@pytest.fixture
def client(cloud: Cloud, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a client program that opens a pool of two, and can be killed."""
    begun: list[subprocess.Popen[str]] = []

    def start(seconds: float = 600, lease: float = 900, lives: bool = False) -> subprocess.Popen[str]:
        path = tmp_path / "program.py"
        path.write_text(CLIENT)
        argv = [
            *USUAL_SIGNALS,
            sys.executable,
            "-u",
            str(path),
            cloud.endpoint,
            str(seconds),
            str(lease),
            str(int(lives)),
        ]
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
