"""Choosing machines: what fits, what is ruled out and why, and in which order offers are tried."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.api.spec import Spec
from skyward.machines.offers import CloudOffer, Plan, Shape, affordable, money, ordered, unfit, variant, wish

A100_40 = Shape("p4d.24xlarge", 96, 1152, accelerator="A100", accelerators=8, accelerator_gb=42.9)
A100_80 = Shape("p4de.24xlarge", 96, 1152, accelerator="A100", accelerators=8, accelerator_gb=85.9)
T4 = Shape("g4dn.xlarge", 4, 16, accelerator="T4", accelerators=1, accelerator_gb=17.2)
CPU = Shape("c5.xlarge", 4, 8)


def offer(kind: str, market: str, cost: float, zone: str = "a", price: str = "live") -> CloudOffer:
    return CloudOffer(f"{kind} {market} {zone}", cost, 4, 8, kind=kind, zone=zone, market=market, price=price)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "spec", "reason"),
    [
        (A100_80, Spec(accelerator="A100"), None),
        (A100_80, Spec(accelerator="A100:8"), None),
        (A100_40, Spec(accelerator="A100"), None),
        (A100_40, Spec(accelerator="A100-80GB"), "43 GB, 80 GB asked"),
        (A100_40, Spec(accelerator="A100-40GB"), None),
        (A100_80, Spec(accelerator="A100-40GB"), "86 GB, 40 GB asked"),
        (T4, Spec(accelerator="T4"), None),
        (T4, Spec(accelerator="T4:4"), "has 1 x T4, 4 asked"),
        (T4, Spec(accelerator="A100"), "has T4, A100 asked"),
        (T4, Spec(accelerator="T4", memory_gb=64), "16 GB of memory, 64 asked"),
        (T4, Spec(accelerator="T4", architecture="arm64"), "x86_64, arm64 asked"),
        (CPU, Spec(accelerator="T4"), "has no accelerator, T4 asked"),
        (CPU, Spec(), None),
        (CPU, Spec(vcpus=8), "4 vCPUs, 8 asked"),
        (T4, Spec(), "has 1 x T4, none asked"),
        (Shape("t3.nano", 2, 0.5), Spec(), "0.5 GB of memory, 3.5 asked"),
        (Shape("c7g.xlarge", 4, 8, ("arm64",)), Spec(), "arm64, x86_64 asked"),
        (Shape("c7g.xlarge", 4, 8, ("arm64",)), Spec(architecture="arm64"), None),
        (Shape("m5.metal", 96, 384, bare_metal=True), Spec(), "bare metal"),
        (Shape("m1.large", 2, 7.5, outdated=True), Spec(), "old generation"),
        (Shape("g6f.large", 2, 8, accelerator="L4", fraction=True), Spec(accelerator="L4"), "a fraction of one L4"),
        (Shape("g5g.xlarge", 4, 8, ("arm64",), "T4g", 1, 17.2), Spec(accelerator="T4G"), None),
        (Shape("g7e.2xlarge", 8, 64, (), "RTX PRO Server 6000", 1, 103.1), Spec(accelerator="RTX_PRO_6000"), None),
        (Shape("trn1.2xlarge", 8, 32, (), "Trainium", 1, 34.4), Spec(accelerator="Trainium1"), None),
        (Shape("trn2.3xlarge", 12, 128, (), "Trainium2", 1, 0.0), Spec(accelerator="Trainium2"), None),
        (Shape("g5.xlarge", 4, 16, (), "A10G", 1, 24.0), Spec(accelerator="A10G"), None),
        (Shape("p5en.48xlarge", 192, 2048, (), "H200", 8, 151.4), Spec(accelerator="H200:8"), None),
        (Shape("p6-b300.48xlarge", 192, 4096, (), "B300", 8, 288.4), Spec(accelerator="B300"), None),
    ],
)
def test_a_machine_fits_or_the_reason_says_both_values(shape: Shape, spec: Spec, reason: str | None) -> None:
    found = unfit(shape, spec)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert reason in found


def test_burstable_machines_are_left_out_when_asked() -> None:
    shape = Shape("t3.medium", 2, 4, burstable=True)
    assert unfit(shape, Spec()) is None
    assert "burstable" in str(unfit(shape, Spec(), burstable=False))


def test_offers_are_tried_in_order_of_price_within_what_the_allocation_allows() -> None:
    some = [offer("x", "on-demand", 1.0), offer("x", "spot", 0.4, "b"), offer("x", "spot", 0.3), offer("y", "spot", 2)]
    order = {a: [(o.kind, o.market, o.zone) for o in ordered(some, a)] for a in ("spot", "on-demand", "cheapest")}
    assert order["spot"] == [("x", "spot", "a"), ("x", "spot", "b"), ("y", "spot", "a")]
    assert order["on-demand"] == [("x", "on-demand", "a")]
    assert order["cheapest"] == [("x", "spot", "a"), ("x", "spot", "b"), ("x", "on-demand", "a"), ("y", "spot", "a")]
    both = ordered(some, "spot-if-available")
    assert [o.market for o in both] == ["spot", "spot", "spot", "on-demand"]


@given(st.lists(st.tuples(st.sampled_from(["spot", "on-demand"]), st.floats(0, 100)), max_size=20))
def test_cheapest_is_never_followed_by_something_cheaper(pairs: list[tuple[str, float]]) -> None:
    costs = [o.hourly_cost for o in ordered([offer("x", m, c) for m, c in pairs], "cheapest")]
    assert costs == sorted(costs)


def test_what_costs_too_much_is_ruled_out_for_the_whole_pool() -> None:
    """SEC-33."""
    some = [offer("x", "spot", 0.3), offer("x", "on-demand", 1.0), offer("z", "spot", 0.6, price="at most")]
    unknown = offer("y", "on-demand", math.inf)
    kept, out = affordable([*some, unknown], 4, 2.0)
    assert [o.hourly_cost for o in kept] == [0.3]
    assert "$4.00 an hour for 4, max_hourly_cost=2" in str(out[0])
    assert "up to $2.40" in str(out[1])
    assert "price is not known" in str(out[2])
    assert affordable([unknown], 4, None) == ([unknown], [])


def test_what_is_too_dear_in_one_zone_is_not_told_of_every_zone() -> None:
    zones = [offer("x", "spot", 3, zone) for zone in "abc"]
    kept, out = affordable([*zones, offer("y", "spot", 4)], 1, 2.0)
    assert kept == []
    assert [item.what for item in out] == ["x (spot, a)", "y (spot, a)"]


def test_the_variant_of_an_accelerator_is_known_by_its_memory() -> None:
    any_a100, only = Spec(accelerator="A100").accelerator, Spec(accelerator="A100-80GB").accelerator
    assert [variant(shape, any_a100) for shape in (A100_40, A100_80)] == [40, 80]
    assert variant(A100_80, only) == 80
    assert variant(CPU, None) == 0
    unsaid = Shape("trn2.3xlarge", 12, 128, (), "Trainium2", 1, 0.0)
    assert variant(unsaid, Spec(accelerator="Trainium2").accelerator) == 96, "there is no other"
    new = Shape("p9.large", 12, 128, (), "A100", 1, 128.0)
    assert variant(new, any_a100) == 128, "one that the catalogue does not know yet"


def test_a_plan_reads_like_a_sentence() -> None:
    offers = (offer("g4dn.xlarge", "spot", 0.2), offer("g4dn.xlarge", "on-demand", 0.526, price="at most"))
    text = str(Plan("AWS", wish(Spec(nodes=4, accelerator="T4")), 4, offers))
    assert "4 nodes with 1 x T4 (16GB each), spot-if-available, from AWS:" in text
    assert "1. 4 x g4dn.xlarge (spot, a), $0.8 an hour" in text
    assert "$2.10 an hour at most" in text
    assert "nothing fits" in str(Plan("AWS", "w", 1, ()))
    small = CloudOffer("", 2, kind="p4d.24xlarge", zone="a", accelerator="A100", accelerators=8, accelerator_gb=40)
    text = str(Plan("AWS", wish(Spec(accelerator="A100")), 1, (small,)))
    assert "1 node with 1 x A100 (80GB or 40GB each)" in text
    assert "with 8 x A100 (40GB)" in text


def test_money_shows_what_matters() -> None:
    assert [money(x) for x in (0, 0.0052, 0.526, 1.5, 1234.5)] == ["$0", "$0.0052", "$0.526", "$1.50", "$1,234.50"]
