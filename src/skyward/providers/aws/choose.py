"""From a spec to a plan: what EC2 has that fits, where, at what price, and what was ruled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from skyward.accelerators import Accelerator
from skyward.api.spec import Spec
from skyward.machines.offers import CloudOffer, Plan, RuledOut, Shape, affordable, money, ordered, unfit, variant, wish
from skyward.providers.aws.api import Api
from skyward.providers.aws.catalogue import offerings, shapes
from skyward.providers.aws.images import image_parameter
from skyward.providers.aws.network import Subnet
from skyward.providers.aws.prices import Prices, ask

__all__ = ["Choice", "attempts", "make_plan", "variant_of"]

# Trying more kinds of machines than these when there is no capacity only delays the error.
_KINDS = 8


@dataclass(frozen=True)
class Choice:
    """The provider's settings that matter for choosing."""

    kinds: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    burstable: bool = True
    own_image: bool = False
    ubuntu: str = "24.04"


def make_plan(api: Api, spec: Spec, count: int, choice: Choice, subnets: Sequence[Subnet]) -> Plan:
    """What would be launched for `spec`; nothing is created."""
    known = shapes(api, spec, choice.kinds)
    fitting: list[Shape] = []
    out: list[RuledOut] = []
    for shape in known:
        reason = unfit(shape, spec, choice.burstable) or _without_image(shape, spec, choice)
        if reason is None:
            fitting.append(shape)
        elif choice.kinds or _near(shape, spec):
            out.append(RuledOut(shape.kind, reason))
    out += _absent(known, fitting, spec, choice, api.account.region)
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
    kept, too_expensive = affordable(ordered(offers, spec.allocation), count, spec.max_hourly_cost)
    kinds = list(dict.fromkeys(offer.kind for offer in kept))
    if len(kinds) > _KINDS:
        notes.append(f"{len(kinds) - _KINDS} more expensive types fit as well and are not tried, e.g. {kinds[_KINDS]}")
        kept = [offer for offer in kept if offer.kind in kinds[:_KINDS]]
    if kept and spec.max_hourly_cost is None and kept[0].price == "at most":
        notes.append(f"spot prices are not known; at most {money(count * kept[0].hourly_cost)} an hour")
    where = f"AWS in {api.account.region}"
    return Plan(where, wish(spec), count, tuple(kept), (*too_expensive, *out), tuple(notes))


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


def variant_of(kind: str, offers: Sequence[CloudOffer], requested: Accelerator | None) -> Accelerator | None:
    """What was asked for with the memory that machines of this kind have; None if nothing was left open."""
    sizes = {offer.accelerator_gb for offer in offers if offer.kind == kind}
    if requested is None or requested.exact or len(requested.variants) < 2 or not sizes <= set(requested.variants):
        return None
    return Accelerator(requested.name, f"{sizes.pop()}GB", requested.count, requested.metadata) if sizes else None


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
                    accelerator_gb=variant(shape, spec.accelerator),
                    price=source,
                    cluster=shape.cluster,
                )
            )
    requested = {"spot": ("spot",), "on-demand": ("on-demand",)}.get(spec.allocation, ("spot", "on-demand"))
    if not set(requested) & set(shape.markets):
        return [], [RuledOut(shape.kind, f"not offered as {spec.allocation}")]
    return made, []


def _without_image(shape: Shape, spec: Spec, choice: Choice) -> str | None:
    if choice.own_image or image_parameter(shape.accelerator, shape.architectures[0], choice.ubuntu) is not None:
        return None
    return f"AWS has no image with drivers for {shape.accelerator}; give one with ami=..."


def _absent(
    known: Sequence[Shape], fitting: Sequence[Shape], spec: Spec, choice: Choice, region: str
) -> list[RuledOut]:
    """What was asked for by name or size and does not exist at all, with what there is instead."""
    if choice.kinds:
        named = {kind for kind in choice.kinds if not any(fnmatchcase(shape.kind, kind) for shape in known)}
        return [RuledOut(kind, f"no such instance type in {region}") for kind in sorted(named)]
    if fitting:
        return []
    if spec.accelerator is None:
        largest = sorted(known, key=lambda shape: (shape.vcpus, shape.memory_gb))[:-4:-1]
        reasons = [(shape.kind, unfit(shape, spec, choice.burstable)) for shape in largest]
        return [RuledOut(kind, reason) for kind, reason in reasons if reason] or [
            RuledOut("CPUs", f"no machine in {region} has about {spec.vcpus or 2:g} of them")
        ]
    if any(_near(shape, spec) for shape in known):
        return []
    there = sorted({shape.accelerator for shape in known if shape.accelerator})
    return [RuledOut(spec.accelerator.name, f"no machine in {region} has it; there are {', '.join(there)}")]


def _near(shape: Shape, spec: Spec) -> bool:
    """Whether somebody who asked for `spec` would wonder why this one was not taken."""
    if spec.accelerator is None:
        return False  # hundreds of sizes that are too small or too large say nothing
    reason = unfit(shape, spec) or ""
    return not reason.endswith(f", {spec.accelerator.name} asked")
