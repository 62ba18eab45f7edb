"""AWS: what is asked about prices, how often, and what happens when AWS does not answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from skyward.api.spec import Spec
from skyward.errors import NoOffer
from skyward.providers.aws import prices
from skyward.providers.aws.provider import AWS
from skyward.testing import Call
from tests.support.cloud import Cloud


@pytest.fixture(autouse=True)
def unasked() -> Iterator[None]:
    prices.forget()
    yield
    prices.forget()


def questions(cloud: Cloud) -> list[dict[str, str]]:
    """What each GetProducts asked for."""
    asked = [json.loads(call.params["Filters"]) for call in cloud.calls if call.action == "GetProducts"]
    return [{item["Field"]: item["Value"] for item in filters} for filters in asked]


def hasty(cloud: Cloud) -> AWS:
    """The provider, patient for a moment only."""
    aws = cloud.aws()
    return replace(aws, pace=replace(aws.pace, budget=0.2))


def asks_for_several(call: Call) -> bool:
    return call.action == "GetProducts" and "ANY_OF" in call.params["Filters"]


def test_many_types_are_asked_for_by_name_in_few_calls(cloud: Cloud) -> None:
    plan = cloud.aws().offers(Spec(allocation="on-demand"))
    asked = questions(cloud)
    types = [kind for one in asked for kind in one.get("instanceType", "").split(",") if kind]
    assert len(types) > 100, "hundreds of types have 2 to 8 CPUs"
    assert len(types) == len(set(types))
    assert len(asked) <= 4, "a few for all types, and one for disks"
    assert all("instanceType" in one or one["volumeApiName"] == "gp3" for one in asked), "never the whole region"
    assert plan.offers[0].price == "live"
    cloud.aws().offers(Spec(allocation="on-demand", memory_gb=8))
    assert questions(cloud) == asked, "what is known is not asked again"


def test_a_throttled_question_is_repeated(cloud: Cloud) -> None:
    cloud.fail("GetProducts", "ThrottlingException", times=3)
    plan = cloud.aws().offers(Spec(accelerator="T4", allocation="on-demand"))
    assert {offer.price for offer in plan} == {"live"}
    assert "not known" not in str(plan)


def test_what_is_known_stays_known_when_the_rest_is_throttled(cloud: Cloud) -> None:
    first = hasty(cloud).offers(Spec(accelerator="T4", allocation="on-demand"))
    cloud.fail("GetProducts", "ThrottlingException", times=-1)
    both = replace(hasty(cloud), instance_types=("g4dn.xlarge", "g4dn.2xlarge", "c6a.large"))
    named = both.offers(Spec(allocation="on-demand", accelerator="T4", max_hourly_cost=5))
    assert named.offers[0].hourly_cost == first.offers[0].hourly_cost
    mixed = replace(hasty(cloud), instance_types=("c6a.large", "m5.large"))
    assert all(math.isinf(offer.hourly_cost) for offer in mixed.offers(Spec(allocation="on-demand")))


def test_one_batch_that_fails_leaves_the_others_known(cloud: Cloud) -> None:
    def second(call: Call) -> bool:
        return asks_for_several(call) and "c6a.large" not in call.params["Filters"]

    cloud.fail("GetProducts", "ThrottlingException", times=-1, where=second)
    plan = hasty(cloud).offers(Spec(allocation="on-demand", max_hourly_cost=1))
    assert plan.offers[0].price == "live"
    assert "types are not known, since AWS refused pricing:GetProducts (ThrottlingException)" in str(plan)


def test_where_several_types_cannot_be_asked_for_at_once_they_are_asked_for_one_by_one(cloud: Cloud) -> None:
    cloud.fail("GetProducts", "InvalidParameterException", times=-1, where=asks_for_several)
    plan = cloud.aws(instance_types=["g4dn.xlarge", "g4dn.2xlarge"]).offers(Spec(accelerator="T4"))
    assert {offer.price for offer in plan} == {"live"}


def test_a_limit_without_prices_says_what_to_do(cloud: Cloud) -> None:
    cloud.fail("GetProducts", "ThrottlingException", times=-1)
    with pytest.raises(NoOffer) as caught:
        hasty(cloud).acquire(Spec(accelerator="T4", allocation="on-demand", max_hourly_cost=5), "p")
    text = str(caught.value)
    assert "on-demand prices are not known, since AWS refused pricing:GetProducts (ThrottlingException)" in text
    assert "Without a price nothing is known to stay within max_hourly_cost=5" in text
    assert "leave max_hourly_cost out" in text


def test_the_whole_price_is_in_the_plan_and_in_the_limit(cloud: Cloud) -> None:
    """SEC-33: 0.526 for the machine, (95 GB x 0.08 + 175 MiB/s x 0.04) / 730 h for its disk, 0.005 for its address."""
    spec = Spec(accelerator="T4", allocation="on-demand", nodes=2)
    plan = cloud.aws().offers(spec)
    first = plan.offers[0]
    assert (first.parts.machine, first.parts.disk, first.parts.address) == pytest.approx((0.526, 0.02, 0.005))
    assert first.hourly_cost == pytest.approx(0.551)
    assert plan.hourly_cost == pytest.approx(1.102)
    text = str(plan)
    assert (
        "one node of the first: machine $0.526 + disk $0.02 + public address $0.005 an hour (95 GB gp3, 300 MiB/s)"
        in text
    )
    assert "traffic is not counted" in text
    assert cloud.aws().offers(replace(spec, max_hourly_cost=1.103)).offers
    assert not cloud.aws().offers(replace(spec, max_hourly_cost=1.101)).offers, "1.052 without disk and address"
    private = cloud.aws(use_private_ip=True).offers(spec).offers[0]
    assert private.hourly_cost == pytest.approx(0.546)


def test_what_was_planned_is_what_is_launched(cloud: Cloud) -> None:
    aws = cloud.aws(root_disk_gb=200, root_disk_throughput=1000)
    spec = Spec(accelerator="T4", allocation="on-demand")
    plan = aws.offers(spec)
    held = aws.acquire(spec, "p")
    (run,) = [call for call in cloud.calls if call.action == "RunInstances"]
    prefix = "BlockDeviceMapping.1.Ebs."
    disk = [run.params[prefix + name] for name in ("VolumeSize", "VolumeType", "Throughput", "Iops")]
    assert disk == ["200", "gp3", "1000", "4000"]
    assert plan.offers[0].parts.disk == pytest.approx(56 / 730)  # see test_billing.py
    assert held.hourly_cost == pytest.approx(plan.hourly_cost)
    assert "CreditSpecification.CpuCredits" not in run.params


def test_burstable_machines_have_standard_credits(cloud: Cloud) -> None:
    """EC2's own default bills CPU time beyond the price."""
    cloud.aws(instance_types=["t3.medium"]).acquire(Spec(), "p")
    (run,) = [call for call in cloud.calls if call.action == "RunInstances"]
    assert run.params["CreditSpecification.CpuCredits"] == "standard"
