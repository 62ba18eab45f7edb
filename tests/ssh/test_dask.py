"""A pool stays a dask cluster of all its nodes while hosts go and come back."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

import skyward as sky
from tests.ssh.places import reached
from tests.support.hosts import Network
from tests.support.waiting import until

DASK = sky.Image(pip=["distributed"])


@pytest.fixture
def broken(net: Network, whole: Network) -> Iterator[tuple[sky.ComputePool, Network]]:
    """A pool of its own on hosts that may break."""
    with sky.ComputePool(provider=reached(net), image=DASK, console=False) as pool:
        yield pool, net


def test_without_distributed_there_the_error_says_what_to_install(net: Network) -> None:
    with sky.ComputePool(provider=reached(net, 1), console=False) as pool:
        with pytest.raises(sky.SkywardError, match=r'Image\(pip=\["distributed"\]\)'):
            pool.dask()


@pytest.mark.timeout(400)
def test_every_node_is_in_the_cluster_of_a_head_that_came_back(broken: tuple[sky.ComputePool, Network]) -> None:
    """Row 19: the scheduler has another address; also the nodes that were not set up again join it."""
    pool, net = broken
    with pool.dask() as client:
        assert set(client.run(socket.gethostname).values()) == {"h0", "h1", "h2"}
    for lost in (0, 2):  # the second time a worker of the same name may still be known
        net[lost].kill()
        until(lambda: pool.current_nodes() == 2, 120)
        net[lost].restart()
        until(lambda: pool.current_nodes() == 3, 120)
        with pool.dask() as client:
            assert set(client.run(socket.gethostname).values()) == {"h0", "h1", "h2"}
            names = {str(worker["name"]) for worker in client.scheduler_info(n_workers=-1)["workers"].values()}
            assert names == {"node-0", "node-1", "node-2"}
