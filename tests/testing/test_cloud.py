"""The test cloud itself (tests/support/cloud): that it refuses, delays, loses and remembers as AWS would."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError

from skyward.api.spec import Spec
from tests.support.cloud import Cloud, Instance
from tests.support.leases import returned


class Hosts:
    """What stands behind machines, here only a list."""

    def __init__(self) -> None:
        self.up: list[Instance] = []
        self.down: list[Instance] = []

    def machine_started(self, instance: Instance) -> None:
        self.up.append(instance)

    def machine_terminated(self, instance: Instance) -> None:
        self.down.append(instance)


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
def cloud(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    with Cloud(hosts) as cloud:
        for name, value in cloud.environ.items():
            monkeypatch.setenv(name, value)
        yield cloud


@pytest.fixture
def ec2(cloud: Cloud) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(retries={"total_max_attempts": 1})
    return boto3.Session().client("ec2", region_name="us-east-1", endpoint_url=cloud.endpoint, config=config)


def test_what_is_not_tagged_is_not_created(cloud: Cloud, ec2: Any) -> None:
    """SEC-30."""
    for operation, params in (
        ("create_security_group", {"GroupName": "g", "Description": "d"}),
        ("import_key_pair", {"KeyName": "k", "PublicKeyMaterial": b"ssh-ed25519 AAAA"}),
        ("create_placement_group", {"GroupName": "g", "Strategy": "cluster"}),
        ("run_instances", {"ImageId": "ami-1", "MinCount": 1, "MaxCount": 1}),
    ):
        with pytest.raises(ClientError, match="UntaggedResource"):
            getattr(ec2, operation)(**params)
    assert cloud.leftovers() == []


def test_hosts_stand_behind_machines(cloud: Cloud, hosts: Hosts) -> None:
    held = cloud.aws().acquire(Spec(accelerator="T4", nodes=2), "p")
    assert {instance.id for instance in hosts.up} == {machine.id for machine in held.machines}
    instance = hosts.up[0]
    assert instance.private_ip == held.machines[0].private_ip
    assert instance.user_data.startswith("#cloud-config")
    assert instance.public_key.startswith("ssh-ed25519 ")
    assert instance.tags["skyward:pool"] == held.pool
    cloud.end(instance.id)
    returned(held, cloud.aws())
    assert sorted(i.id for i in hosts.down) == sorted(i.id for i in hosts.up)


def test_states_follow_each_other_in_time(cloud: Cloud, ec2: Any) -> None:
    cloud.times.boot, cloud.times.shutdown = 0.3, 0.3
    held = cloud.aws().acquire(Spec(), "p")
    (machine,) = held.machines
    assert machine.state == "running"

    def state() -> str:
        (reservation,) = ec2.describe_instances(InstanceIds=[machine.id])["Reservations"]
        return str(reservation["Instances"][0]["State"]["Name"])

    assert state() == "running"
    cloud.end(machine.id)
    assert state() == "shutting-down"
    found = ec2.describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["running", "pending"]}])
    assert found["Reservations"] == []
    while state() != "terminated":
        pass
    reason = ec2.describe_instances()["Reservations"][0]["Instances"][0]["StateReason"]["Code"]
    assert reason == "Server.SpotInstanceTermination"
    returned(held, cloud.aws())


def test_a_machine_that_is_not_shown_yet_cannot_be_ended(cloud: Cloud, ec2: Any) -> None:
    """Row 47."""
    held = cloud.aws().acquire(Spec(), "p")
    (machine,) = held.machines
    cloud.machines.all[machine.id].visible_at += 3600
    assert ec2.describe_instances()["Reservations"] == []
    for call in (ec2.terminate_instances, ec2.describe_instances):
        with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
            call(InstanceIds=[machine.id])
    cloud.machines.all[machine.id].visible_at = 0
    returned(held, cloud.aws())


def test_a_lost_answer_is_a_cut_line_after_the_deed(cloud: Cloud, ec2: Any) -> None:
    held = cloud.aws().acquire(Spec(), "p")
    cloud.fail("TerminateInstances", mode="lose")
    with pytest.raises(ConnectionClosedError):
        ec2.terminate_instances(InstanceIds=[held.machines[0].id])
    assert cloud.running() == []
    assert cloud.calls[-1].outcome == "lost"
    returned(held, cloud.aws())


def test_groups_in_use_cannot_be_deleted(cloud: Cloud, ec2: Any) -> None:
    held = cloud.aws().acquire(Spec(accelerator="T4", nodes=2), "p")
    group = cloud.machines.all[held.machines[0].id].groups[0]
    with pytest.raises(ClientError, match="DependencyViolation"):
        ec2.delete_security_group(GroupId=group)
    with pytest.raises(ClientError, match="InUse"):
        ec2.delete_placement_group(GroupName=f"skyward-{held.pool}")
    returned(held, cloud.aws())


def test_a_token_brings_the_same_machines_and_other_parameters_are_refused(cloud: Cloud) -> None:
    """Row 43."""
    from tests.support.cloud.wire import Request

    held = cloud.aws().acquire(Spec(), "p")
    call = next(call for call in cloud.calls if call.action == "RunInstances")
    again = cloud._ec2.answer(Request("ec2", "RunInstances", "us-east-1", dict(call.params)))
    assert held.machines[0].id in again.body.decode()
    assert len(cloud.machines.all) == 1
    changed = {**call.params, "InstanceType": "m5.large"}
    refused = cloud._ec2.answer(Request("ec2", "RunInstances", "us-east-1", changed))
    assert refused.code == "IdempotentParameterMismatch"
    returned(held, cloud.aws())


def test_calls_are_recorded_with_their_parameters(cloud: Cloud) -> None:
    held = cloud.aws().acquire(Spec(), "p")
    run = next(call for call in cloud.calls if call.action == "RunInstances")
    assert run.params["InstanceType"] == held.machines[0].kind
    assert (run.service, run.region, run.outcome) == ("ec2", "us-east-1", "ok")
    times = [call.time for call in cloud.calls]
    assert times == sorted(times)
    assert [call.number for call in cloud.calls] == list(range(len(cloud.calls)))
    returned(held, cloud.aws())
    cloud.forget()
    assert cloud.calls == []


def test_the_test_that_the_guide_shows_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    text = (Path(__file__).parents[2] / "docs" / "guides" / "aws.md").read_text()
    (shown,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "def test_" in block]
    names: dict[str, Any] = {}
    exec(shown, names)
    with patch.dict(os.environ):
        names["test_that_my_program_stays_within_its_budget"]()
