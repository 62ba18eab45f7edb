"""What providers offer for one wish, side by side: prices for all nodes, what is known of availability, and why not.

spec -> provider.offers -> fits? -> provider.availability -> [Quote], sorted by price; everything else is a Refusal
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from skyward.api.provider import Availability, Offer, Provider
from skyward.api.spec import Spec
from skyward.errors import SkywardError
from skyward.machines.offers import CloudOffer, Plan

__all__ = ["Quote", "Quotes", "Refusal", "ask", "offer_record", "price_record", "sorted_quotes", "too_small"]


@dataclass(frozen=True)
class Quote:
    """An offer of a provider, for `nodes` machines of it."""

    provider: str
    nodes: int
    offer: Offer
    availability: Availability

    @property
    def hourly_cost(self) -> float:
        """Dollars an hour for all nodes; infinite where the price is not known."""
        return self.nodes * self.offer.hourly_cost

    @property
    def per_accelerator(self) -> float | None:
        """Dollars an hour for one accelerator, the rest of its machine included; None where there is none."""
        count = self.offer.accelerators if isinstance(self.offer, CloudOffer) else 0
        return self.offer.hourly_cost / count if count else None

    def record(self) -> dict[str, Any]:
        """The quote as plain values, for programs: prices are None where they are not known."""
        return {
            "provider": self.provider,
            "nodes": self.nodes,
            "hourly_cost": price_record(self.hourly_cost),
            "hourly_cost_per_accelerator": price_record(self.per_accelerator),
            **offer_record(self.offer),
            "possible": self.availability.possible,
            "availability": self.availability.text,
        }


@dataclass(frozen=True)
class Refusal:
    """Something that cannot be had, or somebody who could not be asked, and why."""

    provider: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.provider}: {f'{self.what}: ' if self.what else ''}{self.why}"


@dataclass(frozen=True)
class Quotes:
    """What one provider, or several, had to say."""

    quotes: tuple[Quote, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Quotes) -> Quotes:
        notes = tuple(dict.fromkeys((*self.notes, *other.notes)))
        return Quotes(sorted_quotes((*self.quotes, *other.quotes)), (*self.refusals, *other.refusals), notes)


def ask(provider: Provider, spec: Spec, count: int, name: str = "") -> Quotes:
    """What a provider offers for `count` nodes of `spec`; an error is a reason why not. Creates nothing."""
    name = name or provider.name
    try:
        plan = provider.offers(spec, count)
        offers, small = list[Offer](), list[Refusal]()
        for offer in plan:
            reason = too_small(offer, spec)
            if reason is None:
                offers.append(offer)
            else:
                small.append(Refusal(name, offer.name, reason))
        known = provider.availability(offers, count) if offers else []
    except SkywardError as exc:
        return Quotes(refusals=(Refusal(name, "", str(exc)),))
    quotes = [Quote(name, count, offer, state) for offer, state in zip(offers, known, strict=True)]
    out, notes = (plan.ruled_out, plan.notes) if isinstance(plan, Plan) else ((), ())
    refused = [Refusal(name, item.what, item.why) for item in out]
    if not quotes and not refused and not small:
        refused = [Refusal(name, "", "it offers nothing for this")]
    return Quotes(sorted_quotes(quotes), (*small, *refused), tuple(notes))


def too_small(offer: Offer, spec: Spec) -> str | None:
    """Why an offer is too small, as far as its size is known; clouds have ruled such offers out themselves."""
    if spec.vcpus is not None and offer.vcpus is not None and offer.vcpus < spec.vcpus:
        return f"{offer.vcpus:g} vCPUs, {spec.vcpus:g} asked"
    if spec.memory_gb is not None and offer.memory_gb is not None and offer.memory_gb < spec.memory_gb * 0.92:
        return f"{offer.memory_gb:g} GB of memory, {spec.memory_gb:g} asked"
    return None


def sorted_quotes(quotes: Iterable[Quote]) -> tuple[Quote, ...]:
    """By price; what certainly cannot be had comes last, what has no known price before that."""
    return tuple(sorted(quotes, key=lambda quote: (quote.availability.possible is False, quote.hourly_cost)))


def offer_record(offer: Offer) -> dict[str, Any]:
    """An offer as plain values: one machine of it."""
    cloud = offer if isinstance(offer, CloudOffer) else None
    return {
        "name": offer.name,
        "machine": cloud.kind if cloud else offer.name,
        "region": cloud.region if cloud else None,
        "zone": (cloud.zone or None) if cloud else None,
        "market": cloud.market if cloud else None,
        "hourly_cost_per_node": price_record(offer.hourly_cost),
        "price": cloud.price if cloud else "live",
        "vcpus": offer.vcpus,
        "memory_gb": offer.memory_gb,
        "accelerator": (cloud.accelerator or None) if cloud else None,
        "accelerators": cloud.accelerators if cloud else None,
        "accelerator_gb": (cloud.accelerator_gb or None) if cloud else None,
    }


def price_record(dollars: float | None) -> float | None:
    """Dollars for JSON, which has no infinity: None where a price is not known."""
    return None if dollars is None or not math.isfinite(dollars) else round(dollars, 6)
