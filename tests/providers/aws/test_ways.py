"""AWS: machines that are reached through Session Manager, or through an EC2 Instance Connect endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from skyward.api.spec import Spec
from skyward.errors import InvalidArgument
from skyward.machines.ledger import read
from skyward.providers.aws.machines import proxy_command
from skyward.providers.aws.provider import AWS
from skyward.setup.ssh.connection import options
from skyward.setup.ssh.shell import by_hand
from tests.support.cloud import Cloud


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts stand-ins of AWS's programs on the path, and nothing else."""

    def put(*names: str, version: str = "2.17.0") -> None:
        directory = tmp_path / "bin"
        directory.mkdir(exist_ok=True)
        for name in names:
            (directory / name).write_text(f"#!/bin/sh\necho aws-cli/{version} Python/3.11\n")
            (directory / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(directory))

    return put


@pytest.fixture
def ec2(cloud: Cloud) -> Any:
    return boto3.Session().client("ec2", region_name="us-east-1", endpoint_url=cloud.endpoint)


def private_subnet(ec2: Any) -> tuple[str, str]:
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    made = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/24", AvailabilityZone="us-east-1a")
    return vpc, made["Subnet"]["SubnetId"]


def rules(ec2: Any, pool: str = "p") -> list[dict[str, Any]]:
    (group,) = read(pool).left("security-group")  # type: ignore[union-attr]
    (found,) = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    return [rule for rule in found["IpPermissions"] if rule.get("FromPort") == 22]


def launched(cloud: Cloud) -> dict[str, str]:
    (call,) = [call for call in cloud.calls if call.action == "RunInstances"]
    return dict(call.params)


def test_through_session_manager_no_address_is_let_in_at_all(
    cloud: Cloud, ec2: Any, programs: Callable[..., None]
) -> None:
    """SEC-1: the agent on the machine connects to its own port."""
    programs("aws", "session-manager-plugin")
    _, subnet = private_subnet(ec2)
    aws = cloud.aws(via="ssm", subnet_id=subnet, ssh_from=None, profile=None)
    held = aws.acquire(Spec(), "p")
    assert rules(ec2) == []
    (machine,) = held.machines
    assert machine.ssh is not None
    assert machine.ssh.host == machine.private_ip
    assert machine.ssh.proxy == (
        f"aws ssm start-session --target {machine.id} --document-name AWS-StartSSHSession "
        "--parameters portNumber=22 --region us-east-1"
    )
    assert launched(cloud)["NetworkInterface.1.AssociatePublicIpAddress"] == "false"
    assert held.refresh(held.machines)[0].ssh == machine.ssh
    assert "AmazonSSMManagedInstanceCore" in held.readmit().allowed


def test_through_an_endpoint_only_the_endpoint_is_let_in(cloud: Cloud, ec2: Any, programs: Callable[..., None]) -> None:
    """SEC-1."""
    programs("aws")
    vpc, subnet = private_subnet(ec2)
    cloud.connect_endpoint("vpc-other", "sg-other")
    (group,) = ec2.describe_security_groups(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["SecurityGroups"]
    cloud.connect_endpoint(vpc, group["GroupId"])
    held = cloud.aws(via="eice", subnet_id=subnet, ssh_from=None).acquire(Spec(), "p")
    (rule,) = rules(ec2)
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [group["GroupId"]]
    assert rule["IpRanges"] == []
    target = held.machines[0].ssh
    assert target is not None
    assert target.proxy is not None
    assert f"open-tunnel --instance-id {held.machines[0].id} --remote-port 22" in target.proxy


def test_in_a_public_subnet_machines_keep_their_way_out(cloud: Cloud, programs: Callable[..., None]) -> None:
    """Without NAT a public address is the only one, for the agent of SSM as well."""
    programs("aws", "session-manager-plugin")
    cloud.aws(via="ssm", ssh_from=None).acquire(Spec(), "p")
    assert launched(cloud)["NetworkInterface.1.AssociatePublicIpAddress"] == "true"


def test_a_vpc_without_an_endpoint_is_told_before_anything_is_created(
    cloud: Cloud, programs: Callable[..., None]
) -> None:
    programs("aws")
    with pytest.raises(InvalidArgument, match="aws ec2 create-instance-connect-endpoint"):
        cloud.aws(via="eice").acquire(Spec(), "p")
    assert cloud.leftovers() == []


@pytest.mark.parametrize(
    ("via", "there", "version", "words"),
    [
        ("ssm", (), "2.1", "`aws`, which is not on the PATH"),
        ("ssm", ("aws",), "2.1", "`session-manager-plugin`"),
        ("eice", (), "2.1", "`aws`, which is not on the PATH"),
        ("eice", ("aws",), "1.32.4", "version 2 of the program `aws`; this is 1.32.4"),
    ],
)
def test_a_missing_program_is_told_before_anything_is_asked_of_aws(
    cloud: Cloud, programs: Callable[..., None], via: str, there: tuple[str, ...], version: str, words: str
) -> None:
    programs(*there, version=version)
    with pytest.raises(InvalidArgument, match=words):
        cloud.aws(via=via).acquire(Spec(), "p")
    assert cloud.calls == []


def test_a_way_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="Session Manager"):
        AWS(region="us-east-1", via="bastion")  # type: ignore[arg-type]


def test_a_private_subnet_without_a_way_is_told_with_the_ways(cloud: Cloud, ec2: Any) -> None:
    _, subnet = private_subnet(ec2)
    with pytest.raises(InvalidArgument, match=r"use_private_ip=True.*via=\"eice\".*\"ssm\""):
        cloud.aws(subnet_id=subnet).acquire(Spec(), "p")


def test_the_command_is_one_that_ssh_takes_as_it_is() -> None:
    """ssh reads % as the beginning of a token, and the profile may have any name."""
    command = proxy_command("ssm", "eu-west-1", "my 100% team", "i-1")
    assert command.endswith("--region eu-west-1 --profile 'my 100%% team'")


def test_the_way_is_part_of_what_a_user_can_try_by_hand(cloud: Cloud, programs: Callable[..., None]) -> None:
    programs("aws", "session-manager-plugin")
    target = cloud.aws(via="ssm", ssh_from=None).acquire(Spec(), "p").machines[0].ssh
    assert target is not None
    assert f"ProxyCommand={target.proxy}" in options(target, 10)
    assert "ProxyCommand=aws ssm" in by_hand(target)
    assert os.environ["PATH"]
