"""Pools that open without hosts that cannot be had, and take them in when they come; on real hosts."""

from __future__ import annotations

from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.errors import BootstrapError
from tests.ssh.places import TORCH, ours, reached, torch_plugin
from tests.support.hosts import Network
from tests.support.listener import Listener
from tests.support.waiting import until


@sky.compute
def place() -> tuple[int, int, int, int, int]:
    info: Any = sky.instance_info()
    return info.node, info.total_nodes, info.rank, info.world_size, len(info.peers)


@sky.compute
def addresses() -> list[str]:
    info: Any = sky.instance_info()
    return [peer.private_ip for peer in info.peers]


@sky.compute
def total() -> float:
    import torch
    import torch.distributed as dist

    value = torch.ones(1)
    if dist.is_initialized():  # one node alone forms no group
        dist.all_reduce(value)
    return float(value)


@pytest.fixture
def first_is_off(net: Network, whole: Network) -> Network:
    """Three hosts, the first of which does not answer."""
    net[0].kill(silent=True)
    return net


@pytest.mark.timeout(300)
def test_a_pool_opens_without_a_host_that_is_off_and_takes_it_in_when_it_comes(first_is_off: Network) -> None:
    net = first_is_off
    pool = sky.ComputePool(provider=reached(net, ssh_timeout=4), min_nodes=2, console=False)
    listener = Listener(pool)
    with pool:
        assert place() @ pool == [(0, 2, 0, 2, 2), (1, 2, 1, 2, 2)]
        assert (addresses() >> pool) == [net[1].address, net[2].address]
        assert (pool.nodes, pool.current_nodes(), pool.world_size, pool.slots) == (3, 2, 2, 2)
        assert f"opens with 2 of 3 nodes, without {net[0].address}" in listener.notices().replace("sky@", "")
        phases = [(e.node, e.phase) for e in listener.of(events.NodePhase)]
        assert any(node == 2 and phase.startswith("missing: ") and net[0].address in phase for node, phase in phases)
        net[0].restart()
        until(lambda: pool.current_nodes() == 3, 120)
        assert place() @ pool == [(n, 3, n, 3, 3) for n in range(3)]
        assert (addresses() @ pool)[0] == [net[1].address, net[2].address, net[0].address]
        assert pool.world_size == 3
    until(lambda: not any(ours(host) for host in net), 60)


@pytest.mark.timeout(300)
def test_a_pool_goes_on_without_a_host_that_never_comes_and_closes_at_once(first_is_off: Network) -> None:
    net = first_is_off
    with sky.ComputePool(provider=reached(net, ssh_timeout=4), min_nodes=1, console=False) as pool:
        assert [p[:2] for p in place() @ pool] == [(0, 2), (1, 2)]
    assert not any(ours(host) for host in net)


@pytest.mark.timeout(300)
def test_fewer_hosts_than_min_nodes_is_an_error_that_names_all_that_are_missing(net: Network, whole: Network) -> None:
    net[0].kill(silent=True)
    net[2].kill()
    with pytest.raises(BootstrapError) as caught:
        sky.ComputePool(provider=reached(net, ssh_timeout=4), min_nodes=2, console=False).open()
    text = str(caught.value)
    assert "1 of 3 nodes are available, and min_nodes=2 asks for more" in text
    assert [host.address in text for host in net] == [True, False, True]
    until(lambda: not ours(net[1]), 60)


@pytest.mark.timeout(300)
def test_one_host_that_is_there_is_joined_by_others_that_reach_it(net: Network, whole: Network) -> None:
    """Its address is not that of its loopback: a torch group spans those that are there, and later all."""
    net[1].kill(silent=True)
    provider = reached(net, 2, ssh_timeout=4)
    with sky.ComputePool(provider=provider, min_nodes=1, image=TORCH, plugins=[torch_plugin()], console=False) as pool:
        assert total() @ pool == [1.0]
        net[1].restart()
        until(lambda: pool.world_size == 2 and pool.current_nodes() == 2, 150)
        assert total() @ pool == [2.0, 2.0]
