"""AWS: from a wish to instance types, zones and prices, on a test cloud; nothing is created by planning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.accelerators import A100
from skyward.api.spec import Spec
from skyward.errors import InvalidArgument, NoOffer
from skyward.machines.offers import CloudOffer
from skyward.providers.aws import prices
from skyward.providers.aws.api import kind_of, quota_of
from skyward.providers.aws.choose import attempts
from skyward.providers.aws.images import image_parameter
from skyward.providers.aws.provider import AWS
from tests.support.cloud import Cloud
from tests.support.cloud.prices import TABLE
from tests.support.leases import returned


@pytest.fixture(scope="module")
def shared() -> Iterator[Cloud]:
    with Cloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(shared: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    shared.forget()
    prices.forget()
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    for name, value in shared.environ.items():
        monkeypatch.setenv(name, value)
    return shared


@pytest.mark.parametrize(
    ("wish", "kind", "accelerators"),
    [
        ("T4", "g4dn.xlarge", 1),
        ("T4:4", "g4dn.12xlarge", 4),
        ("A10G", "g5.xlarge", 1),
        ("L4:8", "g6.48xlarge", 8),
        ("L40S", "g6e.xlarge", 1),
        ("A100-40GB:8", "p4d.24xlarge", 8),
        ("A100-80GB", "p4de.24xlarge", 8),
        ("A100", "p4d.24xlarge", 8),
        ("H100:8", "p5.48xlarge", 8),
        ("Trainium1", "trn1.2xlarge", 1),
        ("Inferentia2:12", "inf2.48xlarge", 12),
        ("T4G", "g5g.xlarge", 1),
    ],
)
def test_an_accelerator_leads_to_the_cheapest_type_that_has_it(
    cloud: Cloud, wish: str, kind: str, accelerators: int
) -> None:
    plan = cloud.aws().offers(Spec(accelerator=wish))
    first = plan.offers[0]
    assert (first.kind, first.accelerators) == (kind, accelerators)
    assert first.architecture == ("arm64" if kind.startswith("g5g") else "x86_64")


def test_the_wish_for_cpus_is_met_by_the_cheapest_machine_without_accelerators(cloud: Cloud) -> None:
    aws = cloud.aws()
    small = aws.offers(Spec()).offers[0]
    assert small.kind == "c6a.large"
    large = aws.offers(Spec(vcpus=8, memory_gb=30)).offers[0]
    assert large.vcpus is not None
    assert large.vcpus >= 8
    assert large.memory_gb is not None
    assert large.memory_gb >= 30 * 0.92
    arm = aws.offers(Spec(architecture="arm64")).offers
    assert {offer.architecture for offer in arm} == {"arm64"}


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, {"c6a.large"}),
        ({"burstable": True}, {"t3a.medium"}),
        ({"instance_types": ["t3.*", "c5.large"]}, {"t3.medium"}),
        ({"instance_types": ["t3.medium"], "exclude_burstable": True}, set()),
        ({"instance_types": ["?3a.medium"]}, set()),
        ({"instance_types": "t4g.medium"}, {"t4g.medium"}),
        ({"instance_types": "t3.micro"}, {"t3.micro"}),
    ],
    ids=str,
)
def test_burstable_machines_are_taken_only_when_asked_for(
    cloud: Cloud, settings: dict[str, object], kinds: set[str]
) -> None:
    """And a type that is named needs no more than what the spec says."""
    plan = cloud.aws(**settings).offers(Spec())
    assert {offer.kind for offer in plan.offers[:1]} == kinds
    assert any(offer.burstable for offer in plan) == ("burstable types run with standard credits" in str(plan))
    if not kinds:
        assert "its CPUs are burstable: fast for a while, then slow" in str(plan)


def test_of_two_machines_at_one_price_the_newer_is_tried_first(cloud: Cloud) -> None:
    cloud.prices = {"m5.large": 0.1, "m7i.large": 0.1, "m6i.large": 0.1}
    offers = cloud.aws(instance_types=list(cloud.prices)).offers(Spec(allocation="on-demand")).offers
    assert list(dict.fromkeys(offer.kind for offer in offers)) == ["m7i.large", "m6i.large", "m5.large"]


def test_planning_creates_nothing(cloud: Cloud) -> None:
    cloud.aws().offers(Spec(accelerator="T4", nodes=4))
    assert cloud.leftovers() == []
    assert {call.action for call in cloud.calls} <= {
        "GetCallerIdentity",
        "DescribeSubnets",
        "DescribeInstanceTypes",
        "DescribeInstanceTypeOfferings",
        "DescribeSpotPriceHistory",
        "GetProducts",
        "GetParameter",
        "DescribeImages",
    }


def test_what_is_ruled_out_has_a_reason(cloud: Cloud) -> None:
    plan = cloud.aws().offers(Spec(accelerator="A100-80GB", nodes=2))
    assert "p4d.24xlarge: its A100 has 43 GB, 80 GB asked" in str(plan)
    assert "g4dn.metal: bare metal" in str(cloud.aws().offers(Spec(accelerator="T4")))
    fractions = cloud.aws().offers(Spec(accelerator="L4"))
    assert any("a fraction of one L4" in str(item) for item in fractions.ruled_out)
    named = cloud.aws(instance_types=["g4dn.*", "c5.large"]).offers(Spec(accelerator="T4"))
    assert any(item.what == "c5.large" for item in named.ruled_out)
    dear = cloud.aws().offers(Spec(accelerator="T4", nodes=4, max_hourly_cost=0.74))
    assert [(offer.kind, offer.zone) for offer in dear.offers] == [("g4dn.xlarge", "us-east-1a")]
    assert any("max_hourly_cost=0.74" in item.why for item in dear.ruled_out)


def test_without_memory_every_variant_is_tried_the_cheapest_first(cloud: Cloud) -> None:
    plan = cloud.aws().offers(Spec(accelerator="A100", allocation="on-demand"))
    variants = list(dict.fromkeys((offer.kind, offer.accelerator_gb) for offer in plan.offers))
    assert variants == [("p4d.24xlarge", 40), ("p4de.24xlarge", 80)]
    assert "with 8 x A100 (40GB)" in str(plan)
    assert not plan.ruled_out


def test_which_variant_was_got_is_told(cloud: Cloud) -> None:
    aws = cloud.aws()
    cloud.room(0, kind="p4d.24xlarge")
    held = aws.acquire(Spec(accelerator="A100:4"), "p")
    assert held.accelerator == A100(count=4, memory="80GB")
    returned(held)
    held = aws.acquire(Spec(accelerator="A100-80GB"), "q")
    assert held.accelerator is None, "nothing was left open"
    returned(held)


def test_old_gpus_without_a_driver_image_need_an_image_of_ones_own(cloud: Cloud) -> None:
    spec = Spec(accelerator="V100-32GB")
    plan = cloud.aws().offers(spec)
    assert not plan.offers
    assert "no image with drivers for V100" in str(plan)
    assert cloud.aws(ami="ami-00000000000000004").offers(spec).offers[0].kind == "p3dn.24xlarge"


def test_the_first_inferentia_leads_to_the_second_or_to_an_image_of_ones_own(cloud: Cloud) -> None:
    with pytest.raises(
        NoOffer, match='no longer have a driver for the first Inferentia; ask for accelerator="Inferentia2"'
    ):
        cloud.aws().acquire(Spec(accelerator="Inferentia1"), "p")
    with pytest.raises(InvalidArgument, match="near ones: Inferentia2, Inferentia1"):
        Spec(accelerator="Inferentia")
    assert cloud.aws().offers(Spec(accelerator="Inferentia2")).offers[0].kind == "inf2.xlarge"
    own = cloud.aws(ami="ami-00000000000000006").offers(Spec(accelerator="Inferentia1"))
    assert own.offers[0].kind == "inf1.xlarge"


def test_nothing_that_fits_is_an_error_before_anything_is_created(cloud: Cloud) -> None:
    with pytest.raises(NoOffer, match="has nothing for 1 node with 1 x RTX_4090"):
        cloud.aws().acquire(Spec(accelerator="RTX_4090"), "p")
    assert cloud.leftovers() == []
    with pytest.raises(NoOffer, match="max_hourly_cost=1e-06"):
        cloud.aws().acquire(Spec(max_hourly_cost=1e-6), "p")


@pytest.mark.parametrize(
    ("allocation", "markets"),
    [
        ("spot", ["spot"]),
        ("on-demand", ["on-demand"]),
        ("spot-if-available", ["spot", "on-demand"]),
        ("cheapest", ["spot", "on-demand"]),
    ],
)
def test_the_allocation_decides_on_price_classes(cloud: Cloud, allocation: str, markets: list[str]) -> None:
    plan = cloud.aws().offers(Spec(accelerator="T4", allocation=allocation))  # type: ignore[arg-type]
    assert list(dict.fromkeys(offer.market for offer in plan.offers)) == markets


def test_zones_are_tried_in_order_of_price(cloud: Cloud) -> None:
    cloud.spot = {("g4dn.xlarge", "us-east-1c"): 0.01}
    offers = cloud.aws(instance_types=["g4dn.xlarge"]).offers(Spec(accelerator="T4", allocation="spot")).offers
    assert [offer.zone[-1] for offer in offers] == ["c", "a", "b", "d", "f"]
    named = cloud.aws(zones=["us-east-1b"]).offers(Spec(accelerator="T4")).offers
    assert {offer.zone for offer in named} == {"us-east-1b"}


def test_a_spec_names_its_own_region(cloud: Cloud) -> None:
    offers = cloud.aws().offers(Spec(accelerator="T4", region="eu-west-1")).offers
    assert {offer.region for offer in offers} == {"eu-west-1"}
    assert offers[0].zone.startswith("eu-west-1")


def test_who_may_not_ask_for_prices_is_told_and_none_is_made_up(cloud: Cloud) -> None:
    cloud.fail("GetProducts", "AccessDeniedException", times=-1)
    spot = cloud.aws().offers(Spec(accelerator="T4"))
    assert "on-demand prices are not known, since AWS refused pricing:GetProducts" in str(spot)
    assert (spot.offers[0].market, spot.offers[0].price) == ("spot", "live")
    cloud.fail("DescribeSpotPriceHistory", "UnauthorizedOperation", times=-1)
    plan = cloud.aws().offers(Spec(accelerator="T4"))
    assert {offer.price for offer in plan} == {"unknown"}
    assert all(math.isinf(offer.hourly_cost) for offer in plan)
    assert "price unknown" in str(plan)
    limited = cloud.aws().offers(Spec(accelerator="T4", max_hourly_cost=5))
    assert not limited.offers
    assert "its price is not known, and max_hourly_cost=5 is set" in str(limited)


def test_without_spot_prices_the_on_demand_price_is_the_limit(cloud: Cloud) -> None:
    cloud.fail("DescribeSpotPriceHistory", "UnauthorizedOperation", times=-1)
    spot = cloud.aws().offers(Spec(accelerator="T4")).offers[0]
    assert (spot.market, spot.price, spot.parts.machine) == ("spot", "at most", TABLE["g4dn.xlarge"])


def test_prices_are_asked_of_the_cloud(cloud: Cloud) -> None:
    assert cloud.prices is not None
    cloud.prices["g4dn.xlarge"] = 0.5
    demand = cloud.aws().offers(Spec(accelerator="T4", allocation="on-demand")).offers[0]
    assert (demand.price, demand.parts.machine) == ("live", 0.5)


def test_all_nodes_in_one_zone_come_before_spreading_them() -> None:
    def offer(kind: str, market: str, zone: str) -> CloudOffer:
        return CloudOffer("", kind=kind, market=market, zone=zone)  # type: ignore[arg-type]

    a, b, c = offer("x", "spot", "a"), offer("x", "spot", "b"), offer("y", "spot", "a")
    d, e = offer("x", "on-demand", "a"), offer("x", "on-demand", "b")
    assert attempts([a, b, c, d, e], 4) == [(a,), (b,), (c,), (a, b), (d,), (e,), (d, e)]
    assert attempts([a, b, c, d, e], 1) == [(a,), (b,), (c,), (d,), (e,)]
    assert attempts([a, d, b, e], 2, mixed=True) == [(a,), (d,), (b,), (e,), (a, b), (d, e)]


@pytest.mark.parametrize(
    ("accelerator", "architecture", "ubuntu", "parameter"),
    [
        ("", "x86_64", "24.04", "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"),
        ("", "arm64", "22.04", "/aws/service/canonical/ubuntu/server/22.04/stable/current/arm64/hvm/ebs-gp2/ami-id"),
        (
            "T4",
            "x86_64",
            "24.04",
            "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
        ),
        ("Trainium", "x86_64", "24.04", "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id"),
        ("V100", "x86_64", "24.04", None),
        ("Gaudi HL-205", "x86_64", "24.04", None),
    ],
)
def test_images_are_named_by_public_parameters(
    accelerator: str, architecture: str, ubuntu: str, parameter: str | None
) -> None:
    assert image_parameter(accelerator, architecture, ubuntu) == parameter


def test_refusals_are_sorted_by_what_can_be_done_next() -> None:
    assert kind_of("InsufficientInstanceCapacity", 500) == "capacity"
    assert kind_of("VcpuLimitExceeded") == "quota"
    assert kind_of("UnauthorizedOperation", 403) == "permission"
    assert kind_of("RequestLimitExceeded", 503) == "throttled"
    assert kind_of("Whatever", 502) == "server"
    assert kind_of("InvalidInstanceID.NotFound") == "missing"
    assert kind_of("InvalidKeyPair.Duplicate") == "duplicate"
    assert kind_of("InvalidPlacementGroup.InUse") == "in use"
    assert kind_of("InvalidParameterValue") == "other"
    assert "L-DB2E81BA" in quota_of("g4dn.xlarge", "on-demand")
    assert "L-34B43A08" in quota_of("c5.large", "spot")
    assert "L-C4BD4855" in quota_of("p5.48xlarge", "spot")
    assert "L-7212CCBC" in quota_of("p4d.24xlarge", "spot")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Spec(accelerator="RTX_4090"), "RTX_4090: no machine in us-east-1 has it; there are A100, A10G"),
        (Spec(accelerator="T4:16"), "g4dn.12xlarge: has 4 x T4, 16 asked"),
        (Spec(accelerator="T4", architecture="arm64"), "g4dn.xlarge: x86_64, arm64 asked"),
        (Spec(accelerator="T4", vcpus=500), "g4dn.16xlarge: 64 vCPUs, 500 asked"),
        (Spec(vcpus=5000), "896 vCPUs, 5000 asked"),
        (Spec(memory_gb=500_000), "32768 GB of memory, 500000 asked"),
        (Spec(max_hourly_cost=0.001), "or raise max_hourly_cost."),
        (Spec(accelerator="A100-80GB", region="eu-west-1"), "p4de.24xlarge: not offered in eu-west-1a"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_had_is_told_with_what_there_is_instead(cloud: Cloud, spec: Spec, words: str) -> None:
    with pytest.raises(NoOffer) as caught:
        cloud.aws().acquire(spec, "p")
    assert words in str(caught.value)
    assert cloud.leftovers() == []


@pytest.mark.parametrize(
    ("settings", "spec", "words"),
    [
        ({"zones": ["eu-west-1a"]}, Spec(), "eu-west-1a is not in us-east-1.*Name some of us-east-1a"),
        ({"zones": "us-east-1z"}, Spec(accelerator="T4"), "us-east-1z is not in us-east-1"),
        ({"zones": ["us-east-1a"]}, Spec(region="eu-west-1"), "us-east-1a is not in eu-west-1"),
        ({"region": "us-east-9"}, Spec(), "AWS has no such region.*us-east-2"),
        ({}, Spec(region="xx-nowhere-1"), "AWS has no such region.*us-east-1"),
        ({}, Spec(region="Frankfurt"), "no region of AWS.*us-east-1"),
        ({"instance_types": ["t9.large"]}, Spec(), "t9.large: no such instance type in us-east-1"),
        ({"instance_types": "g4dn.xlarge"}, Spec(), "none asked .accelerator=... asks for it"),
    ],
)
def test_places_and_types_that_do_not_exist_are_told_before_anything_is_created(
    cloud: Cloud, settings: dict[str, object], spec: Spec, words: str
) -> None:
    with pytest.raises((InvalidArgument, NoOffer), match=words):
        cloud.aws(**settings).acquire(spec, "p")
    assert cloud.leftovers() == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"region": "nowhere"}, "us-east-1"),
        ({"region": "us-east-1; rm"}, "us-east-1"),
        ({"region": None}, "region=None"),
        ({"zones": 3}, "zones=3"),
        ({"zones": ["a"]}, "us-east-1a"),
        ({"instance_types": None}, "instance_types=None"),
        ({"ami": "ubuntu"}, "ami-0123"),
        ({"ami": 3}, "ami=3"),
        ({"subnet_id": "mine"}, "subnet-0123"),
        ({"security_group_id": "default"}, "sg-0123"),
        ({"ubuntu_version": "noble"}, "24.04"),
        ({"username": "-oProxyCommand=x"}, "username"),
        ({"instance_profile": ""}, "instance_profile"),
        ({"use_private_ip": "yes"}, "expected True or False"),
        ({"placement_group": "mine"}, "expected True or False"),
        ({"root_disk_gb": 0}, "root_disk_gb"),
        ({"root_disk_throughput": 100}, "125 to 2000 MiB/s"),
        ({"burstable": 1}, "expected True or False"),
        ({"burstable": True, "exclude_burstable": True}, "contradict each other"),
        ({"lease": -1}, "lease=-1"),
        ({"lease": 59}, "60 s to boot"),
        ({"ssh_from": "my house"}, "203.0.113.7"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"tags": "team=ml"}, "Write tags="),
        ({"tags": {"skyward:pool": "mine"}}, "reserved"),
        ({"tags": {"x" * 200: ""}}, "too long"),
        ({"tags": {str(i): "" for i in range(50)}}, "40 or fewer"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_made(settings: dict[str, object], words: str) -> None:
    """What, why, and what to write instead."""
    with pytest.raises(InvalidArgument, match=words):
        AWS(**settings)  # type: ignore[arg-type]


def test_a_lease_is_long_enough_for_a_machine_to_boot(cloud: Cloud) -> None:
    """SEC-31; machines of the test cloud boot in less than a second, so that tests may have shorter ones."""
    assert AWS(lease=60).access.lease == 60
    assert cloud.aws(lease=6).access.lease == 6
    with pytest.raises(InvalidArgument, match="1 s to boot"):
        cloud.aws(lease=0.5)


def test_the_provider_is_a_plain_value() -> None:
    import pickle

    aws = AWS(tags={"team": "ml"}, subnet_id="subnet-1", ssh_from="203.0.113.7")
    assert aws.ssh_from == "203.0.113.7/32"
    assert aws.subnet_id == ("subnet-1",)
    assert hash(aws) == hash(pickle.loads(pickle.dumps(aws)))
    assert replace(aws, region="eu-west-1").region == "eu-west-1"


SETTINGS = """
[default]
region = eu-west-1
[profile lab]
region = ap-south-1
[profile bare]
output = json
"""


@pytest.mark.parametrize("region", ["us-gov-west-1", "cn-north-1", "eusc-de-east-1", "us-iso-east-1"])
def test_regions_of_every_partition_are_taken(region: str) -> None:
    assert AWS(region=region).region == region


@pytest.mark.parametrize(
    ("profile", "environ", "region"),
    [
        (None, {}, "eu-west-1"),
        (None, {"AWS_REGION": "us-west-2", "AWS_DEFAULT_REGION": "us-east-2"}, "us-west-2"),
        (None, {"AWS_DEFAULT_REGION": "us-east-2"}, "us-east-2"),
        (None, {"AWS_PROFILE": "lab"}, "ap-south-1"),
        ("lab", {}, "ap-south-1"),
        ("lab", {"AWS_REGION": "us-west-2"}, "ap-south-1"),
        ("bare", {"AWS_REGION": "us-west-2"}, "us-west-2"),
        ("bare", {}, "us-east-1"),
        ("nobody", {}, "us-east-1"),
        (None, {"AWS_CONFIG_FILE": "/nowhere"}, "us-east-1"),
        (None, {"AWS_CONFIG_FILE": __file__}, "us-east-1"),
    ],
)
def test_the_region_is_the_one_that_aws_s_own_tools_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str | None, environ: dict[str, str], region: str
) -> None:
    (tmp_path / "config").write_text(SETTINGS)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"AWS_CONFIG_FILE": str(tmp_path / "config"), **environ}.items():
        monkeypatch.setenv(name, value)
    assert AWS(profile=profile).region == region
