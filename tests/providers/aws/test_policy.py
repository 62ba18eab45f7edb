"""AWS: the permissions that the documentation lists are all that is used, and all of them are used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward.providers.aws as parts
from skyward.api.spec import Spec
from skyward.machines.reaper import down
from skyward.providers.aws.giveback import KINDS
from tests.support.cloud import Cloud
from tests.support.leases import returned

POLICY = Path(__file__).parents[3] / "docs" / "aws-policy.json"
# Asked for by AWS itself behind our calls, or without need of permission.
IMPLIED = {"ec2:CreateTags", "iam:CreateServiceLinkedRole"}
FREE = {"sts:GetCallerIdentity"}


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    with Cloud() as cloud:
        for name, value in cloud.environ.items():
            monkeypatch.setenv(name, value)
        yield cloud


def allowed() -> set[str]:
    found: set[str] = set()
    for statement in json.loads(POLICY.read_text())["Statement"]:
        actions = statement["Action"]
        found |= {actions} if isinstance(actions, str) else set(actions)
    return found


def written() -> set[str]:
    """Every operation that the source names."""
    text = "\n".join(path.read_text() for path in Path(parts.__path__[0]).glob("*.py"))
    pairs = set(re.findall(r'"(ec2|ssm|sts|pricing)",\s+"([a-z_]+)"', text))
    pairs |= {("ec2", how.describe) for how in KINDS.values()} | {("ec2", how.delete) for how in KINDS.values()}
    return {f"{service}:{''.join(word.title() for word in name.split('_'))}" for service, name in pairs}


def test_the_calls_made_are_a_subset_of_the_policy(cloud: Cloud) -> None:
    aws = cloud.aws()
    cloud.fail("CreateSecurityGroup", mode="lose")
    cloud.fail("ImportKeyPair", mode="lose")
    cloud.fail("RunInstances", mode="lose")
    held = aws.acquire(Spec(accelerator="T4", nodes=2), "p")
    held.refresh(held.machines)
    returned(held, aws)
    aws.acquire(Spec(), "q").let_go()
    down([aws], everything=True, really=True)
    assert cloud.leftovers() == []
    made = {f"{call.service}:{call.action}" for call in cloud.calls}
    assert made - FREE <= allowed()


def test_the_policy_lists_what_the_source_can_call_and_no_more() -> None:
    assert written() - FREE == allowed() - IMPLIED


CHANGES = ("ec2:Delete", "ec2:Terminate", "ec2:Authorize", "ec2:Revoke", "ec2:Deregister")


def statements() -> Iterator[tuple[set[str], set[str], str]]:
    """Actions, resources and the condition of each statement."""
    for statement in json.loads(POLICY.read_text())["Statement"]:
        some = [statement[key] for key in ("Action", "Resource")]
        actions, resources = ({item} if isinstance(item, str) else set(item) for item in some)
        yield actions, resources, json.dumps(statement.get("Condition", {}))


def test_whatever_is_changed_or_ended_must_be_tagged_as_this_users() -> None:
    """SEC-32: what is not Skyward's, or another user's, cannot be ended with these permissions."""
    for actions, _, condition in statements():
        if any(action.startswith(CHANGES) for action in actions):
            assert "aws:ResourceTag/skyward:pool" in condition or "ec2:DeregisterImage" in actions, (
                "images outlive pools"
            )
            assert "aws:ResourceTag/skyward:owner" in condition
            assert "${aws:username}" in condition


def test_whatever_is_created_must_be_tagged_as_this_users() -> None:
    """A group without tags would be one that nobody may delete, or everybody."""
    free: dict[str, set[str]] = {}
    for actions, resources, condition in statements():
        for action in actions:
            if action.startswith(("ec2:Create", "ec2:Import")) and "/skyward:owner" not in condition:
                free.setdefault(action, set()).update(resources)
    assert free == {"ec2:CreateSecurityGroup": {"arn:aws:ec2:*:*:vpc/*"}}, "where it stands, not what is made"
