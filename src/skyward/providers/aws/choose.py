"""From a spec to a plan: what EC2 has that fits, where, at what price, and what was ruled out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from skyward.accelerators import Accelerator
from skyward.api.spec import Spec
from skyward.errors import InvalidArgument
from skyward.machines.offers import (
    CloudOffer,
    Market,
    Plan,
    RuledOut,
    Shape,
    affordable,
    money,
    ordered,
    unfit,
    variant,
    wish,
)
from skyward.machines.price import Price
from skyward.providers.aws.api import Api
from skyward.providers.aws.catalogue import offerings, shapes
from skyward.providers.aws.disk import Disk, root_disk
from skyward.providers.aws.efa import EfaChoice
from skyward.providers.aws.images import MachineImage, image_parameter, without_image
from skyward.providers.aws.network import Subnet
from skyward.providers.aws.prices import PUBLIC_ADDRESS, Prices, ask
from skyward.providers.aws.reservation import Reservation

__all__ = ["Choice", "attempts", "make_plan", "variant_of"]

# Trying more kinds of machines than these when there is no capacity only delays the error.
_KINDS = 8


@dataclass(frozen=True)
class Choice:
    """The provider's settings that matter for choosing."""

    image: Callable[[CloudOffer], MachineImage]
    """The image that machines of an offer start from."""
    kinds: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    burstable: bool | None = None
    """Whether types with burstable CPUs will do; None: those that are named."""
    own_image: bool = False
    ubuntu: str = "24.04"
    root_gb: int | None = None
    throughput: int | None = None
    """Of the root disk, in MiB/s."""
    private: bool = False
    """Whether machines have no public address."""
    efa: EfaChoice = field(default_factory=EfaChoice)
    reservation: Reservation | None = None
    """Reserved capacity; there and nowhere else machines are launched then."""

    def unfit(self, shape: Shape, spec: Spec) -> str | None:
        """Why machines of this shape will not do."""
        # a pattern such as "*.large" names no family
        named = any(fnmatchcase(shape.kind, kind) for kind in self.kinds if kind[0] not in "*?[")
        burstable = named if self.burstable is None else self.burstable
        return unfit(shape, spec, burstable, shape.kind in self.kinds)

    def disk(self, offer: CloudOffer) -> Disk:
        """The root disk of a machine."""
        return root_disk(self.image(offer).root_gb, self.root_gb, self.throughput, offer.disk_mbps)


def make_plan(api: Api, spec: Spec, count: int, choice: Choice, subnets: Sequence[Subnet]) -> Plan:
    """What would be launched for `spec`; nothing is created."""
    reserved = choice.reservation
    if reserved is not None:
        if spec.allocation == "spot":
            raise InvalidArgument('allocation="spot" and capacity_reservation contradict each other. Give one of them.')
        choice = replace(choice, kinds=(reserved.kind,), zones=(reserved.zone,))
        spec = replace(spec, allocation="on-demand")
    known = shapes(api, spec, choice.kinds)
    fitting: list[Shape] = []
    out: list[RuledOut] = []
    for shape in known:
        reason = choice.unfit(shape, spec) or _without_image(shape, spec, choice)
        if reason is None and choice.efa.asked and not shape.efa_cards:
            reason = "it has no EFA, efa=True asked"
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
    if reserved is not None and reserved.free < count:
        out += [RuledOut(reserved.kind, f"{reserved.name} has room for {reserved.free}, {count} asked")]
        offers = []
    kept, too_expensive = affordable(ordered(offers, spec.allocation), count, spec.max_hourly_cost)
    if too_expensive and not kept and all(math.isinf(offer.hourly_cost) for offer in offers):
        out = [*_unpriced(notes, spec), *out]
    kinds = list(dict.fromkeys(offer.kind for offer in kept))
    if len(kinds) > _KINDS:
        notes.append(f"{len(kinds) - _KINDS} more expensive types fit as well and are not tried, e.g. {kinds[_KINDS]}")
        kept = [offer for offer in kept if offer.kind in kinds[:_KINDS]]
    if kept and spec.max_hourly_cost is None and kept[0].price == "at most":
        notes.append(f"spot prices are not known; at most {money(count * kept[0].hourly_cost)} an hour")
    if kept:
        notes += _explained(kept, choice)
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
    reserved = choice.reservation
    # some types exist in capacity blocks only
    markets: tuple[Market, ...] = shape.markets if reserved is None else ("on-demand",)
    for market in markets:
        for zone in zones:
            offer = CloudOffer(
                name=f"{shape.kind} ({market}, {zone})",
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
                cluster=shape.cluster and reserved is None,  # a reservation has its place
                burstable=shape.burstable,
                disk_mbps=shape.disk_mbps,
                efa_cards=shape.efa_cards,
                reservation="" if reserved is None else reserved.id,
                block=reserved is not None and reserved.block,
            )
            try:
                made.append(_priced(offer, choice, prices))
            except InvalidArgument as exc:
                if choice.own_image:
                    raise
                return [], [RuledOut(shape.kind, str(exc).partition(". ")[0])]
    requested = {"spot": ("spot",), "on-demand": ("on-demand",)}.get(spec.allocation, ("spot", "on-demand"))
    if not set(requested) & set(markets):
        return [], [RuledOut(shape.kind, f"not offered as {spec.allocation}")]
    return made, []


def _priced(offer: CloudOffer, choice: Choice, prices: Prices) -> CloudOffer:
    """The offer with its whole price: machine, disk and public address."""
    machine, source = (0.0, "live") if offer.block else prices.of(offer.kind, offer.zone, offer.market)
    parts = Price(machine, prices.disk.hourly(choice.disk(offer)), 0.0 if choice.private else PUBLIC_ADDRESS)
    return replace(offer, hourly_cost=parts.total, parts=parts, price=source)


def _explained(offers: Sequence[CloudOffer], choice: Choice) -> list[str]:
    """What the price consists of, and what is not in it."""
    first = offers[0]
    said = [f"one node of the first: {first.parts} an hour ({choice.disk(first)})" if first.parts.known else ""]
    said.append(
        "traffic is not counted: in us-east-1 it is $0.09 a GB that leaves AWS, $0.01 a GB each way between zones"
    )
    said.append(choice.efa.sentence(first) or "")
    if choice.reservation is not None and choice.reservation.block:
        said.append(f"{choice.reservation.name} is paid in advance: its machines are not counted again")
    elif choice.reservation is not None:
        said.append(f"{choice.reservation.name} costs the same whether machines run in it or not")
    if any(offer.burstable for offer in offers):
        said.append(
            "burstable types run with standard credits: slow once these are used up, and never billed beyond the price"
        )
    return [text for text in said if text]


def _unpriced(notes: Sequence[str], spec: Spec) -> list[RuledOut]:
    why = "; ".join(note.removeprefix("prices: ") for note in notes) or "AWS has no prices for these types"
    return [
        RuledOut(
            "prices",
            f"{why}. Without a price nothing is known to stay within max_hourly_cost={spec.max_hourly_cost:g}: have "
            "pricing:GetProducts allowed, try again later, or leave max_hourly_cost out",
        )
    ]


def _without_image(shape: Shape, spec: Spec, choice: Choice) -> str | None:
    if choice.own_image or image_parameter(shape.accelerator, shape.architectures[0], choice.ubuntu) is not None:
        return None
    return without_image(shape.accelerator)


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
        reasons = [(shape.kind, choice.unfit(shape, spec)) for shape in largest]
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
