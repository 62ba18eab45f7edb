"""examples/aws_check.py: what it says of an account in which something is missing. No machine is launched here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.cloud import Cloud

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("aws_check", ROOT / "examples" / "aws_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["aws_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def checked(example: Any, cloud: Cloud, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    cloud.prices = {**(cloud.prices or {}), "t3.small": 0.0208}
    status = example.main(["--no-machine", "--ssh-from", "192.0.2.1", *arguments])
    return status, capsys.readouterr().out


def test_an_account_that_has_all_is_told_so_and_nothing_is_created(
    example: Any, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = checked(example, cloud, capsys)
    assert status == 0, told
    assert "no problems" in told
    assert "t3.small on-demand, $0.0" in told
    assert cloud.leftovers() == []
    asked = {call.action for call in cloud.calls if call.params.get("DryRun") == "true"}
    assert asked == {*example.LOOKS, *example.CREATES}


def test_every_action_of_the_policy_is_asked_for(example: Any) -> None:
    """The two must not drift apart; these three EC2 does not answer as dry runs of their own."""
    found: set[str] = set()
    for statement in json.loads((ROOT / "docs" / "aws-policy.json").read_text())["Statement"]:
        actions = statement["Action"]
        found |= {actions} if isinstance(actions, str) else set(actions)
    asked = {f"ec2:{action}" for action in (*example.LOOKS, *example.CREATES, *example.CHANGES, *example.WARM)}
    others = {"ssm:GetParameter", "pricing:GetProducts"}
    assert found - {"ec2:CreateTags", "iam:CreateServiceLinkedRole"} == asked | others


@pytest.mark.parametrize("action", ["RunInstances", "ImportKeyPair", "CreateSecurityGroup", "DescribeVolumes"])
def test_an_action_that_is_not_allowed_is_named(
    example: Any, cloud: Cloud, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    cloud.fail(action, "UnauthorizedOperation", times=-1, where=lambda call: call.params.get("DryRun") == "true")
    status, told = checked(example, cloud, capsys)
    assert status == 1
    assert f"[problem] permission ec2:{action}: not allowed for this login" in told
    assert "1 problem ---" in told


def test_a_quota_of_nothing_is_said_in_words(example: Any, cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.quotas |= {"L-1216C47A": 0.0, "L-DB2E81BA": 0.0}
    status, told = checked(example, cloud, capsys)
    assert status == 1
    assert "[problem] quota L-1216C47A, vCPUs of ordinary machines, on-demand: 0: no machine can be launched" in told
    assert "[ none  ] quota L-DB2E81BA, vCPUs of G machines (GPUs), on-demand: 0: ask for more" in told


def test_quotas_that_may_not_be_asked_for_are_no_problem(
    example: Any, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.fail("GetServiceQuota", "AccessDeniedException", times=-1)
    status, told = checked(example, cloud, capsys)
    assert status == 0
    assert "[unknown] quotas: servicequotas:GetServiceQuota is not answered" in told


def test_an_account_without_a_default_network_is_told_what_to_do(
    example: Any, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    ec2: Any = boto3.client("ec2", region_name="us-east-1", endpoint_url=cloud.endpoint)
    for subnet in ec2.describe_subnets()["Subnets"]:
        ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    status, told = checked(example, cloud, capsys)
    assert status == 1
    assert "[problem] network: there is no default VPC in us-east-1" in told
    assert "create-default-vpc" in told


def test_a_login_that_is_not_accepted_ends_the_report_early(
    example: Any, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.expired = True
    status, told = checked(example, cloud, capsys)
    assert status == 1
    assert "[problem] credentials: no login that AWS accepts" in told


def test_a_report_has_no_account_key_name_or_address_in_it(
    example: Any, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """SEC-9: what AWS answers to a call that it refuses names who asked."""
    text = (
        "You are not authorized: arn:aws:iam::123456789012:user/ada is not allowed, key AKIATESTTESTTESTTEST in "
        "123456789012 from 203.0.113.7. Encoded authorization failure message: abcDEF123"
    )
    cloud.fail("DescribeVolumes", "OtherError", times=-1, message=text)
    _, told = checked(example, cloud, capsys)
    assert "DescribeVolumes" in told
    for secret in ("123456789012", "ada", "AKIA", "203.0.113.7", "abcDEF123"):
        assert secret not in told
    assert "...9012" in told
