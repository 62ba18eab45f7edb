"""A pool on a dask cluster whose workers are on three hosts, with TLS among them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import NodeLost
from tests.ssh.places import left, ours
from tests.support.dask_cluster import DaskCluster
from tests.support.programs import USUAL_SIGNALS
from tests.support.waiting import read_until, until


def of_ours(cluster: DaskCluster) -> list[str]:
    """What runs on the hosts because of pools: joiners, keepers, and what those have started."""
    joiners = [f"{row.pid} joiner" for host in cluster.hosts for row in host.processes("sky") if "--place" in row.argv]
    return joiners + [line for host in cluster.hosts for line in ours(host)]


@pytest.fixture(autouse=True)
def _nothing_is_left(on_hosts: DaskCluster) -> Iterator[None]:
    yield
    until(lambda: not of_ours(on_hosts), 60, lambda: of_ours(on_hosts))
    files = [line for host in on_hosts.hosts for line in left(host)]
    assert [line for line in files if not line.startswith("sem.")] == [], "semaphores are dask's own"
    on_hosts.until_workers(4)


@sky.compute
def where() -> tuple[str, int]:
    import socket

    return socket.gethostname(), sky.instance_info().node


@sky.compute
def variables() -> dict[str, str]:
    return dict(os.environ)


def test_each_machine_with_workers_is_a_node_and_shares_nothing_with_dask(on_hosts: DaskCluster) -> None:
    provider = sky.Dask(on_hosts.address, security=on_hosts.security)
    with sky.ComputePool(provider=provider, nodes=3, console=False) as pool:
        assert sorted(host for host, _ in where() @ pool) == ["h0", "h1", "h2"]
        found = variables() >> pool
        assert not [name for name in found if name.startswith("DASK_")]
        assert "/run/dask-packages" not in found.get("PYTHONPATH", "")
        assert found.get("MALLOC_TRIM_THRESHOLD_") is None, "a nanny sets it, for dask's tasks"
        text = " ".join(word for host in on_hosts.hosts for row in host.processes() for word in row.argv)
        assert "secret" not in text
        with on_hosts.client() as client:
            assert sum(client.gather(client.map(abs, range(4), pure=False))) == 6, "dask goes on beside it"


def hosts_of(pool: sky.ComputePool) -> list[str]:
    """The hosts of all nodes; none while one is being replaced."""
    try:
        return [host for host, _ in where() @ pool]
    except NodeLost:
        return []


def test_a_worker_that_is_killed_takes_its_node_along_which_comes_back_with_the_next_worker(
    on_hosts: DaskCluster,
) -> None:
    host = on_hosts.hosts[1]
    with on_hosts.client() as client, sky.ComputePool(provider=sky.Dask(client), nodes=3, console=False) as pool:
        assert sorted(hosts_of(pool)) == ["h0", "h1", "h2"]
        joiners = {row.pid for row in host.processes("sky") if "--place" in row.argv}
        assert joiners
        on_hosts.kill_workers(host)  # its nanny starts another
        until(lambda: not {row.pid for row in host.processes("sky")} & joiners, 30)
        until(lambda: sorted(hosts_of(pool)) == ["h0", "h1", "h2"], 120)


def test_a_node_is_replaced_on_another_machine_that_has_workers(on_hosts: DaskCluster) -> None:
    with on_hosts.client() as client, sky.ComputePool(provider=sky.Dask(client), nodes=2, console=False) as pool:
        names = hosts_of(pool)
        (spare,) = {"h0", "h1", "h2"} - set(names)
        victim = next(host for host in on_hosts.hosts if host.name in names and host.name != "h0")
        try:
            on_hosts.end_workers(victim)
            until(lambda: spare in hosts_of(pool), 120)
        finally:
            for _ in range(2 if victim.name == "h2" else 1):
                on_hosts.add_worker(on_hosts.hosts.index(victim))


def test_a_node_that_is_not_replaced_is_lost_and_says_whose_worker_it_was(on_hosts: DaskCluster) -> None:
    provider = sky.Dask(on_hosts.address, security=on_hosts.security)
    with sky.ComputePool(provider=provider, nodes=3, console=False, replace=False) as pool:
        assert len(where() @ pool) == 3
        try:
            on_hosts.end_workers(on_hosts.hosts[1])
            with pytest.raises(NodeLost, match=r"the dask worker tls://10\."):
                until(lambda: not where() @ pool, 60)
        finally:
            on_hosts.add_worker(1)


def test_joblib_uses_the_cores_of_two_hosts(on_hosts: DaskCluster) -> None:
    from joblib import Parallel, delayed

    provider = sky.Dask(on_hosts.address, security=on_hosts.security)
    with sky.ComputePool(provider=provider, nodes=2, plugins=[sky.plugins.joblib()], console=False):
        found = Parallel(n_jobs=-1)(delayed(node_and_square)(number) for number in range(20))
    assert [square for _, square in found] == [number**2 for number in range(20)]
    assert {node for node, _ in found} == {0, 1}


def node_and_square(number: int) -> tuple[int, int]:
    import time

    time.sleep(0.05)
    return sky.instance_info().node, number**2


_PROGRAM = """
import sys, time
import skyward as sky
from distributed.security import Security

@sky.compute
def sleep() -> None:
    import time
    time.sleep(600)

address, ca, cert, key = sys.argv[1:]
security = Security(tls_ca_file=ca, tls_client_cert=cert, tls_client_key=key, require_encryption=True)
with sky.ComputePool(provider=sky.Dask(address, security=security), nodes=3, console=False) as pool:
    pending = [sleep() > pool for _ in range(3)]
    print("calls run", flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_on_the_hosts_when_the_client_is_killed(on_hosts: DaskCluster, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("tls_ca_file", "tls_client_cert", "tls_client_key")]
    for file in files:
        file.write_text(getattr(on_hosts.security, file.name))
    arguments = [on_hosts.address, *map(str, files)]
    program = subprocess.Popen(
        [*USUAL_SIGNALS, sys.executable, "-c", textwrap.dedent(_PROGRAM), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        read_until(program, "calls run")
        assert of_ours(on_hosts)
        os.kill(program.pid, signal.SIGKILL)
        until(lambda: not of_ours(on_hosts), 20, lambda: of_ours(on_hosts))
    finally:
        program.kill()
        program.communicate()
