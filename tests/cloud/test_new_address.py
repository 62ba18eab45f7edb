"""A pool whose caller moves to another network: its machines let in one address only, and learn the new one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import errors
from skyward.providers.aws.provider import AWS
from skyward.testing import Call
from tests.cloud.machines import Hosts
from tests.cloud.spot import Seen
from tests.support.cloud import Cloud
from tests.support.hosts.place import SCRIPT
from tests.support.waiting import until


@sky.compute
def slow(seconds: float) -> tuple[int, int]:
    info: Any = sky.instance_info()
    print("working", flush=True)
    time.sleep(seconds)
    return info.node, info.attempt


@pytest.fixture
def echo(hosts: Hosts) -> Iterator[str]:
    """Answers with the address from which it is asked."""
    network = hosts.network
    address = network.ports[2].address
    argv = network.outside.entered([*SCRIPT, str(Path(__file__).with_name("echo.py")), address])
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline()
        yield f"http://{address}"
        server.communicate()


@pytest.fixture
def firewalls(cloud: Cloud, hosts: Hosts) -> None:
    """What security groups say is done: whoever is not let in gets no answer from port 22."""

    def follow(call: Call) -> None:
        if call.action in ("AuthorizeSecurityGroupIngress", "RevokeSecurityGroupIngress", "RunInstances"):
            for one in cloud.running():
                hosts.of[one.id].admit([s for g in one.groups for s in cloud.ssh_sources(one.region, g)])

    cloud.on_done = follow


@pytest.fixture
def moves(hosts: Hosts) -> Iterator[Callable[[int], str]]:
    """Gives this computer another address, until the test is over."""
    yield hosts.network.move_client
    hosts.network.move_client(1)


@pytest.mark.usefixtures("firewalls")
def test_a_call_ends_with_its_result_when_the_caller_moves_to_another_network(
    hosts: Hosts, aws: Callable[..., AWS], echo: str, moves: Callable[[int], str], cloud: Cloud
) -> None:
    """SEC-1: the pool asks for its new address and is let in from there, and from nowhere else."""
    before = hosts.network.address
    seen = Seen()
    with sky.ComputePool(
        provider=aws(ssh_from=None, address_service=echo), nodes=2, replace=False, console=False
    ) as pool:
        pool.on_event(seen.append)
        futures = [slow(6) > pool for _ in range(2)]
        until(lambda: seen.working() == 2, 60)
        after = moves(201)
        assert sorted(future.result(240) for future in futures) == [(0, 0), (1, 0)]
        (group,) = {group for one in cloud.running() for group in one.groups}
        assert sorted(cloud.ssh_sources("us-east-1", group)) == sorted([f"{before}/32", f"{after}/32"])
        assert f"security group {group} now lets in ssh from {after}/32" in seen.texts()
        assert "lost" not in seen.texts()
        assert sorted(slow(0) @ pool) == [(0, 0), (1, 0)]


@pytest.mark.usefixtures("firewalls")
def test_machines_that_do_not_answer_are_told_with_group_address_and_setting(
    aws: Callable[..., AWS], cloud: Cloud
) -> None:
    """As with a VPN by which ssh does not go: another address was let in than the one it comes from."""
    with pytest.raises(errors.HostUnreachable) as caught:
        with sky.ComputePool(provider=aws(ssh_from="192.0.2.7", ssh_timeout=3), console=False):
            pass
    (created,) = [call for call in cloud.calls if call.action == "AuthorizeSecurityGroupIngress"]
    assert created.params["GroupId"] in str(caught.value)
    assert "lets in ssh from 192.0.2.7/32" in str(caught.value)
    assert "sky.AWS(ssh_from=" in str(caught.value)
