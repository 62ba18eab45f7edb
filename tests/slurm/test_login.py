"""A pool from a computer that has no Slurm and that nodes cannot reach: over ssh to the login node, where both meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.api.shell import SshTarget
from skyward.machines import reaper
from tests.support.slurm import Cluster
from tests.support.waiting import read_until, until


@sky.compute
def hostname() -> str:
    return socket.gethostname()


@pytest.fixture
def login(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshTarget]:
    """The login node; this computer has no commands of Slurm meanwhile, and nodes cannot connect to it."""
    monkeypatch.setenv("PATH", os.environ["PATH"].removeprefix(cluster.environ["PATH"].partition(":")[0] + ":"))
    network = cluster.network
    for node in cluster.nodes:
        node.cut_client()
    yield SshTarget(cluster.login.address, "sky", key=str(network.key), known_hosts=str(network.known_hosts))
    for node in cluster.nodes:
        node.heal_client()


def test_calls_run_over_the_relay_and_nothing_is_left_on_the_login_node(cluster: Cluster, login: SshTarget) -> None:
    before = {process.pid for process in cluster.login.processes("sky")}
    with sky.ComputePool(provider=sky.Slurm(login=login), nodes=2, console=False) as pool:
        assert sorted(hostname() @ pool) == ["h1", "h2"]
        (found,) = reaper.pools([sky.Slurm(login=login)])
        assert found.condition == "in use"
    assert cluster.jobs() == []
    until(lambda: {process.pid for process in cluster.login.processes("sky")} <= before, 30, "no relay")


def test_a_killed_client_leaves_nothing_at_the_login_node_either(
    cluster: Cluster, login: SshTarget, environ: dict[str, str]
) -> None:
    settings = {"host": login.host, "user": login.user, "key": login.key, "known_hosts": login.known_hosts}
    program = f"""
import time
import skyward as sky
from skyward.api.shell import SshTarget

with sky.ComputePool(provider=sky.Slurm(login=SshTarget(**{settings!r})), nodes=1, console=False) as pool:
    print("open", flush=True)
    time.sleep(600)
"""
    env = {**environ, "PATH": os.environ["PATH"]}
    client = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True)
    try:
        read_until(client, "open")
    finally:
        client.kill()
        client.communicate()
    until(lambda: not cluster.jobs(), 90, "no job")
    until(lambda: not cluster.login.processes("sky"), 90, "no relay")
    pools = Path(env["SKYWARD_STATE"], "pools")
    until(lambda: not list(pools.iterdir()), 60, "no ledger")
