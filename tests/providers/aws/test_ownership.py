"""AWS: nothing is ended that is not proven ours, whatever tags it carries (SEC-32; tags can be written by others)."""

from __future__ import annotations

from typing import Any

import boto3
import pytest

from skyward.api.provider import Lease
from skyward.api.spec import Spec
from skyward.cli import main
from skyward.errors import CloudRefused
from skyward.machines.ledger import Ledger, pool_dir, remove
from skyward.machines.reaper import down, mentioned, pools
from tests.support.cloud import Cloud
from tests.support.leases import returned

ONE = Spec(nodes=1, ttl=3600)
THEIRS = "arn:aws:iam::123456789012:user/eve"


def client(cloud: Cloud) -> Any:
    return boto3.client("ec2", region_name="us-east-1", endpoint_url=cloud.endpoint)


def me(cloud: Cloud) -> str:
    return str(boto3.client("sts", region_name="us-east-1", endpoint_url=cloud.endpoint).get_caller_identity()["Arn"])


def forge(cloud: Cloud, victim: Lease, **tags: str) -> str:
    """Somebody writes our tags on everything of a stranger's pool; returns the stranger's machine."""
    ec2, mine = client(cloud), [{"Name": "tag:skyward:pool", "Values": [victim.pool]}]
    ids = [machine.id for machine in victim.machines]
    ids += [item["VolumeId"] for item in ec2.describe_volumes(Filters=mine)["Volumes"]]
    ids += [item["GroupId"] for item in ec2.describe_security_groups(Filters=mine)["SecurityGroups"]]
    ids += [item["KeyPairId"] for item in ec2.describe_key_pairs(Filters=mine)["KeyPairs"]]
    ec2.create_tags(Resources=ids, Tags=[{"Key": f"skyward:{key}", "Value": value} for key, value in tags.items()])
    return victim.machines[0].id


@pytest.fixture
def stranger(cloud: Cloud) -> Lease:
    """Machines of somebody else, whose ledger is on another computer."""
    held = cloud.aws(owner=THEIRS).acquire(ONE, "victim-0a1b2c")
    lose_ledger(held)
    return held


def lose_ledger(held: Lease) -> None:
    held.let_go()
    remove(held.pool)


def abandon(held: Lease) -> None:
    held.let_go()


def what(cloud: Cloud) -> set[str]:
    return set(cloud.leftovers())


@pytest.mark.parametrize("also_owner", [False, True])
def test_closing_a_pool_leaves_strange_things_that_carry_its_tag(
    cloud: Cloud, stranger: Lease, also_owner: bool
) -> None:
    """SEC-32."""
    theirs = what(cloud)
    held = cloud.aws().acquire(ONE, "mine")
    owner = {"owner": me(cloud)} if also_owner else {}
    victim = forge(cloud, stranger, pool=held.pool, **owner)
    receipt = returned(held, cloud.aws())
    assert what(cloud) == theirs
    assert [instance.id for instance in cloud.running()] == [victim]
    assert {bill.id for bill in receipt.machines} == {machine.id for machine in held.machines}
    assert victim not in receipt.created
    told = "\n".join(receipt.remarks)
    assert victim in told
    assert "not ours" in told
    assert "aws ec2 delete-tags" in told, "says what to do about it"
    assert victim in str(receipt)
    assert not pool_dir(held.pool).exists()


@pytest.mark.parametrize("how", ["named", "all", "expired"])
def test_sky_down_leaves_strange_things_that_carry_all_our_tags(
    cloud: Cloud, stranger: Lease, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """SEC-32."""
    theirs = what(cloud)
    victim = forge(cloud, stranger, pool="gone-aaaaaa", owner=me(cloud), **{"expires-at": "2020-01-01T00:00:00Z"})
    arguments = {"named": ["gone-aaaaaa"], "all": ["--all"], "expired": ["--expired"]}[how]
    capsys.readouterr()
    assert main(["down", *arguments, "--yes"]) == 1
    told = capsys.readouterr().out
    assert what(cloud) == theirs
    assert victim in told
    assert "not ours" in told
    assert "ended" not in told


def test_a_killed_pool_is_ended_without_what_only_carries_its_tag(cloud: Cloud, stranger: Lease) -> None:
    """SEC-32: as the watchdog does it, and `sky down` on this computer."""
    theirs = what(cloud)
    held = cloud.aws().acquire(ONE, "mine")
    abandon(held)
    victim = forge(cloud, stranger, pool=held.pool, owner=me(cloud))
    assert main(["down", held.pool, "--yes", "--if-there"]) == 0
    assert what(cloud) == theirs
    assert [instance.id for instance in cloud.running()] == [victim]


def test_a_pool_of_another_computer_is_known_by_the_name_of_its_key(cloud: Cloud, stranger: Lease) -> None:
    theirs = what(cloud)
    held = cloud.aws().acquire(ONE, "mine")
    lose_ledger(held)
    forge(cloud, stranger, pool=held.pool, owner=me(cloud))
    (outcome,) = down([cloud.aws()], [held.pool], really=True)
    assert outcome.did == "ended"
    assert what(cloud) == theirs


def test_another_users_pool_is_not_ended_by_its_name(cloud: Cloud, stranger: Lease) -> None:
    """SEC-32."""
    theirs = what(cloud)
    receipt = returned(stranger, cloud.aws())
    assert what(cloud) == theirs
    assert receipt.machines == ()


def test_a_ledger_that_names_a_strange_machine_does_not_end_it(cloud: Cloud, stranger: Lease) -> None:
    """SEC-32."""
    theirs = what(cloud)
    ledger = Ledger.start("lies", {"provider": "AWS", "region": "us-east-1", "endpoint_url": cloud.endpoint})
    call = ledger.intent("instance", region="us-east-1", token="made-up")
    ledger.answer(call, "instance", stranger.machines[0].id, region="us-east-1")
    ledger.let_go()
    cloud.aws().give_back("lies")
    assert what(cloud) == theirs


def test_a_machine_of_ours_that_lost_its_tags_is_known_by_its_launch(cloud: Cloud) -> None:
    """Whoever removes tags does not make us pay on: the token of the launch cannot be changed."""
    held = cloud.aws().acquire(ONE, "mine")
    names = [{"Key": "skyward:pool"}, {"Key": "skyward:owner"}]
    client(cloud).delete_tags(Resources=[held.machines[0].id], Tags=names)
    returned(held, cloud.aws())
    assert cloud.running() == []


def test_a_forged_placement_group_stays(cloud: Cloud) -> None:
    """SEC-32."""
    held = cloud.aws().acquire(ONE, "mine")
    terms = {"pool": held.pool, "owner": me(cloud), "expires-at": "2020-01-01T00:00:00Z", "version": "1"}
    tags = [{"Key": f"skyward:{key}", "Value": value} for key, value in terms.items()]
    client(cloud).create_placement_group(
        GroupName="theirs", Strategy="cluster", TagSpecifications=[{"ResourceType": "placement-group", "Tags": tags}]
    )
    receipt = returned(held, cloud.aws())
    assert cloud.leftovers() == ["theirs"]
    assert "placement-group theirs" in "\n".join(receipt.remarks)


def test_sky_ps_lists_strange_things_apart_with_what_to_do(
    cloud: Cloud, stranger: Lease, capsys: pytest.CaptureFixture[str]
) -> None:
    held = cloud.aws().acquire(ONE, "mine")
    victim = forge(cloud, stranger, pool=held.pool)
    capsys.readouterr()
    assert main(["ps"]) == 0
    told = capsys.readouterr().out
    (found,) = pools([cloud.aws()])
    assert victim not in [item.id for item in found.leftovers]
    assert victim in [item.id for item in found.foreign]
    assert found.hourly_cost == pytest.approx(held.hourly_cost), "what is not ours costs us nothing"
    assert "not ours" in told
    assert victim in told
    assert "delete-tags" in told


@pytest.mark.parametrize(
    "name", ["x; touch pwned #", "$(touch pwned)", "`id`", "a b", "../../etc", "x\u009b2Jy\u202e", "-rf"]
)
def test_names_from_tags_cannot_become_commands(
    cloud: Cloud, stranger: Lease, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """SEC-32."""
    theirs = what(cloud)
    forge(cloud, stranger, pool=name, owner=me(cloud), **{"expires-at": "2020-01-01T00:00:00Z"})
    capsys.readouterr()
    assert main(["ps"]) == 0
    told = capsys.readouterr().out
    assert told.isascii()
    for line in told.splitlines():
        assert "sky down" not in line, "no such name is in a command to copy"
    assert mentioned(pools([cloud.aws()])) is None
    assert main(["down", "--all", "--expired", "--yes"]) == 1
    told = capsys.readouterr().out
    assert told.isascii()
    assert what(cloud) == theirs


def test_a_price_in_a_tag_cannot_be_a_lie_that_breaks_sums(cloud: Cloud) -> None:
    for price in ("nan", "inf", "-5", "x"):
        held = cloud.aws().acquire(ONE, "mine")
        lose_ledger(held)
        forged = {"skyward:hourly-cost": price, "skyward:hourly-parts": f"machine={price} disk={price}"}
        tags = [{"Key": key, "Value": value} for key, value in forged.items()]
        client(cloud).create_tags(Resources=[held.machines[0].id], Tags=tags)
        (found,) = pools([cloud.aws()])
        assert 0 <= found.hourly_cost < 1
        returned(held, cloud.aws())


def test_a_group_of_the_same_name_that_others_made_is_not_taken(cloud: Cloud) -> None:
    """SEC-32: an answer is lost, and the group that carries our tag is somebody's, open to the world."""
    ec2 = client(cloud)
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    tags = {"pool": "mine", "owner": THEIRS, "expires-at": "2020-01-01T00:00:00Z", "version": "1"}
    pairs = [{"Key": f"skyward:{key}", "Value": value} for key, value in tags.items()]
    spec = [{"ResourceType": "security-group", "Tags": pairs}]
    theirs = ec2.create_security_group(GroupName="skyward-mine", Description="x", VpcId=vpc, TagSpecifications=spec)
    with pytest.raises(CloudRefused, match="Duplicate"):
        cloud.aws().acquire(ONE, "mine")
    assert cloud.leftovers() == [theirs["GroupId"]]


def test_a_key_of_the_same_name_that_others_made_is_not_taken(cloud: Cloud) -> None:
    """SEC-32: with it they could log in to our machines."""
    from skyward.machines.cloud import make_keys

    directory = pool_dir("eve")
    directory.mkdir(parents=True)
    keys = make_keys(directory)
    tags = {"pool": "mine", "owner": me(cloud), "expires-at": "2020-01-01T00:00:00Z", "version": "1"}
    pairs = [{"Key": f"skyward:{key}", "Value": value} for key, value in tags.items()]
    spec = [{"ResourceType": "key-pair", "Tags": pairs}]
    client(cloud).import_key_pair(
        KeyName="skyward-mine", PublicKeyMaterial=keys.login_public.encode(), TagSpecifications=spec
    )
    with pytest.raises(CloudRefused, match="Duplicate"):
        cloud.aws().acquire(ONE, "mine")
    assert cloud.running() == []
