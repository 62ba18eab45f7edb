"""AWS: capacity reservations and capacity blocks, by id."""

from __future__ import annotations

import pytest

from skyward.api.spec import Spec
from skyward.errors import InvalidArgument, NoOffer
from tests.support.cloud import Cloud

_TARGET = "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"
H100 = Spec(accelerator="H100:8", nodes=2)


@pytest.mark.parametrize("block", [False, True])
def test_machines_are_launched_into_a_reservation_and_nowhere_else(cloud: Cloud, block: bool) -> None:
    """The request has the shape that botocore's model and EC2's guide of capacity blocks have."""
    id = cloud.reserve("p5.48xlarge", "us-east-1b", 2, block=block)
    aws = cloud.aws(capacity_reservation=id)
    plan = aws.offers(H100)
    (offer,) = plan.offers
    assert (offer.kind, offer.zone, offer.market) == ("p5.48xlarge", "us-east-1b", "on-demand")
    aws.acquire(H100, "p")
    (run,) = [call for call in cloud.calls if call.action == "RunInstances"]
    assert run.params[_TARGET] == id
    assert run.params.get("InstanceMarketOptions.MarketType") == ("capacity-block" if block else None)
    assert "Placement.GroupName" not in run.params
    assert (offer.parts.machine == 0) is block, "a block is paid in advance"
    assert offer.parts.disk > 0
    words = "is paid in advance" if block else "costs the same whether machines run in it or not"
    assert words in str(plan)
    with pytest.raises(NoOffer, match="has room for 0, 2 asked"):
        aws.acquire(H100, "q")


def test_a_reservation_that_cannot_be_used_is_told_before_anything_is_created(cloud: Cloud) -> None:
    with pytest.raises(InvalidArgument, match="there is none in us-east-1"):
        cloud.aws(capacity_reservation="cr-0123").acquire(H100, "p")
    later = cloud.reserve("p5.48xlarge", "us-east-1a", 2, block=True, state="scheduled")
    with pytest.raises(InvalidArgument, match=r"is scheduled.*It begins at 2030-01-02 11:30 UTC"):
        cloud.aws(capacity_reservation=later).acquire(H100, "p")
    other = cloud.reserve("g5.xlarge", "us-east-1a", 2)
    with pytest.raises(NoOffer, match=r"g5.xlarge: has A10G, H100 asked"):
        cloud.aws(capacity_reservation=other).acquire(H100, "p")
    with pytest.raises(InvalidArgument, match="contradict each other"):
        cloud.aws(capacity_reservation=other).offers(Spec(accelerator="A10G", allocation="spot"))
    with pytest.raises(InvalidArgument, match="cr-0123456789abcdef0"):
        cloud.aws(capacity_reservation="mine")
    assert cloud.leftovers() == []
