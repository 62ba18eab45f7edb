"""AWS: what machines come to, against figures that were worked out by hand."""

from __future__ import annotations

import math
import time

import pytest

from skyward.api.spec import Spec
from skyward.machines.cloud import CloudReceipt, price_of, price_tags
from skyward.machines.ledger import remove
from skyward.machines.offers import Price
from skyward.providers.aws.giveback import AwsBill, charge
from skyward.providers.aws.prices import LIST_PRICES, Disk, root_disk
from tests.support.cloud import Cloud
from tests.support.leases import returned

SMALL = Price(0.0765, 4 / 730, 0.005)  # c6a.large, 50 GB
T4 = Price(0.1578, 0.02, 0.005)  # g4dn.xlarge as spot, 95 GB at 300 MiB/s
PRIVATE = Price(0.0765, 4 / 730)


@pytest.mark.parametrize(
    ("hourly", "market", "seconds", "taken_back", "machine", "disk", "address"),
    [
        # on demand, by the second: 0.0765 x 412 / 3600, 50 GB x 0.08 / 730 h x 412 / 3600, 0.005 x 412 / 3600
        (SMALL, "on-demand", 412, False, 0.008755, 0.000627093, 0.000572222),
        # a minute at least: 0.0765 / 60, 50 x 0.08 / 730 / 60, 0.005 / 60
        (SMALL, "on-demand", 10, False, 0.001275, 0.0000913242, 0.0000833333),
        (SMALL, "on-demand", 60, False, 0.001275, 0.0000913242, 0.0000833333),
        # spot, ended by us after half an hour: half of everything
        (T4, "spot", 1800, False, 0.0789, 0.01, 0.0025),
        # a minute at least there, too
        (T4, "spot", 1, False, 0.00263, 0.000333333, 0.0000833333),
        # taken back by AWS in the first hour: the machine is free, its disk and its address are not
        (T4, "spot", 1800, True, 0.0, 0.01, 0.0025),
        (T4, "spot", 3599, True, 0.0, 0.0199944444, 0.0049986111),
        # taken back later: every second counts, those of the first hour as well
        (T4, "spot", 3600, True, 0.1578, 0.02, 0.005),
        (T4, "spot", 7200, True, 0.3156, 0.04, 0.01),
        # an on-demand machine that AWS loses is not free
        (SMALL, "on-demand", 1800, True, 0.03825, 0.002739726, 0.0025),
        # without a public address
        (PRIVATE, "on-demand", 3600, False, 0.0765, 0.0054794521, 0.0),
    ],
)
def test_a_machine_costs_what_aws_bills(
    hourly: Price, market: str, seconds: float, taken_back: bool, machine: float, disk: float, address: float
) -> None:
    costs = charge(hourly, market, seconds, taken_back)  # type: ignore[arg-type]
    assert (costs.machine, costs.disk, costs.address) == pytest.approx((machine, disk, address), abs=1e-9)
    bill = AwsBill("i", "k", "z", market, seconds, hourly, taken_back)  # type: ignore[arg-type]
    assert bill.cost == pytest.approx(machine + disk + address)


@pytest.mark.parametrize(
    ("image", "size", "throughput", "most", "disk", "monthly"),
    [
        (8, None, None, 0, Disk(50, 125, 3000), 4.0),  # 50 x 0.08
        (65, None, None, 437, Disk(95, 300, 3000), 14.6),  # 95 x 0.08 + 175 x 0.04
        (65, None, None, 250, Disk(95, 250, 3000), 12.6),  # the machine cannot read faster: 95 x 0.08 + 125 x 0.04
        (65, None, None, 80, Disk(95, 125, 3000), 7.6),
        (65, 40, None, 0, Disk(65, 300, 3000), 12.2),  # the image has to fit: 65 x 0.08 + 175 x 0.04
        (8, 200, 1000, 0, Disk(200, 1000, 4000), 56.0),  # 200 x 0.08 + 1000 x 0.005 + 875 x 0.04
        (65, None, 125, 437, Disk(95, 125, 3000), 7.6),
    ],
)
def test_a_disk_is_large_and_fast_enough_for_its_image(
    image: int, size: int | None, throughput: int | None, most: float, disk: Disk, monthly: float
) -> None:
    assert root_disk(image, size, throughput, most) == disk
    assert LIST_PRICES.hourly(disk) == pytest.approx(monthly / 730)


def test_a_receipt_adds_up_and_says_what_is_not_in_it() -> None:
    bills = (
        AwsBill("i-1", "g4dn.xlarge", "us-east-1a", "spot", 1800, T4),
        AwsBill("i-2", "g4dn.xlarge", "us-east-1a", "spot", 1800, T4, taken_back=True),
    )
    receipt = CloudReceipt("p", "us-east-1", bills)
    assert receipt.total == pytest.approx(0.0789 + 0.02 + 0.005)
    assert str(receipt).splitlines()[1:] == [
        "  i-1  g4dn.xlarge (spot, us-east-1a)  1,800 s  $0.0914",
        "  i-2  g4dn.xlarge (spot, us-east-1a, taken back by AWS)  1,800 s  $0.0125",
        "  total $0.1039 (machine $0.0789 + disk $0.02 + public address $0.005; traffic is not counted)",
    ]


def test_a_price_that_is_not_known_is_not_counted_as_nothing() -> None:
    unknown = AwsBill("i-1", "x", "z", "on-demand", 3600, Price(math.inf, 0.01, 0.005))
    assert unknown.cost == pytest.approx(0.015)
    text = str(CloudReceipt("p", "r", (unknown,)))
    assert "$0.015 and the machine, whose price is not known" in text
    assert "total $0.015 and 1 machine of unknown price" in text


def test_prices_survive_in_tags() -> None:
    assert price_of(price_tags(T4)) == T4
    assert price_of({"skyward:hourly-cost": "0.5"}) == Price(0.5), "as earlier versions wrote it"
    assert not price_of(price_tags(Price(math.inf, 0.01))).known
    for damaged in (
        {},
        {"skyward:hourly-cost": "x"},
        {"skyward:hourly-parts": "machine=x"},
        {"skyward:hourly-parts": "?"},
        {"skyward:hourly-parts": "machine=-1"},
        {"skyward:hourly-cost": "nan"},
        {"skyward:hourly-parts": "disk=inf"},
    ):
        assert price_of(damaged) == Price()


def test_a_machine_that_aws_has_forgotten_is_billed_until_its_end(cloud: Cloud) -> None:
    """AWS shows machines for an hour after their end; a pool may be open for days."""
    aws = cloud.aws()
    held = aws.acquire(Spec(accelerator="T4", nodes=3), "p")
    ours, theirs, _ = (machine.id for machine in held.machines)
    cloud.end(theirs)
    held.refresh(held.machines)
    held.refresh(held.machines)
    held.terminate([held.machines[0]])
    for id in (ours, theirs):
        cloud.machines.all[id].visible_at = math.inf
    noted = time.time()
    time.sleep(1.1)  # the pace of tests takes what is younger for something that is yet to appear
    bills = {bill.id: bill for bill in returned(held).machines}
    assert bills[theirs].taken_back
    assert not bills[ours].taken_back
    for id in (ours, theirs):
        assert bills[id].seconds <= noted - cloud.machines.all[id].made + 1.0, "not until the pool was closed"


def test_the_receipt_of_a_pool_knows_what_aws_took_back(cloud: Cloud) -> None:
    """And the tags say the same as the ledger, where that is lost."""
    aws = cloud.aws()
    held = aws.acquire(Spec(accelerator="T4", nodes=2), "p")
    cloud.end(held.machines[1].id)
    receipt = returned(held)
    ours, theirs = receipt.machines
    assert (ours.taken_back, theirs.taken_back) == (False, True)
    assert ours.charged.machine > 0
    assert theirs.charged.machine == 0
    assert theirs.cost > 0, "its disk and its address"
    aws.acquire(Spec(accelerator="T4"), "q").let_go()
    remove("q")
    (bill,) = aws.give_back("q").machines
    assert (bill.hourly.machine, bill.hourly.disk, bill.hourly.address) == pytest.approx((0.1578, 0.02, 0.005))
