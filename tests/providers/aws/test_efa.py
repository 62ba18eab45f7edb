"""AWS: EFA between machines: when it is used, the interfaces that it takes, and what the user is told."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.api.spec import Spec
from skyward.errors import NoCapacity, NoOffer
from skyward.machines.offers import CloudOffer
from skyward.providers.aws.choose import EfaChoice, interfaces
from skyward.testing import Call
from tests.support.cloud import Cloud

P5 = CloudOffer("", kind="p5.48xlarge", zone="a", accelerator="H100", accelerators=8, efa_cards=tuple(range(32)))
B300 = CloudOffer("", kind="p6-b300.48xlarge", zone="a", accelerator="B300", efa_cards=tuple(range(1, 17)))
G5 = CloudOffer("", kind="g5.8xlarge", zone="a", accelerator="A10G", accelerators=1, efa_cards=(0,))
PLAIN = CloudOffer("", kind="g5.xlarge", zone="a", accelerator="A10G", accelerators=1)
A10G = Spec(accelerator="A10G", nodes=2, allocation="on-demand")


def ran(cloud: Cloud) -> list[Call]:
    return [call for call in cloud.calls if call.action == "RunInstances"]


@pytest.mark.parametrize(
    ("offer", "settings", "why"),
    [
        (G5, {"nodes": 2}, None),
        (P5, {"nodes": 2, "private": True}, None),
        (G5, {"nodes": 1}, "there is one node"),
        (PLAIN, {"nodes": 2}, "g5.xlarge has none"),
        (G5, {"nodes": 2, "asked": False}, "efa=False"),
        (B300, {"nodes": 2}, "none on the card with the public address"),
        (B300, {"nodes": 2, "private": True}, None),
        (G5, {"nodes": 2, "own_image": True}, "efa=True says so"),
        (G5, {"nodes": 2, "own_image": True, "asked": True}, None),
        (G5, {"nodes": 2, "own_group": True}, "all traffic from and to itself"),
        (
            CloudOffer("", kind="trn1.32xlarge", accelerator="Trainium", efa_cards=(0,)),
            {"nodes": 2},
            "NVIDIA GPUs only",
        ),
        (CloudOffer("", kind="c6in.32xlarge", efa_cards=(0,)), {"nodes": 2}, "NVIDIA GPUs only"),
    ],
)
def test_efa_is_used_where_type_image_and_group_have_it(
    offer: CloudOffer, settings: dict[str, Any], why: str | None
) -> None:
    choice = EfaChoice(**settings)
    found = choice.why_not(offer)
    assert (found is None) is (why is None)
    assert (why or "") in (found or "")
    told = choice.sentence(offer)
    assert (told is None) == (not offer.efa_cards or choice.nodes < 2)


def test_every_card_has_an_interface_only_without_a_public_address() -> None:
    """DeviceIndex and NetworkCardIndex as EC2's guide of EFA has them."""
    (one,) = interfaces(P5, "subnet-1", "sg-1", private=False, efa=True)
    assert one == {
        "DeviceIndex": 0,
        "SubnetId": "subnet-1",
        "Groups": ["sg-1"],
        "InterfaceType": "efa",
        "AssociatePublicIpAddress": True,
    }
    many = interfaces(P5, "subnet-1", "sg-1", private=True, efa=True)
    assert [item["NetworkCardIndex"] for item in many] == list(range(32))
    assert [item["DeviceIndex"] for item in many] == [0] + 31 * [1]
    assert [item["InterfaceType"] for item in many] == ["efa"] + 31 * ["efa-only"]
    assert all("AssociatePublicIpAddress" not in item for item in many), "EC2 refuses it with several"
    first, *others = interfaces(B300, "subnet-1", "sg-1", private=True, efa=True)
    assert "InterfaceType" not in first, "its first card has no EFA"
    assert [item["NetworkCardIndex"] for item in others] == list(range(1, 17))
    assert interfaces(P5, "subnet-1", "sg-1", private=True, efa=False) == [
        {"DeviceIndex": 0, "SubnetId": "subnet-1", "Groups": ["sg-1"], "AssociatePublicIpAddress": False}
    ]


def test_machines_of_one_zone_use_efa_and_their_group_allows_it(cloud: Cloud) -> None:
    aws = cloud.aws(instance_types=["g5.8xlarge"])
    assert "EFA is used between machines of one zone, 1 network card each" in str(aws.offers(A10G))
    aws.acquire(A10G, "p")
    (run,) = ran(cloud)
    assert run.params["NetworkInterface.1.InterfaceType"] == "efa"
    (egress,) = [call for call in cloud.calls if call.action == "AuthorizeSecurityGroupEgress"]
    group = run.params["NetworkInterface.1.SecurityGroupId.1"]
    assert egress.params["GroupId"] == group
    assert group in egress.params.values()
    assert egress.params["IpPermissions.1.IpProtocol"] == "-1"
    assert "on 1 of 32 network cards" in str(cloud.aws().offers(Spec(accelerator="H100:8", nodes=2)))


def test_machines_spread_over_zones_do_not_use_efa(cloud: Cloud) -> None:
    """It does not lead from one zone to another, and NCCL would try."""
    for letter in "abcdf":
        cloud.room(1, zone=f"us-east-1{letter}")
    cloud.aws(instance_types=["g5.8xlarge"]).acquire(A10G, "p")
    launched = [call for call in ran(cloud) if call.outcome == "ok"]
    assert len(launched) == 2
    assert not any("NetworkInterface.1.InterfaceType" in call.params for call in launched)


def test_a_machine_that_joins_is_like_the_others(cloud: Cloud) -> None:
    aws = cloud.aws(instance_types=["g5.8xlarge"])
    held = aws.acquire(A10G, "p")
    zone = held.machines[0].zone  # type: ignore[attr-defined]
    held.more(A10G, 1)
    assert ran(cloud)[-1].params["NetworkInterface.1.InterfaceType"] == "efa"
    cloud.room(0, zone=zone)
    with pytest.raises(NoCapacity):
        held.more(A10G, 1)
    plain = cloud.aws(instance_types=["g5.8xlarge"], efa=False)
    cloud.room(9)
    plain.acquire(A10G, "q").more(A10G, 1)
    assert "NetworkInterface.1.InterfaceType" not in ran(cloud)[-1].params


def test_efa_that_is_asked_for_rules_out_what_has_none(cloud: Cloud) -> None:
    with pytest.raises(NoOffer, match=r"g5.xlarge: it has no EFA, efa=True asked"):
        cloud.aws(efa=True, instance_types=["g5.xlarge"]).acquire(A10G, "p")
    assert cloud.leftovers() == []
