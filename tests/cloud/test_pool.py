"""A pool on a cloud does what a pool does, and gives back what it took."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import errors, events
from skyward.api.shell import Finished, SshTarget
from skyward.api.spec import Spec
from skyward.machines.cloud import CloudReceipt, replace_host_key
from skyward.machines.ledger import histories, state_dir
from skyward.providers.aws.provider import AWS
from skyward.setup.ssh.shell import SshShell
from tests.cloud.machines import Hosts
from tests.support.cloud import Cloud
from tests.support.leases import returned
from tests.support.leftovers import watchdogs
from tests.support.waiting import read_until, until


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
    """S1-10, row 41 and on: judged from the cloud's own records, and told by the receipt."""
    seen: list[events.Event] = []
    pool = sky.ComputePool(provider=aws(), nodes=2, name="train", console=False)
    pool.on_event(seen.append)
    with pool:
        assert add(1, 2) >> pool == 3
        assert greet() @ pool == [hosts.of[instance.id].name for instance in cloud.running()]
        assert len(cloud.running()) == 2
        listed = subprocess.run(
            [sys.executable, "-m", "skyward", "ps", "--json"], capture_output=True, text=True, check=True, timeout=240
        ).stdout
        (row,) = [row for row in map(json.loads, listed.splitlines()) if "train" in row["pool"]]
        assert (row["pool"], row["state"], row["up"], row["done"], row["failed"]) == ("train", "open", 2, 3, 0)
        assert row["machines"].startswith("train-"), "one row, with what the ledger and the tags know"
        assert sum("running" in text for text in row["left"]) == 2
        assert row["cost"] > 0
        command = [sys.executable, "-m", "skyward", "ssh", pool.name, "1", "--", "hostname"]
        named = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert named.stdout.strip() == hosts.of[cloud.running()[1].id].name, named.stderr
    output = [event.text for event in seen if isinstance(event, events.Output)]
    assert output == ["hello from a cloud"] * 2
    receipt = pool.receipt
    assert isinstance(receipt, CloudReceipt)
    assert receipt.pool.startswith("train-")
    assert len(receipt.machines) == 2
    assert set(receipt.gone) == set(receipt.created) > {bill.id for bill in receipt.machines}
    assert receipt.total > 0
    assert any("confirmed gone" in event.text for event in seen if isinstance(event, events.Notice))
    assert not any(hosts.of[id].alive for id in cloud.machines.all)
    assert hosts.switched_off == []


def test_a_pool_outlives_its_lease_idle_and_in_use(cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS]) -> None:
    """SEC-31: renewed for as long as the client is there, also when nothing runs."""
    lease = 8.0
    with sky.ComputePool(provider=aws(lease=lease), nodes=2, console=False) as pool:
        assert add(1, 2) @ pool == [3, 3]
        machines = {instance.id for instance in cloud.running()}
        time.sleep(1.3 * lease)  # in which nothing is asked of anybody
        opened = time.monotonic()
        while time.monotonic() - opened < 1.3 * lease:
            assert add(1, 2) @ pool == [3, 3]
            time.sleep(0.5)
        assert {instance.id for instance in cloud.running()} == machines
    assert not set(hosts.switched_off) & machines


def test_a_machine_that_dies_loses_nothing_but_time(cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS]) -> None:
    """Rows 13, 43: its call runs elsewhere; giving back finds it gone."""
    with sky.ComputePool(provider=aws(ssh_timeout=5), nodes=2, replace=False, console=False) as pool:
        started: list[int] = []
        pool.on_event(lambda e: started.append(e.node) if isinstance(e, events.CallStarted) else None)
        future = slow(3) > pool
        node = until(lambda: [*started])[0]
        dead = cloud.running()[node].id
        cloud.end(dead, "Server.InstanceTerminated")
        assert future.result(60) == (1 - node, 1)
        assert add(1, 2) >> pool == 3
    assert isinstance(pool.receipt, CloudReceipt)
    assert dead in pool.receipt.gone
    assert len(pool.receipt.machines) == 2


def test_no_room_in_the_first_zone_leads_to_the_next(cloud: Cloud, aws: Callable[..., AWS]) -> None:
    """Row 44."""
    cloud.room(0, zone="us-east-1a")
    with sky.ComputePool(provider=aws(), nodes=2, console=False) as pool:
        assert add(1, 2) @ pool == [3, 3]
        assert {instance.zone for instance in cloud.running()} == {"us-east-1b"}


def test_a_region_without_room_leads_to_the_next_spec(cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS]) -> None:
    """Row 44: of the first nothing is left, and the receipt is that of the second."""
    cloud.room(0, zone="us-east-1*")
    near, far = Spec(provider=aws(), nodes=2), Spec(provider=aws(), region="eu-west-1")
    seen: list[events.Event] = []
    pool = sky.ComputePool(near, far, selection="first", console=False)
    assert "2 nodes, spot-if-available, from AWS in us-east-1" in str(pool.plan().first)
    pool.on_event(seen.append)
    with pool:
        assert (pool.spec, pool.nodes) == (far, 1)
        assert add(1, 2) @ pool == [3]
        assert [instance.region for instance in cloud.running()] == ["eu-west-1"]
    assert isinstance(pool.receipt, CloudReceipt)
    assert (pool.receipt.region, len(pool.receipt.machines)) == ("eu-west-1", 1)
    (notice,) = [event for event in seen if isinstance(event, events.Notice) and event.level == "warning"]
    assert "InsufficientInstanceCapacity" in notice.text


def test_where_no_spec_can_be_had_the_reasons_of_all_are_told(cloud: Cloud, aws: Callable[..., AWS]) -> None:
    """Rows 44, 46, 56: no room here, a quota of 0 there, no login for the third."""
    cloud.room(0, zone="us-east-1*")
    cloud.fail("RunInstances", "VcpuLimitExceeded", times=-1, where=lambda call: call.region == "eu-west-1")
    here, there = Spec(provider=aws()), Spec(provider=aws(), region="eu-west-1", accelerator="T4")
    nobody = Spec(provider=aws(profile="nobody"))
    with pytest.raises(errors.NoneAvailable) as caught:
        with sky.ComputePool(here, there, nobody, console=False):
            pass
    text = str(caught.value)
    assert "1. 1 node, spot-if-available, from AWS in us-east-1: there is no capacity" in text
    assert "2. 1 node with 1 x T4 (16GB each), spot-if-available, from AWS in eu-west-1: the quota 'All G" in text
    assert "3. 1 node, spot-if-available, from AWS in us-east-1: no AWS login that works" in text
    with pytest.raises(errors.InvalidArgument, match="no such region"):  # a mistake, whatever the other specs say
        with sky.ComputePool(here, Spec(provider=aws(), region="us-east-9"), console=False):
            pass


TWO_SPECS = """
import sys, time
import skyward as sky
from skyward.providers.aws.api import Pace

pace = Pace(base=0.01, cap=0.1, budget=20.0, poll=0.1, settle=0.1, unanswered=1.0, boot=1.0)
aws = sky.AWS(endpoint_url=sys.argv[1], ssh_from="192.0.2.1", username="sky", pace=pace)
near, far = sky.Spec(provider=aws), sky.Spec(provider=aws, region="eu-west-1")
with sky.ComputePool(near, far, selection="first", console="plain") as pool:
    print("open", flush=True)
    time.sleep(600)
"""


def test_the_machines_of_every_spec_that_is_tried_are_watched(cloud: Cloud, tmp_path: Path) -> None:
    """Row 31: the client is killed when the second spec was taken."""
    cloud.room(0, zone="us-east-1*")
    path = tmp_path / "program.py"
    path.write_text(TWO_SPECS)
    argv = [sys.executable, "-u", str(path), cloud.endpoint]
    program = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        read_until(program, "open\n")
        assert len(cloud.running()) == 1
    finally:
        program.kill()
        program.communicate()
    until(lambda: not cloud.leftovers() and not list(histories()), 120)


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
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
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
    seen: list[events.Event] = []
    pool = sky.ComputePool(provider=aws(), max_hourly_cost=0.05, console=False)
    pool.on_event(seen.append)
    with pool:
        assert add(1, 2) >> pool == 3
    assert isinstance(pool.receipt, CloudReceipt)
    assert sum(bill.hourly_cost for bill in pool.receipt.machines) <= 0.05
    costs = [event.hourly for event in seen if isinstance(event, events.PoolCost)]
    assert costs == [pytest.approx(sum(bill.hourly_cost for bill in pool.receipt.machines))]


def test_machines_that_cannot_be_set_up_are_given_back(cloud: Cloud, aws: Callable[..., AWS]) -> None:
    """Row 48: the error is the one of setting up."""
    image = sky.Image(pip=["no-such-package-anywhere-1a2b3c"])
    with pytest.raises(errors.BootstrapError, match="no-such-package"):
        with sky.ComputePool(provider=aws(), nodes=2, image=image, console=False):
            pass
    assert any(call.action == "RunInstances" for call in cloud.calls)
    assert cloud.leftovers() == []


def test_a_machine_that_refuses_the_user_of_its_image_is_told_with_the_setting(
    cloud: Cloud, aws: Callable[..., AWS]
) -> None:
    """Debian's user, on a host that has none of this name."""
    provider = aws(ami="ami-0000000000000de12", username=None, ssh_timeout=10)
    with pytest.raises(errors.AuthenticationFailed, match=r"no user 'admin'(.|\n)*sky\.AWS\(username=\.\.\.\)"):
        with sky.ComputePool(provider=provider, nodes=1, console=False):
            pass


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
    seen: list[events.Event] = []
    pool = sky.ComputePool(provider=aws(), console=False)
    pool.on_event(seen.append)
    with pool:
        (instance,) = cloud.running()
        (known,) = state_dir().glob("pools/*/known_hosts")
        given = known.with_name("host_ed25519.pub").read_text().strip()
        shown = hosts.of[instance.id].run(["ssh-keyscan", "-t", "ed25519", "127.0.0.1"], user="root").stdout
        pinned = known.read_text()
        assert pinned.count("\n") == 1
        assert pinned.split()[2] == shown.split()[2] != given.split()[1]
        assert add(1, 2) >> pool == 3, "what was connected stays so"
        target = SshTarget(instance.private_ip, "sky", key=str(known.with_name("id_ed25519")), known_hosts=str(known))
        again = SshShell(target)
        again.connect(time.monotonic() + 20)
        again.close()
        known.write_text(f"{instance.private_ip} {given}\n")
        impostor = SshShell(target)
        with pytest.raises(errors.HostKeyMismatch):
            impostor.connect(time.monotonic() + 20)
    assert not [event for event in seen if isinstance(event, events.Notice) and "host key" in event.text]


def test_where_the_user_may_not_become_root_the_host_key_stays_and_the_pool_opens(
    cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-5: said once for all machines, with what to do about it."""
    monkeypatch.setattr(hosts, "sudo", False)
    seen: list[events.Event] = []
    pool = sky.ComputePool(provider=aws(), nodes=2, console=False)
    pool.on_event(seen.append)
    with pool:
        (known,) = state_dir().glob("pools/*/known_hosts")
        given = known.with_name("host_ed25519.pub").read_text().strip()
        assert known.read_text().count(given) == known.read_text().count("\n") == 2
        assert add(1, 2) @ pool == [3, 3]
    (notice,) = [event for event in seen if isinstance(event, events.Notice) and "host key" in event.text]
    assert "sudo without a password: sky.AWS(username=...)" in notice.text


def test_replacing_a_host_key_may_be_cut_anywhere(cloud: Cloud, aws: Callable[..., AWS]) -> None:
    """SEC-5: whichever of the two keys the machine shows, it is let in; the next time it is finished."""
    provider = aws()
    held = provider.acquire(Spec(), "keys")
    target = held.machines[0].ssh
    assert target is not None
    assert target.known_hosts is not None
    known = Path(target.known_hosts)

    class Cut(SshShell):
        """Loses its machine after so many programs, the last of which did its work."""

        left = 1

        def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
            done = super().run(argv, data, timeout)
            self.left -= 1
            if self.left == 0:
                raise errors.HostUnreachable("ssh", "cut by the test")
            return done

    for programs, keys in ((1, 1), (2, 2), (3, 1)):
        shell = Cut(target)
        shell.left = programs
        try:
            shell.connect(time.monotonic() + 20)
            if programs < 3:
                with pytest.raises(errors.HostUnreachable):
                    replace_host_key(shell, target)
            else:
                assert replace_host_key(shell, target) is None
                before = known.read_text()
                assert replace_host_key(shell, target) is None
                assert known.read_text() == before, "done once is enough"
            assert known.read_text().count("\n") == keys
        finally:
            shell.close()
        again = SshShell(target)
        again.connect(time.monotonic() + 20)
        again.close()
    returned(held, provider)


def test_opening_a_pool_mentions_what_earlier_ones_have_left(cloud: Cloud, aws: Callable[..., AWS]) -> None:
    """SEC-32: once, with the command that ends it; none of the calls is made for each node."""
    held = aws().acquire(Spec(), "old")
    held.let_go()  # as if its process had died
    before = len(cloud.calls)
    seen: list[events.Event] = []
    pool = sky.ComputePool(provider=aws(), nodes=2, console=False)
    pool.on_event(seen.append)
    with pool:
        assert add(1, 2) @ pool == [3, 3]
    told = [event.text for event in seen if isinstance(event, events.Notice) and "left something behind" in event.text]
    assert len(told) == 1
    assert f"{held.pool} (abandoned, us-east-1, $0." in told[0]
    command = told[0].partition("End it with: sky ")[2].split()
    assert command == ["down", held.pool, "--yes"]
    assert sum(call.action == "GetCallerIdentity" for call in cloud.calls[before:]) <= 3
    subprocess.run([sys.executable, "-m", "skyward", *command], check=True, timeout=240, stdout=subprocess.DEVNULL)


def test_a_machine_that_falls_silent_holds_up_no_closing(cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS]) -> None:
    """Rows 13, 31: its provider ends it; nobody tries to reach it, then or later."""
    seen: list[events.Event] = []
    pool = sky.ComputePool(provider=aws(), nodes=2, grace=1, console=False)
    pool.on_event(seen.append)
    with pool:
        assert add(1, 2) @ pool == [3, 3]
        hosts.of[cloud.running()[1].id].cut()
    assert not any("could not be reached" in event.text for event in seen if isinstance(event, events.Notice))
    assert watchdogs() == []
    assert isinstance(pool.receipt, CloudReceipt)
    assert len(pool.receipt.machines) == 2


def test_the_first_check_of_an_account_launches_uses_and_gives_back_one_machine(cloud: Cloud, hosts: Hosts) -> None:
    """examples/aws_check.py as a person with an account runs it; its other rows are in test_check.py."""
    assert cloud.prices is not None
    cloud.prices["t3.small"] = 0.0208
    program = Path(__file__).parents[2] / "examples" / "aws_check.py"
    argv = [sys.executable, str(program), "--ssh-from", "192.0.2.1", "--username", "sky"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    told = done.stdout
    assert done.returncode == 0, told + done.stderr
    for row in ("pool: open after", "call: answered in", "lease: renewed", "permissions to change and to end: every"):
        assert f"[  ok   ] {row}" in told
    assert "all confirmed gone" in told
    assert "--- no problems ---" in told
    assert [instance.kind for instance in cloud.machines.all.values()] == ["t3.small"]
    dry = {call.action for call in cloud.calls if call.params.get("DryRun") == "true"}
    assert {"TerminateInstances", "DeleteSecurityGroup", "DeleteKeyPair", "DeleteVolume"} <= dry
