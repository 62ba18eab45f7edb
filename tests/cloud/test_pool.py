"""A pool on a cloud does what a pool does, and gives back what it took."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import errors, events
from skyward.providers._aws.giveback import Receipt
from skyward.providers._aws.keys import replace_host_key
from skyward.providers.aws import AWS
from skyward.spec import Spec
from skyward.ssh import SshShell
from skyward.testing import Cloud
from tests.cloud.machines import Hosts
from tests.cloud.waiting import until


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@sky.compute
def slow(seconds: float) -> tuple[int, int]:
    info: Any = sky.instance_info()
    time.sleep(seconds)
    return info.node, info.attempt


@sky.compute
def greet() -> str:
    print("hello from a cloud")
    return socket.gethostname()


def test_a_pool_opens_runs_calls_and_gives_everything_back(cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS]) -> None:
    """Row 41 and on: judged from the cloud's own records, and told by the receipt."""
    seen: list[events.Event] = []
    pool = sky.ComputePool(provider=aws(), nodes=2, name="train", console=False)
    pool.on_event(seen.append)
    with pool:
        assert add(1, 2) >> pool == 3
        assert greet() @ pool == [hosts.of[instance.id].name for instance in cloud.running()]
        assert len(cloud.running()) == 2
        listed = subprocess.run(
            [sys.executable, "-m", "skyward", "ps"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        assert listed.count("running") == 2
        assert "in use" in listed
    output = [event.text for event in seen if isinstance(event, events.Output)]
    assert output == ["hello from a cloud"] * 2
    receipt = pool.receipt
    assert isinstance(receipt, Receipt)
    assert receipt.pool.startswith("train-")
    assert len(receipt.machines) == 2
    assert set(receipt.gone) == set(receipt.created) > {bill.id for bill in receipt.machines}
    assert receipt.total > 0
    assert any("confirmed gone" in event.text for event in seen if isinstance(event, events.Notice))
    assert not any(hosts.of[id].alive for id in cloud.machines.all)
    assert hosts.switched_off == []


def test_a_pool_may_be_used_for_longer_than_its_lease(cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS]) -> None:
    """SEC-31: whoever hears of the client renews; machines that nobody renews are gone after 6 s."""
    with sky.ComputePool(provider=aws(lease=6), nodes=2, console=False) as pool:
        opened = time.monotonic()
        while time.monotonic() - opened < 9:
            assert add(1, 2) @ pool == [3, 3]
            time.sleep(0.5)
    assert not set(hosts.switched_off) & set(cloud.machines.all)


def test_a_machine_that_dies_loses_nothing_but_time(cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS]) -> None:
    """Rows 13, 43: its call runs elsewhere; giving back finds it gone."""
    with sky.ComputePool(provider=aws(ssh_timeout=5), nodes=2, console=False) as pool:
        started: list[int] = []
        pool.on_event(lambda e: started.append(e.node) if isinstance(e, events.CallStarted) else None)
        future = slow(3) > pool
        node = until(lambda: [*started])[0]
        dead = cloud.running()[node].id
        cloud.end(dead, "Server.InstanceTerminated")
        assert future.result(60) == (1 - node, 1)
        assert add(1, 2) >> pool == 3
    assert isinstance(pool.receipt, Receipt)
    assert dead in pool.receipt.gone
    assert len(pool.receipt.machines) == 2


def test_no_room_in_the_first_zone_leads_to_the_next(cloud: Cloud, aws: Callable[..., AWS]) -> None:
    """Row 44."""
    cloud.room(0, zone="us-east-1a")
    with sky.ComputePool(provider=aws(), nodes=2, console=False) as pool:
        assert add(1, 2) @ pool == [3, 3]
        assert {instance.zone for instance in cloud.running()} == {"us-east-1b"}


def test_a_login_that_expires_while_a_pool_is_open_is_told_with_what_is_left(
    cloud: Cloud, aws: Callable[..., AWS]
) -> None:
    """Row 57: calls go on, giving back fails in words; after logging in again, `sky down` finishes it."""
    pool = sky.ComputePool(provider=aws(), nodes=2, console=False)
    with pytest.raises(errors.NotGivenBack, match="login has expired") as caught:
        with pool:
            cloud.expired = True
            assert add(1, 2) @ pool == [3, 3]
    assert {instance.id for instance in cloud.running()} <= set(caught.value.ids)
    assert caught.value.hourly_cost > 0
    assert pool.receipt is None
    cloud.expired = False
    argv = [sys.executable, "-m", "skyward", "down", caught.value.pool, "--yes"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cloud.leftovers() == []


def test_what_cannot_be_had_is_told_before_anything_is_created(cloud: Cloud, aws: Callable[..., AWS]) -> None:
    """Rows 41, 44: too dear, unknown, no login."""
    with pytest.raises(errors.NoOffer, match=r"max_hourly_cost|an hour"):
        with sky.ComputePool(provider=aws(), nodes=2, max_hourly_cost=0.0001, console=False):
            pass
    with pytest.raises(errors.InvalidArgument, match="no image ami-12345"):
        with sky.ComputePool(provider=aws(ami="ami-12345"), nodes=2, console=False):
            pass
    cloud.expired = True
    with pytest.raises(errors.CredentialsExpired, match="Log in again"):
        with sky.ComputePool(provider=aws(), nodes=2, console=False):
            pass
    made = {"RunInstances", "CreateSecurityGroup", "ImportKeyPair", "CreatePlacementGroup"}
    assert not made & {call.action for call in cloud.calls}


def test_a_limit_on_the_price_that_can_be_met_is_kept(cloud: Cloud, aws: Callable[..., AWS]) -> None:
    with sky.ComputePool(provider=aws(), max_hourly_cost=0.05, console=False) as pool:
        assert add(1, 2) >> pool == 3
    assert isinstance(pool.receipt, Receipt)
    assert sum(bill.hourly_cost for bill in pool.receipt.machines) <= 0.05


def test_machines_that_cannot_be_set_up_are_given_back(cloud: Cloud, aws: Callable[..., AWS]) -> None:
    """Row 48: the error is the one of setting up."""
    image = sky.Image(pip=["no-such-package-anywhere-1a2b3c"])
    with pytest.raises(errors.BootstrapError, match="no-such-package"):
        with sky.ComputePool(provider=aws(), nodes=2, image=image, console=False):
            pass
    assert any(call.action == "RunInstances" for call in cloud.calls)
    assert cloud.leftovers() == []


def test_the_plan_says_what_would_be_launched_and_creates_nothing(cloud: Cloud, aws: Callable[..., AWS]) -> None:
    plan = sky.plan(provider=aws(), nodes=2, accelerator="T4")
    assert plan.offers[0].kind == "g4dn.xlarge"
    assert "g4dn.xlarge" in str(plan)
    assert "an hour" in str(sky.ComputePool(provider=aws(), nodes=2).plan())
    assert not any(call.action.startswith(("Run", "Create", "Import")) for call in cloud.calls)
    assert sky.plan(nodes=2)[0].hourly_cost == 0, "this computer is free"


def test_the_host_key_of_the_user_data_is_replaced_over_the_first_connection(
    cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS]
) -> None:
    """SEC-5: whoever has read the user data cannot pass for the machine any more."""
    provider = aws(username="root")
    held = provider.acquire(Spec(), "keys")
    target = held.machines[0].ssh
    assert target is not None
    assert target.known_hosts is not None
    known = Path(target.known_hosts)
    first = known.read_text()
    shell = SshShell(target)
    try:
        shell.connect(time.monotonic() + 20)
        assert replace_host_key(shell, target)
        assert shell.run(["true"]).code == 0, "the connection that was open stays"
    finally:
        shell.close()
    pinned = known.read_text()
    assert pinned != first
    assert pinned.count("\n") == 1

    def shown() -> str:
        return hosts.of[held.machines[0].id].run(["ssh-keyscan", "-t", "ed25519", "127.0.0.1"], user="root").stdout

    until(lambda: pinned.split()[2] in shown())
    again = SshShell(target)
    try:
        again.connect(time.monotonic() + 20)
    finally:
        again.close()
    known.write_text(first)
    impostor = SshShell(target)
    try:
        with pytest.raises(errors.HostKeyMismatch):
            impostor.connect(time.monotonic() + 20)
    finally:
        impostor.close()
    provider.release(held.pool)


def test_a_user_who_may_not_become_root_leaves_the_host_key_as_it_is(cloud: Cloud, aws: Callable[..., AWS]) -> None:
    provider = aws()
    held = provider.acquire(Spec(), "keys")
    target = held.machines[0].ssh
    assert target is not None
    assert target.known_hosts is not None
    before = Path(target.known_hosts).read_text()
    shell = SshShell(target)
    try:
        shell.connect(time.monotonic() + 20)
        assert not replace_host_key(shell, target)
    finally:
        shell.close()
    assert Path(target.known_hosts).read_text() == before
    provider.release(held.pool)
