"""From a wish to a plan: what EC2 has that fits, where, at what price, and what was ruled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyward.offers import CloudOffer, Plan, RuledOut, Shape, affordable, money, ordered, unfit, wish
from skyward.providers._aws.api import Api
from skyward.providers._aws.catalogue import offerings, shapes
from skyward.providers._aws.images import image_parameter
from skyward.providers._aws.network import Subnet
from skyward.providers._aws.prices import Prices, ask
from skyward.spec import Spec

__all__ = ["Choice", "attempts", "make_plan"]

# Trying more kinds of machines than these when there is no capacity only delays the error.
_KINDS = 8


@dataclass(frozen=True)
class Choice:
    """What of the provider's settings bears on choosing."""

    kinds: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    burstable: bool = True
    own_image: bool = False
    ubuntu: str = "24.04"


def make_plan(api: Api, spec: Spec, count: int, choice: Choice, subnets: Sequence[Subnet]) -> Plan:
    """What would be launched for `spec`; nothing is created."""
    fitting: list[Shape] = []
    out: list[RuledOut] = []
    for shape in shapes(api, spec, choice.kinds):
        reason = unfit(shape, spec, choice.burstable) or _without_image(shape, spec, choice)
        if reason is None:
            fitting.append(shape)
        elif choice.kinds or _near(shape, spec):
            out.append(RuledOut(shape.kind, reason))
    notes: list[str] = []
    offers: list[CloudOffer] = []
    if fitting:
        prices = ask(api, [shape.kind for shape in fitting], spot=spec.allocation != "on-demand")
        notes += prices.notes
        zones = offerings(api, [shape.kind for shape in fitting])
        for shape in fitting:
            some, why = _offers(shape, spec, choice, subnets, zones.get(shape.kind, set()), prices, api.account.region)
            offers += some
            out += why
    kept, dear = affordable(ordered(offers, spec.allocation), count, spec.max_hourly_cost)
    kinds = list(dict.fromkeys(offer.kind for offer in kept))
    if len(kinds) > _KINDS:
        notes.append(f"{len(kinds) - _KINDS} dearer types fit as well and are not tried, e.g. {kinds[_KINDS]}")
        kept = [offer for offer in kept if offer.kind in kinds[:_KINDS]]
    if kept and spec.max_hourly_cost is None and kept[0].price == "at most":
        notes.append(f"spot prices are not known; at most {money(count * kept[0].hourly_cost)} an hour")
    return Plan("AWS", wish(spec), count, tuple(kept), (*dear, *out), tuple(notes))


def attempts(offers: Sequence[CloudOffer], count: int, mixed: bool = False) -> list[tuple[CloudOffer, ...]]:
    """What is tried in turn: all nodes in one zone for every offer of a price class, then spread over its zones.

    `mixed`: price classes are tried by price alone, so spreading comes after all of them.
    """
    classes = [list(offers)] if mixed else [[o for o in offers if o.market == m] for m in ("spot", "on-demand")]
    tried: list[tuple[CloudOffer, ...]] = []
    for some in classes:
        tried += [(offer,) for offer in some]
        spread: dict[tuple[str, str], list[CloudOffer]] = {}
        for offer in some:
            spread.setdefault((offer.kind, offer.market), []).append(offer)
        tried += [tuple(zones) for zones in spread.values() if count > 1 and len(zones) > 1]
    return tried


def _offers(
    shape: Shape,
    spec: Spec,
    choice: Choice,
    subnets: Sequence[Subnet],
    offered: set[str],
    prices: Prices,
    region: str,
) -> tuple[list[CloudOffer], list[RuledOut]]:
    architecture = "x86_64" if spec.architecture is None and "x86_64" in shape.architectures else spec.architecture
    ours = {subnet.zone for subnet in subnets if not choice.zones or subnet.zone in choice.zones}
    zones = sorted(ours & offered)
    if not zones:
        return [], [RuledOut(shape.kind, f"not offered in {', '.join(sorted(ours)) or 'any zone that was named'}")]
    made: list[CloudOffer] = []
    for market in shape.markets:
        for zone in zones:
            cost, source = prices.of(shape.kind, zone, market)
            made.append(
                CloudOffer(
                    name=f"{shape.kind} ({market}, {zone})",
                    hourly_cost=cost,
                    vcpus=shape.vcpus,
                    memory_gb=shape.memory_gb,
                    kind=shape.kind,
                    region=region,
                    zone=zone,
                    market=market,
                    architecture=architecture or "arm64",
                    accelerator=shape.accelerator,
                    accelerators=shape.accelerators,
                    price=source,
                    cluster=shape.cluster,
                )
            )
    wanted = {"spot": ("spot",), "on-demand": ("on-demand",)}.get(spec.allocation, ("spot", "on-demand"))
    if not set(wanted) & set(shape.markets):
        return [], [RuledOut(shape.kind, f"not offered as {spec.allocation}")]
    return made, []


def _without_image(shape: Shape, spec: Spec, choice: Choice) -> str | None:
    if choice.own_image or image_parameter(shape.accelerator, shape.architectures[0], choice.ubuntu) is not None:
        return None
    return f"AWS has no image with drivers for {shape.accelerator}; give one with ami=..."


def _near(shape: Shape, spec: Spec) -> bool:
    """Whether somebody who asked for `spec` would wonder why this one was not taken."""
    if spec.accelerator is None:
        return False  # hundreds of sizes that are too small or too large say nothing
    reason = unfit(shape, spec) or ""
    return not reason.endswith(f", {spec.accelerator.name} asked")
