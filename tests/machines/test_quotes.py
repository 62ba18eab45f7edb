"""What providers offer, side by side: pure sorting and reasons, with providers that say what they are told to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyward.api.provider import Availability, Lease, Offer, Provider, Report
from skyward.api.spec import Spec
from skyward.errors import InvalidArgument
from skyward.machines.offers import CloudOffer, Plan, Quotes, RuledOut, ask
from skyward.providers.aws.giveback import verdict


@dataclass(frozen=True)
class Shop(Provider):
    found: Iterable[Offer] = ()
    known: tuple[Availability, ...] = ()
    wrong: str = ""

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        if self.wrong:
            raise InvalidArgument(self.wrong)
        return self.found

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        return list(self.known) or super().availability(offers, count)

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Lease:
        raise NotImplementedError


def test_offers_of_all_are_sorted_by_price_with_unknown_ones_late_and_impossible_ones_last() -> None:
    no, yes = Availability("full", possible=False), Availability("free", possible=True)
    first = ask(Shop([Offer("dear", 3.0), Offer("unknown", math.inf)]), Spec(nodes=2), 2)
    second = ask(Shop([Offer("full", 0.5), Offer("cheap", 1.0)], (no, yes)), Spec(nodes=2), 2)
    both = first + second
    assert [quote.offer.name for quote in both.quotes] == ["cheap", "dear", "unknown", "full"]
    assert [quote.hourly_cost for quote in both.quotes] == [2.0, 6.0, math.inf, 1.0]


def test_an_offer_is_plain_json_also_without_a_price() -> None:
    gpus = CloudOffer("g (spot, z)", 4.0, 8, 32.0, "g", "r", "z", "spot", accelerator="T4", accelerators=2)
    found = ask(Shop([gpus, Offer("unknown", math.inf)]), Spec(), 1, "Shop in r")
    first, last = (json.loads(json.dumps(quote.record(), allow_nan=False)) for quote in found.quotes)
    assert (first["provider"], first["hourly_cost"], first["hourly_cost_per_accelerator"]) == ("Shop in r", 4.0, 2.0)
    assert (first["machine"], first["region"], first["zone"], first["market"]) == ("g", "r", "z", "spot")
    assert (last["hourly_cost"], last["hourly_cost_per_node"], last["market"]) == (None, None, None)


def test_what_is_too_small_is_said_and_not_listed() -> None:
    found = ask(Shop([Offer("small", 0.0, 2, 8.0), Offer("sizeless")]), Spec(vcpus=4, memory_gb=16), 1)
    assert [quote.offer.name for quote in found.quotes] == ["sizeless"]
    assert [str(refusal) for refusal in found.refusals] == ["Shop: small: 2 vCPUs, 4 asked"]


def test_reasons_of_a_plan_an_error_and_an_empty_answer_are_all_kept() -> None:
    plan = Plan("Shop", "1 node", 1, (), (RuledOut("x1.big", "no room"),), ("disks are extra",))
    some = ask(Shop(plan), Spec(), 1) + ask(Shop(wrong="closed today."), Spec(), 1) + ask(Shop(), Spec(), 1)
    assert [str(refusal) for refusal in some.refusals] == [
        "Shop: x1.big: no room",
        "Shop: closed today.",
        "Shop: it has nothing that fits",
    ]
    assert some.notes == ("disks are extra",)
    assert (Quotes() + some) == some


def test_a_quota_says_no_only_where_it_is_certain() -> None:
    offer = CloudOffer("g", 1.0, 8, 32.0, "g5.2xlarge", "us-east-1", "us-east-1a", "spot")
    assert verdict(offer, 8, 64.0).possible is None
    full = verdict(offer, 9, 64.0)
    assert full.possible is False
    assert full.text == "quota 'All G and VT instances' (L-3819A6DF) allows 64 vCPUs, 72 asked"
    assert verdict(offer, 9, None).possible is None
