"""AWS: what is created and with which parameters, and what happens when the cloud says no, nothing, or too late."""

from __future__ import annotations

import json
import os
import pickle
import stat
import threading
import time

import pytest

from skyward import errors
from skyward.api.provider import Lease, Machine
from skyward.api.spec import Spec
from skyward.errors import InvalidArgument, SkywardError
from skyward.machines.ledger import histories, pool_dir
from skyward.providers.aws import provider
from skyward.providers.aws.api import Api, Pace
from skyward.testing import Call, Fault
from tests.support.cloud import Cloud
from tests.support.leases import returned

T4 = Spec(accelerator="T4", nodes=3)


def called(cloud: Cloud, action: str) -> list[Call]:
    return [call for call in cloud.calls if call.action == action]


def nothing_left(cloud: Cloud) -> bool:
    return not cloud.leftovers() and not list(histories())


def is_spot(call: Call) -> bool:
    return call.params.get("InstanceMarketOptions.MarketType") == "spot"


def tags_of(call: Call) -> set[str]:
    return {value for key, value in call.params.items() if key.endswith(".Key")}


def test_machines_run_and_can_be_reached_when_acquire_returns(cloud: Cloud) -> None:
    said: list[str] = []
    held = cloud.aws().acquire(T4, "train", report=said.append)
    assert held.pool == "train"
    assert len({machine.id for machine in held.machines}) == 3
    keys = pool_dir(held.pool)
    for machine in held.machines:
        assert machine.state == "running"
        assert machine.ssh is not None
        assert (machine.ssh.host, machine.ssh.user) == (machine.public_ip, "ubuntu")
        assert machine.ssh.key == str(keys / "id_ed25519")
        assert machine.ssh.known_hosts == str(keys / "known_hosts")
        assert (machine.ssh.host_keys, machine.ssh.config) == ("strict", False)
        assert machine.private_ip.startswith("172.31.")
    assert said[0] == "asking for 3 x g4dn.xlarge (spot, us-east-1a)"
    assert held.hourly_cost == pytest.approx(3 * 0.1828)
    assert not held.machines[0].is_local
    assert isinstance(held.machines[0], Machine)


def test_one_call_launches_all_of_them(cloud: Cloud) -> None:
    """N25: creates do not depend on the number of nodes."""
    cloud.aws().acquire(Spec(accelerator="T4", nodes=20), "p")
    (run,) = called(cloud, "RunInstances")
    assert (run.params["MinCount"], run.params["MaxCount"]) == ("20", "20")
    assert len(run.params["ClientToken"]) <= 64
    assert len(called(cloud, "DescribeInstances")) == 1


def test_machines_are_asked_for_with_every_guard(cloud: Cloud) -> None:
    """SEC-12, SEC-31: IMDSv2 only, hop limit 1, no profile, ends itself for good, disks go with it, one-time spot."""
    cloud.aws().acquire(T4, "p")
    (run,) = called(cloud, "RunInstances")
    params = run.params
    assert params["MetadataOptions.HttpTokens"] == "required"
    assert params["MetadataOptions.HttpPutResponseHopLimit"] == "1"
    assert params["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert params["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true"
    assert params["BlockDeviceMapping.1.Ebs.VolumeType"] == "gp3"
    assert int(params["BlockDeviceMapping.1.Ebs.VolumeSize"]) >= 50
    assert params["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"
    assert "InstanceMarketOptions.SpotOptions.MaxPrice" not in params
    assert not any(key.startswith("IamInstanceProfile") for key in params)
    assert params["NetworkInterface.1.AssociatePublicIpAddress"] == "true"
    assert params["ImageId"] == "ami-00000000000000004"


def test_everything_is_tagged_in_the_call_that_creates_it(cloud: Cloud) -> None:
    """SEC-30; the test cloud refuses what is not."""
    cloud.aws(tags={"team": "ml"}).acquire(T4, "p")
    wanted = {"skyward:pool", "skyward:owner", "skyward:expires-at", "skyward:version", "team"}
    for action in ("CreateSecurityGroup", "ImportKeyPair", "CreatePlacementGroup", "RunInstances"):
        (call,) = called(cloud, action)
        assert wanted <= tags_of(call)
    kinds = {value for key, value in called(cloud, "RunInstances")[0].params.items() if key.endswith("ResourceType")}
    assert kinds == {"instance", "volume", "network-interface", "spot-instances-request"}


def test_only_ssh_from_the_caller_and_the_pool_itself_get_in(cloud: Cloud) -> None:
    """SEC-1."""
    cloud.aws(ssh_from="203.0.113.7").acquire(T4, "p")
    (call,) = called(cloud, "AuthorizeSecurityGroupIngress")
    params = call.params
    group = params["GroupId"]
    assert (params["IpPermissions.1.IpProtocol"], params["IpPermissions.1.Groups.1.GroupId"]) == ("-1", group)
    assert params["IpPermissions.2.FromPort"] == params["IpPermissions.2.ToPort"] == "22"
    assert params["IpPermissions.2.IpRanges.1.CidrIp"] == "203.0.113.7/32"
    assert not any(key.startswith("IpPermissions.3") or "0.0.0.0" in value for key, value in params.items())


def test_the_keys_are_made_for_the_pool_and_readable_by_this_user_only(cloud: Cloud) -> None:
    """SEC-6, SEC-21."""
    first, second = cloud.aws().acquire(T4, "p"), cloud.aws().acquire(T4, "q")
    directory = pool_dir(first.pool)
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    for path in directory.iterdir():
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    other = pool_dir(second.pool)
    assert (directory / "id_ed25519").read_bytes() != (other / "id_ed25519").read_bytes()
    instance = cloud.machines.all[first.machines[0].id]
    assert instance.public_key == (directory / "id_ed25519.pub").read_text().strip()


def test_the_host_key_is_known_before_the_first_connection(cloud: Cloud) -> None:
    """SEC-5."""
    held = cloud.aws().acquire(T4, "p")
    instance = cloud.machines.all[held.machines[0].id]
    settings = json.loads(instance.user_data.removeprefix("#cloud-config\n"))
    known = (pool_dir(held.pool) / "known_hosts").read_text().splitlines()
    assert sorted(line.split(" ", 1)[0] for line in known) == sorted(str(m.public_ip) for m in held.machines)
    assert {line.split(" ", 1)[1] for line in known} == {settings["ssh_keys"]["ed25519_public"]}
    assert "PRIVATE KEY" in settings["ssh_keys"]["ed25519_private"]


def test_no_credential_reaches_a_machine(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-11, SEC-12: a canary in the login is found in no parameter and in no file."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    monkeypatch.setenv("HF_TOKEN", "canary-token")
    held = cloud.aws().acquire(T4, "p")
    for call in cloud.calls:
        assert "canary" not in str(call.params)
    assert "canary" not in cloud.machines.all[held.machines[0].id].user_data
    for path in pool_dir(held.pool).iterdir():
        assert b"canary" not in path.read_bytes()


def test_settings_of_the_provider_reach_the_launch(cloud: Cloud) -> None:
    aws = cloud.aws(
        ami="ami-00000000000000001",
        username="admin",
        root_disk_gb=200,
        instance_profile="worker",
        use_private_ip=True,
        placement_group=False,
        instance_types=["g4dn.2xlarge"],
        lease=120,
    )
    held = aws.acquire(Spec(accelerator="T4", nodes=2, allocation="on-demand", ttl=3600), "p")
    params = called(cloud, "RunInstances")[0].params
    assert params["ImageId"] == "ami-00000000000000001"
    assert params["BlockDeviceMapping.1.Ebs.VolumeSize"] == "200"
    assert params["IamInstanceProfile.Name"] == "worker"
    assert params["NetworkInterface.1.AssociatePublicIpAddress"] == "false"
    assert params["InstanceType"] == "g4dn.2xlarge"
    assert "InstanceMarketOptions.MarketType" not in params
    assert not called(cloud, "CreatePlacementGroup")
    machine = held.machines[0]
    assert machine.ssh is not None
    assert (machine.ssh.user, machine.ssh.host) == ("admin", machine.private_ip)
    user_data = cloud.machines.all[machine.id].user_data
    assert "lease=120 life=3600" in user_data


def test_a_group_that_was_given_is_used_and_not_deleted(cloud: Cloud) -> None:
    held = cloud.aws(security_group_id="sg-12345678").acquire(Spec(), "p")
    assert not called(cloud, "CreateSecurityGroup")
    assert called(cloud, "RunInstances")[0].params["NetworkInterface.1.SecurityGroupId.1"] == "sg-12345678"
    returned(held, cloud.aws())
    assert not called(cloud, "DeleteSecurityGroup")


def test_machines_with_accelerators_stand_close_together(cloud: Cloud) -> None:
    cloud.aws().acquire(T4, "p")
    (made,) = called(cloud, "CreatePlacementGroup")
    assert called(cloud, "RunInstances")[0].params["Placement.GroupName"] == made.params["GroupName"]
    cloud.aws().acquire(Spec(nodes=2), "cpu")
    cloud.aws().acquire(Spec(accelerator="T4"), "single")
    assert len(called(cloud, "CreatePlacementGroup")) == 1


def test_no_room_moves_on_to_the_next_zone_then_type_then_price_class(cloud: Cloud) -> None:
    """Row 44."""
    cloud.room(0, zone="us-east-1a")
    assert {m.zone for m in cloud.aws().acquire(T4, "p").machines} == {"us-east-1b"}
    cloud.room(0, kind="g4dn.xlarge")
    assert {m.kind for m in cloud.aws().acquire(T4, "q").machines} == {"g4dn.2xlarge"}
    cloud.room(0, market="spot")
    held = cloud.aws().acquire(T4, "r")
    assert {m.market for m in held.machines} == {"on-demand"}


def test_nodes_are_spread_over_zones_when_no_zone_has_room_for_all(cloud: Cloud) -> None:
    """Row 45: partial success is completed."""
    for zone in ("a", "b", "c"):
        cloud.room(2, zone=f"us-east-1{zone}", kind="g4dn.xlarge")
    cloud.room(0, kind="*.?xlarge")
    cloud.room(0, kind="*.??xlarge")
    for zone in ("a", "b", "c"):
        cloud.room(2, zone=f"us-east-1{zone}", kind="g4dn.xlarge")
    held = cloud.aws(zones=["us-east-1a", "us-east-1b", "us-east-1c"]).acquire(Spec(accelerator="T4", nodes=5), "p")
    assert sorted(machine.zone[-1] for machine in held.machines) == ["a", "a", "b", "b", "c"]
    assert {machine.kind for machine in held.machines} == {"g4dn.xlarge"}


def test_too_few_are_given_back_and_every_attempt_is_listed(cloud: Cloud) -> None:
    """Rows 44 and 45: nothing half-made stays."""
    cloud.room(1)
    aws = cloud.aws(instance_types=["g4dn.xlarge"], zones=["us-east-1a", "us-east-1b"])
    with pytest.raises(errors.NoCapacity) as caught:
        aws.acquire(T4, "p")
    text = str(caught.value)
    assert "3 x g4dn.xlarge (spot, us-east-1a): InsufficientInstanceCapacity" in text
    assert "3 x g4dn.xlarge (on-demand, us-east-1b): InsufficientInstanceCapacity" in text
    assert "3 x g4dn.xlarge (spot, us-east-1a): only 1" in text
    assert nothing_left(cloud)
    assert cloud.machines.all, "some were had for a moment"


@pytest.mark.parametrize("code", ["VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"])
def test_quotas_that_are_used_up_are_each_asked_once_and_named(cloud: Cloud, code: str) -> None:
    """Row 46: one for spot machines of this family, one for on-demand ones."""
    cloud.fail("RunInstances", code, times=-1)
    with pytest.raises(errors.QuotaExceeded, match=r"G and VT instances' \(L-3819A6DF\)") as caught:
        cloud.aws().acquire(T4, "p")
    assert "(L-DB2E81BA)" in str(caught.value.__notes__)
    assert len(called(cloud, "RunInstances")) == 2
    assert nothing_left(cloud)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_without_a_spot_quota_on_demand_machines_are_taken(cloud: Cloud) -> None:
    """Row 46: people raise the quota for on-demand machines only, and spot-if-available is the default."""
    cloud.fail("RunInstances", "MaxSpotInstanceCountExceeded", times=-1, where=lambda call: is_spot(call))
    held = cloud.aws().acquire(T4, "p")
    assert {machine.market for machine in held.machines} == {"on-demand"}
    assert sum(is_spot(call) for call in called(cloud, "RunInstances")) == 1


def test_a_quota_and_no_room_are_told_in_one_error(cloud: Cloud) -> None:
    """Rows 44, 46."""
    cloud.fail("RunInstances", "MaxSpotInstanceCountExceeded", times=-1, where=lambda call: is_spot(call))
    cloud.room(0)
    with pytest.raises(errors.NoCapacity) as caught:
        cloud.aws(instance_types=["g4dn.xlarge"], zones=["us-east-1a"]).acquire(T4, "p")
    assert "(spot, us-east-1a): MaxSpotInstanceCountExceeded, the quota 'All G and VT" in str(caught.value)
    assert "(on-demand, us-east-1a): InsufficientInstanceCapacity" in str(caught.value)
    assert nothing_left(cloud)


def test_a_quota_for_disks_stops_at_once(cloud: Cloud) -> None:
    cloud.fail("RunInstances", "VolumeLimitExceeded", times=-1)
    with pytest.raises(errors.QuotaExceeded):
        cloud.aws().acquire(T4, "p")
    assert len(called(cloud, "RunInstances")) == 1
    assert nothing_left(cloud)


@pytest.mark.parametrize("action", ["RunInstances", "CreateSecurityGroup", "ImportKeyPair", "DescribeSubnets"])
def test_a_missing_permission_stops_at_once_and_names_the_action(cloud: Cloud, action: str) -> None:
    """Row 46."""
    cloud.fail(action, "UnauthorizedOperation", times=-1, message="You are not authorized.")
    with pytest.raises(errors.PermissionDenied, match=f"ec2:{action}"):
        cloud.aws().acquire(T4, "p")
    assert len(called(cloud, action)) == 1
    assert nothing_left(cloud)


def test_an_image_that_is_not_there_is_found_before_anything_is_created(cloud: Cloud) -> None:
    """Row 46."""
    with pytest.raises(InvalidArgument, match="no image ami-0000000000000dead in us-east-1"):
        cloud.aws(ami="ami-0000000000000dead").acquire(T4, "p")
    with pytest.raises(InvalidArgument, match="for arm64, the machines are x86_64"):
        cloud.aws(ami="ami-00000000000000002").acquire(T4, "p")
    assert not called(cloud, "CreateSecurityGroup")
    assert nothing_left(cloud)


def test_throttling_and_faults_of_theirs_are_waited_out(cloud: Cloud) -> None:
    """Rows 42 and 43."""
    said: list[str] = []
    cloud.fail("*", "RequestLimitExceeded", times=4, skip=3)
    cloud.fail("RunInstances", "ServiceUnavailable", times=4)
    held = cloud.aws().acquire(T4, "p", report=said.append)
    assert len(held.machines) == 3
    assert len(called(cloud, "RunInstances")) == 5
    assert len([line for line in said if "ec2:RunInstances with ServiceUnavailable" in line]) == 1


def test_patience_with_throttling_ends(cloud: Cloud) -> None:
    """Row 42."""
    cloud.fail("RunInstances", "RequestLimitExceeded", times=-1)
    with pytest.raises(errors.CloudRefused, match="RequestLimitExceeded"):
        cloud.aws(pace=Pace(0.01, 0.02, 0.3, 0.02, 0.05, 0.1)).acquire(T4, "p")
    assert nothing_left(cloud)


@pytest.mark.parametrize("mode", ["lose", "fail", "cut"])
@pytest.mark.parametrize("action", ["RunInstances", "CreateSecurityGroup", "ImportKeyPair", "CreatePlacementGroup"])
def test_a_call_without_an_answer_is_repeated_and_makes_nothing_twice(cloud: Cloud, action: str, mode: str) -> None:
    """Row 43."""
    cloud.fail(action, "InternalError", mode=mode, times=2)
    held = cloud.aws().acquire(T4, "p")
    assert len(held.machines) == len(cloud.running()) == 3
    tokens = {call.params.get("ClientToken") for call in called(cloud, "RunInstances")}
    assert len(tokens) == 1
    returned(held, cloud.aws())
    assert nothing_left(cloud)


def test_an_answer_that_never_comes_leaves_nothing(cloud: Cloud) -> None:
    """Rows 34 and 43: what a lost call made is found by its tag, even when it is seen late."""
    cloud.times.visible = 0.3
    cloud.fail("RunInstances", mode="lose", times=-1)
    with pytest.raises(errors.CloudRefused):
        cloud.aws(pace=Pace(0.01, 0.02, 0.2, 0.02, 0.1, 4.0)).acquire(T4, "p")
    assert len(cloud.machines.all) == 3
    assert nothing_left(cloud)


def test_a_group_that_is_not_known_everywhere_yet_is_waited_for(cloud: Cloud) -> None:
    cloud.fail("AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound", times=3)
    assert len(cloud.aws().acquire(T4, "p").machines) == 3
    assert len(called(cloud, "AuthorizeSecurityGroupIngress")) == 4


def test_types_that_a_free_plan_does_not_allow_are_passed_over(cloud: Cloud) -> None:
    text = "The specified instance type is not eligible for Free Tier."
    small = lambda call: call.params["InstanceType"] == "g4dn.xlarge"  # noqa: E731
    cloud.fail("RunInstances", "InvalidParameterCombination", times=-1, where=small, message=text)
    assert {machine.kind for machine in cloud.aws().acquire(T4, "p").machines} == {"g4dn.2xlarge"}
    with pytest.raises(errors.NoCapacity, match="not eligible for Free Tier"):
        cloud.aws(instance_types=["g4dn.xlarge"]).acquire(T4, "q")


@pytest.mark.parametrize(
    ("login", "owner"),
    [
        ("arn:aws:iam::123456789012:user/ann", "arn:aws:iam::123456789012:user/ann"),
        (
            "arn:aws:sts::123456789012:assumed-role/train/botocore-session-1794",
            "arn:aws:sts::123456789012:assumed-role/train",
        ),
        (
            "arn:aws:sts::123456789012:assumed-role/AWSReservedSSO_Dev_1/ann@example.org",
            "arn:aws:sts::123456789012:assumed-role/AWSReservedSSO_Dev_1/ann@example.org",
        ),
    ],
)
def test_the_owner_is_the_same_in_every_process(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, login: str, owner: str
) -> None:
    """A role's session is named after the time; by that name nothing would be found again."""
    monkeypatch.setattr(Api, "call", lambda *_, **__: {"Arn": login})
    assert provider._api(cloud.aws(), None).identity() == owner


def test_machines_that_are_seen_late_are_waited_for(cloud: Cloud) -> None:
    """Row 47."""
    cloud.times.visible, cloud.times.boot = 0.2, 0.3
    held = cloud.aws().acquire(T4, "p")
    assert all(machine.ready for machine in held.machines)


def test_machines_that_end_at_once_count_as_no_room(cloud: Cloud) -> None:
    def dies(call: Call) -> None:
        if call.action == "DescribeInstances" and len(cloud.machines.all) == 3:
            cloud.end(next(iter(cloud.machines.all)), "Server.InsufficientInstanceCapacity")

    cloud.on_call = dies
    held = cloud.aws().acquire(T4, "p")
    assert len(cloud.machines.all) == 6
    assert {machine.zone for machine in held.machines} == {"us-east-1b"}
    assert {instance.id for instance in cloud.running()} == {machine.id for machine in held.machines}


def test_every_offer_has_the_whole_time_to_start(cloud: Cloud) -> None:
    """What AWS takes to say that there is no room elsewhere is not taken from the machines that it has."""

    def slowly(call: Call) -> None:
        if call.action == "RunInstances":
            time.sleep(0.4)

    cloud.on_call, cloud.times.boot = slowly, 0.5
    cloud.fail("RunInstances", "InsufficientInstanceCapacity", times=3)
    held = cloud.aws().acquire(T4, "p", timeout=1.2)
    assert len(called(cloud, "RunInstances")) == 4
    assert len(held.machines) == 3


@pytest.mark.parametrize("reason", ["Client.InternalError", "Client.InvalidKMSKey.InvalidState"])
def test_disks_whose_key_may_not_be_used_are_told_with_kms(cloud: Cloud, reason: str) -> None:
    """Each price class is tried once: spot needs a grant of its own."""

    def dies(call: Call) -> None:
        if call.action == "DescribeInstances":
            for instance in cloud.running():
                cloud.end(instance.id, reason)

    cloud.on_call = dies
    with pytest.raises(errors.CloudError, match="kms:CreateGrant") as caught:
        cloud.aws().acquire(T4, "p")
    assert not isinstance(caught.value, errors.NoCapacity)
    assert reason in str(caught.value)
    assert [is_spot(call) for call in called(cloud, "RunInstances")] == [True, False]
    assert nothing_left(cloud)


def test_where_only_spot_may_not_use_the_key_of_disks_others_are_taken(cloud: Cloud) -> None:
    def dies(call: Call) -> None:
        if call.action == "DescribeInstances":
            for instance in [one for one in cloud.running() if one.market == "spot"]:
                cloud.end(instance.id, "Client.InternalError")

    cloud.on_call = dies
    held = cloud.aws().acquire(T4, "p")
    assert {machine.market for machine in held.machines} == {"on-demand"}


def test_a_subnet_without_ipv4_is_refused_before_anything_is_created(cloud: Cloud) -> None:
    import boto3

    ec2 = boto3.Session().client("ec2", region_name="us-east-1", endpoint_url=cloud.endpoint)
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16", AmazonProvidedIpv6CidrBlock=True)["Vpc"]["VpcId"]
    made = ec2.create_subnet(
        VpcId=vpc, Ipv6CidrBlock="2001:db8:0:1::/64", Ipv6Native=True, AvailabilityZone="us-east-1a"
    )
    with pytest.raises(InvalidArgument, match="IPv6 addresses only"):
        cloud.aws(subnet_id=made["Subnet"]["SubnetId"]).acquire(T4, "p")
    assert not called(cloud, "CreateSecurityGroup")


def test_machines_that_never_run_are_given_back(cloud: Cloud) -> None:
    cloud.times.boot = 3600
    with pytest.raises(SkywardError, match=r"did not start within .* \(pending\)"):
        cloud.aws().acquire(T4, "p", timeout=0.2)
    assert nothing_left(cloud)


def test_ctrl_c_in_the_middle_gives_everything_back(cloud: Cloud) -> None:
    """Row 34."""

    def interrupted(text: str) -> None:
        if text.startswith("waiting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cloud.aws().acquire(T4, "p", report=interrupted)
    assert cloud.machines.all
    assert nothing_left(cloud)


def test_no_login_fails_first_and_names_where_it_was_looked_for(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 56."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(errors.CredentialsMissing, match="Nothing was created") as caught:
        cloud.aws().acquire(T4, "p")
    for source in ("AWS_ACCESS_KEY_ID (not set)", "profile 'default'", "SSO", "metadata"):
        assert source in str(caught.value)
    assert cloud.calls == []
    with pytest.raises(errors.CredentialsMissing, match="nobody"):
        cloud.aws(profile="nobody").acquire(T4, "p")


@pytest.mark.parametrize("code", ["InvalidClientTokenId", "SignatureDoesNotMatch", "AuthFailure"])
def test_a_login_that_aws_does_not_know_fails_first(cloud: Cloud, code: str) -> None:
    """Row 56."""
    cloud.fail("GetCallerIdentity", code)
    with pytest.raises(errors.CredentialsMissing, match="does not accept"):
        cloud.aws().acquire(T4, "p")
    assert [call.action for call in cloud.calls] == ["GetCallerIdentity"]


def test_an_expired_login_fails_first(cloud: Cloud) -> None:
    """Row 57."""
    cloud.expired = True
    with pytest.raises(errors.CredentialsExpired, match="Log in again"):
        cloud.aws().acquire(T4, "p")
    cloud.expired = False
    assert nothing_left(cloud)


def test_a_pool_can_be_given_more_machines(cloud: Cloud) -> None:
    held = cloud.aws().acquire(T4, "p")
    more = held.more(T4, 1)
    assert len(more) == 1
    assert len(cloud.running()) == 4
    assert len(called(cloud, "CreateSecurityGroup")) == len(called(cloud, "ImportKeyPair")) == 1
    known = (pool_dir(held.pool) / "known_hosts").read_text().splitlines()
    assert len(known) == 4
    cloud.room(0)
    with pytest.raises(errors.NoCapacity):
        held.more(T4, 1)
    assert len(cloud.running()) == 4, "what the pool had is not touched"
    returned(held, cloud.aws())
    assert nothing_left(cloud)


def test_pools_do_not_meet(cloud: Cloud) -> None:
    """Row 39: opened at the same time, and one given back while others run."""
    pools: list[Lease] = []

    def opens(name: str) -> None:
        pools.append(cloud.aws().acquire(T4, name))

    threads = [threading.Thread(target=opens, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(pools) == 3
    returned(pools[0], cloud.aws())
    left = {machine.id for held in pools[1:] for machine in held.machines}
    assert {instance.id for instance in cloud.running()} == left


def test_a_name_that_is_taken_is_refused_before_anything_is_created(cloud: Cloud) -> None:
    held = cloud.aws().acquire(T4, "same")
    before = cloud.leftovers()
    with pytest.raises(InvalidArgument, match=r"pool 'same' already.*sky down same"):
        cloud.aws().acquire(T4, "same")
    assert cloud.leftovers() == before
    returned(held, cloud.aws())
    assert nothing_left(cloud)


def test_the_library_reads_as_an_ssh_key_the_ssh_program_takes(cloud: Cloud) -> None:
    import subprocess

    held = cloud.aws().acquire(Spec(), "p")
    key = pool_dir(held.pool) / "id_ed25519"
    shown = subprocess.run(
        ["ssh-keygen", "-y", "-f", str(key)], capture_output=True, text=True, check=True, timeout=180
    )
    assert shown.stdout.split()[:2] == (key.parent / "id_ed25519.pub").read_text().split()[:2]
    found = subprocess.run(
        ["ssh-keygen", "-F", str(held.machines[0].public_ip), "-f", str(key.parent / "known_hosts")],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert "ssh-ed25519" in found.stdout


def test_a_host_key_that_was_replaced_is_pinned_and_stays_so(cloud: Cloud) -> None:
    """SEC-5: the key of the user data is not accepted any more where it has been replaced."""
    from skyward.machines.cloud import pin

    aws = cloud.aws()
    held = aws.acquire(T4, "p")
    known = pool_dir(held.pool) / "known_hosts"
    address = str(held.machines[0].public_ip)
    pin(known, address, "ssh-ed25519 NEW\n")
    held.refresh(held.machines)
    lines = dict(line.split(" ", 1) for line in known.read_text().splitlines())
    assert lines[address] == "ssh-ed25519 NEW"
    assert len(lines) == 3
    held.terminate(held.machines[:1])
    assert address not in known.read_text()


def test_the_callers_address_is_asked_for_unless_it_is_given(cloud: Cloud) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from skyward.providers.aws import network

    class Echo(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"203.0.113.9\n")

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        echo = f"http://127.0.0.1:{server.server_port}"
        try:
            cloud.aws(ssh_from=None, address_service=echo).acquire(Spec(), "p")
        finally:
            server.shutdown()
    (call,) = called(cloud, "AuthorizeSecurityGroupIngress")
    assert call.params["IpPermissions.2.IpRanges.1.CidrIp"] == "203.0.113.9/32"
    with pytest.raises(SkywardError, match=r"Set it yourself: sky.AWS\(ssh_from="):
        cloud.aws(ssh_from=None, address_service=echo).acquire(Spec(), "q")
    assert len(called(cloud, "CreateSecurityGroup")) == 1
    assert network.own_address(private=True).endswith("/32")


def test_a_subnet_that_nobody_can_reach_is_refused_before_anything_is_created(cloud: Cloud) -> None:
    import boto3

    ec2 = boto3.Session().client("ec2", region_name="us-east-1", endpoint_url=cloud.endpoint)
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/24", AvailabilityZone="us-east-1a")["Subnet"]["SubnetId"]
    with pytest.raises(InvalidArgument, match="no route to an internet gateway"):
        cloud.aws(subnet_id=subnet).acquire(T4, "p")
    assert not called(cloud, "CreateSecurityGroup")
    held = cloud.aws(subnet_id=subnet, use_private_ip=True).acquire(T4, "p")
    assert all(machine.private_ip.startswith("10.9.1.") for machine in held.machines)
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    (table,) = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"]
    ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    public = cloud.aws(subnet_id=[subnet]).acquire(T4, "q")
    assert all(machine.public_ip for machine in public.machines)
    with pytest.raises(errors.CloudRefused, match="InvalidSubnetID"):
        cloud.aws(subnet_id="subnet-00000000").acquire(T4, "p")


def test_a_region_without_a_default_network_says_what_to_do(cloud: Cloud) -> None:
    import boto3

    ec2 = boto3.Session().client("ec2", region_name="eu-west-3", endpoint_url=cloud.endpoint)
    for subnet in ec2.describe_subnets()["Subnets"]:
        ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    with pytest.raises(InvalidArgument, match="no default VPC in eu-west-3"):
        cloud.aws(region="eu-west-3").acquire(T4, "p")


def test_how_machines_are_got_at_is_said(cloud: Cloud) -> None:
    access = cloud.aws(lease=120, ssh_timeout=30).access
    assert (access.lease, access.ssh_timeout, access.network) == (120, 30, "mesh")
    assert cloud.aws(security_group_id="sg-1").access.network == "auto"


@pytest.mark.parametrize(
    "error",
    [
        errors.CloudRefused("ec2:RunInstances", "InternalError", "m", "r", "server"),
        errors.PermissionDenied("ec2:RunInstances", "UnauthorizedOperation", "m", "r", "permission"),
        errors.CredentialsExpired("ec2:RunInstances", "ExpiredToken", "m", "r", "expired"),
        errors.QuotaExceeded("ec2:RunInstances", "VcpuLimitExceeded", "m", "r", "quota", "Q"),
        errors.NoCapacity("w", ["a", "b"]),
        errors.NoOffer("w", "AWS in r", ["a"]),
        errors.NotGivenBack("p", "r", ["i-1"], 1.5, "why."),
    ],
)
def test_errors_travel_and_say_what_to_do(error: SkywardError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert type(again) is type(error)
    assert len(str(error).split(". ")) >= 2


def test_the_role_that_spot_needs_once_is_named() -> None:
    from skyward.providers.aws.api import refusal

    refused = refusal("ec2:RunInstances", "AuthFailure.ServiceLinkedRoleCreationNotPermitted", "m", "r", 403)
    assert isinstance(refused, errors.PermissionDenied)
    assert refused.action == "iam:CreateServiceLinkedRole"


def test_faults_count_as_said() -> None:
    fault = Fault("Run*", times=2, skip=1)
    call = Call(0, "ec2", "RunInstances", "r", {}, 0.0)
    from skyward.testing import Faults

    faults = Faults([fault])
    assert [faults.due(call) is not None for _ in range(5)] == [False, True, True, False, False]
