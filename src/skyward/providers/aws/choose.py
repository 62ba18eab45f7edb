"""From a spec to a plan: what EC2 has that fits, where, at what price, and what was ruled out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from skyward.accelerators import Accelerator
from skyward.api.spec import Spec
from skyward.errors import CloudRefused, InvalidArgument
from skyward.machines.offers import (
    CloudOffer,
    Market,
    Plan,
    Price,
    RuledOut,
    Shape,
    affordable,
    money,
    ordered,
    unfit,
    variant,
    wish,
)
from skyward.providers.aws.api import Api
from skyward.providers.aws.images import MachineImage, image_parameter, without_image
from skyward.providers.aws.network import Subnet
from skyward.providers.aws.prices import PUBLIC_ADDRESS, Disk, Prices, ask, root_disk

__all__ = [
    "Choice",
    "EfaChoice",
    "attempts",
    "find_reservation",
    "interfaces",
    "make_plan",
    "shape",
    "shapes",
    "variant_of",
]


# EC2 has no filter for accelerators; these families have all of them, and those to come.
_ACCELERATED = ("g*", "p*", "trn*", "inf*", "dl*")
_SIZES = (2, 4, 8, 16, 24, 32, 36, 48, 64, 72, 96, 128, 144, 176, 192, 224, 256, 384, 448, 768, 896)
# The API reports the memory of a whole node there, not of a chip.
_UNRELIABLE_MEMORY = ("Trainium2", "Trainium3")

_known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
_lock = threading.Lock()


def shapes(api: Api, spec: Spec, kinds: Sequence[str] = ()) -> list[Shape]:
    requested: dict[str, tuple[str, ...]]
    if kinds:
        requested = {"instance-type": tuple(kinds)}
    elif spec.accelerator is not None:
        requested = {"instance-type": _ACCELERATED}
    else:
        requested = {
            "current-generation": ("true",),
            "bare-metal": ("false",),
            "processor-info.supported-architecture": (spec.architecture or "x86_64",),
            "vcpu-info.default-vcpus": _sizes(spec.vcpus, spec.memory_gb),
        }
    return [shape(item) for item in _described(api, requested)]


def shape(described: dict[str, Any]) -> Shape:
    kind: str = described["InstanceType"]
    name, count, memory, fraction = _accelerator(described)
    classes: list[str] = described.get("SupportedUsageClasses") or []
    markets: list[Market] = [market for market in ("on-demand", "spot") if market in classes]
    return Shape(
        kind=kind,
        vcpus=described["VCpuInfo"]["DefaultVCpus"],
        memory_gb=described["MemoryInfo"]["SizeInMiB"] / 1024,
        architectures=tuple(described["ProcessorInfo"]["SupportedArchitectures"]),
        accelerator=name,
        accelerators=count,
        accelerator_gb=memory,
        fraction=fraction,
        bare_metal=bool(described.get("BareMetal")),
        outdated=not described.get("CurrentGeneration", True),
        burstable=bool(described.get("BurstablePerformanceSupported")),
        cluster="cluster" in (described.get("PlacementGroupInfo") or {}).get("SupportedStrategies", ()),
        disk_mbps=float(described.get("EbsInfo", {}).get("EbsOptimizedInfo", {}).get("MaximumThroughputInMBps") or 0.0),
        efa_cards=_efa_cards(described.get("NetworkInfo") or {}),
        markets=tuple(markets),
    )


def offerings(api: Api, kinds: Sequence[str]) -> dict[str, set[str]]:
    zones: dict[str, set[str]] = {}
    for start in range(0, len(kinds), 100):
        some = [{"Name": "instance-type", "Values": list(kinds[start : start + 100])}]
        found = api.pages(
            "ec2",
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=some,
        )
        for item in found:
            zones.setdefault(item["InstanceType"], set()).add(item["Location"])
    return zones


def _described(api: Api, requested: dict[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    # What types exist does not change while a program runs: asked once.
    key = (api.account.endpoint_url, api.account.region, tuple(sorted(requested.items())))
    with _lock:
        if key not in _known:
            filters = [{"Name": name, "Values": list(values)} for name, values in requested.items()]
            _known[key] = api.pages("ec2", "describe_instance_types", "InstanceTypes", Filters=filters)
        return _known[key]


def _sizes(vcpus: float | None, memory_gb: float | None) -> tuple[str, ...]:
    least = vcpus or 2
    # few machines have less than 2 GB a vCPU, so more of them than this are not needed for the memory either
    most = max(4 * least, (memory_gb or 0) / 2, 4)
    fitting = [size for size in _SIZES if least <= size <= most]
    return tuple(str(size) for size in fitting or [size for size in _SIZES if size >= least][:1] or _SIZES[-1:])


def _efa_cards(network: dict[str, Any]) -> tuple[int, ...]:
    if not network.get("EfaSupported"):
        return ()
    cards: list[dict[str, Any]] = network.get("NetworkCards") or []
    info: dict[str, int] = network.get("EfaInfo") or {}
    most = info.get("MaximumEfaInterfaces") or 1
    able = [int(card["NetworkCardIndex"]) for card in cards if "efa" in " ".join(card.get("InterfaceTypes") or ["efa"])]
    return tuple(sorted(able)[:most])


def _accelerator(described: dict[str, Any]) -> tuple[str, int, float, bool]:
    gpus: dict[str, Any] = described.get("GpuInfo") or {}
    neurons: dict[str, Any] = described.get("NeuronInfo") or {}
    devices: list[dict[str, Any]] = gpus.get("Gpus") or neurons.get("NeuronDevices") or []
    for device in devices:
        name, count = str(device["Name"]), int(device.get("Count") or 0)
        memory = float(device.get("MemoryInfo", {}).get("SizeInMiB", 0)) * 1.048576 / 1000
        fraction = count == 0 or float(device.get("GpuPartitionSize") or 1) < 1
        return name, count, 0.0 if name in _UNRELIABLE_MEMORY else memory, fraction
    return "", 0, 0.0, False


# EFA, the network adapter that NCCL uses between machines: where it is used, and the interfaces that it takes.
#
# One interface may have a public address only if it is the only one, so machines with such an address use one card.


@dataclass(frozen=True)
class EfaChoice:
    asked: bool | None = None
    nodes: int = 1
    own_image: bool = False
    own_group: bool = False
    private: bool = False

    def why_not(self, offer: CloudOffer) -> str | None:
        if self.asked is False:
            return "efa=False"
        if not offer.efa_cards:
            return f"{offer.kind} has none"
        if self.nodes < 2 and not self.asked:
            return "there is one node"
        if not self.private and 0 not in offer.efa_cards:
            return (
                f"{offer.kind} has none on the card with the public address; use_private_ip=True uses its other cards"
            )
        if self.asked:
            return None
        if not offer.accelerator or offer.accelerator.startswith(("Trainium", "Inferentia")):
            return "it is used between NVIDIA GPUs only, unless efa=True"
        if self.own_image:
            return "it is not known whether the image of ami=... has its driver; efa=True says so"
        if self.own_group:
            return "the group would have to allow all traffic from and to itself; efa=True says that it does"
        return None

    def sentence(self, offer: CloudOffer) -> str | None:
        if not offer.efa_cards or (self.nodes < 2 and not self.asked):
            return None
        why = self.why_not(offer)
        if why is not None:
            return f"EFA is not used: {why}"
        cards = len(offer.efa_cards)
        if self.private or cards == 1:
            return f"EFA is used between machines of one zone, {cards} network card{'' if cards == 1 else 's'} each"
        return (
            f"EFA is used between machines of one zone, on 1 of {cards} network cards, since only machines with one "
            "interface get a public address; use_private_ip=True uses all"
        )


def interfaces(offer: CloudOffer, subnet: str, group: str, private: bool, efa: bool) -> list[dict[str, Any]]:
    common = {"SubnetId": subnet, "Groups": [group]}
    first: dict[str, Any] = {"DeviceIndex": 0, **common}
    if efa and 0 in offer.efa_cards:
        first["InterfaceType"] = "efa"
    others = [card for card in offer.efa_cards if card] if efa and private else []
    if not others:
        return [{**first, "AssociatePublicIpAddress": not private}]
    first |= {"NetworkCardIndex": 0, "DeleteOnTermination": True}
    return [
        first,
        *(
            {"DeviceIndex": 1, "NetworkCardIndex": card, "InterfaceType": "efa-only", "DeleteOnTermination": True}
            | common
            for card in others
        ),
    ]


# Trying more kinds of machines than these when there is no capacity only delays the error.
_KINDS = 8


@dataclass(frozen=True)
class Choice:
    image: Callable[[CloudOffer], MachineImage]
    kinds: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    burstable: bool | None = None
    own_image: bool = False
    ubuntu: str = "24.04"
    root_gb: int | None = None
    throughput: int | None = None
    private: bool = False
    efa: EfaChoice = field(default_factory=EfaChoice)
    reservation: Reservation | None = None

    def unfit(self, shape: Shape, spec: Spec) -> str | None:
        # a pattern such as "*.large" names no family
        named = any(fnmatchcase(shape.kind, kind) for kind in self.kinds if kind[0] not in "*?[")
        burstable = named if self.burstable is None else self.burstable
        return unfit(shape, spec, burstable, shape.kind in self.kinds)

    def disk(self, offer: CloudOffer) -> Disk:
        return root_disk(self.image(offer).root_gb, self.root_gb, self.throughput, offer.disk_mbps)


def make_plan(api: Api, spec: Spec, count: int, choice: Choice, subnets: Sequence[Subnet]) -> Plan:
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
    """All nodes in one zone for every offer of a price class, then spread over its zones. `mixed`: by price alone."""
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
    machine, source = (0.0, "live") if offer.block else prices.of(offer.kind, offer.zone, offer.market)
    parts = Price(machine, prices.disk.hourly(choice.disk(offer)), 0.0 if choice.private else PUBLIC_ADDRESS)
    return replace(offer, hourly_cost=parts.total, parts=parts, price=source)


def _explained(offers: Sequence[CloudOffer], choice: Choice) -> list[str]:
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
    if spec.accelerator is None:
        return False  # hundreds of sizes that are too small or too large say nothing
    reason = unfit(shape, spec) or ""
    return not reason.endswith(f", {spec.accelerator.name} asked")


@dataclass(frozen=True)
class Reservation:
    id: str
    kind: str
    zone: str
    free: int
    block: bool = False

    @property
    def name(self) -> str:
        return f"{'capacity block' if self.block else 'reservation'} {self.id}"


def find_reservation(api: Api, id: str) -> Reservation:
    region = api.account.region
    try:
        answer = api.call("ec2", "describe_capacity_reservations", CapacityReservationIds=[id])
    except CloudRefused as exc:
        if exc.kind != "missing" and not exc.code.startswith("InvalidCapacityReservation"):
            raise
        answer = {}
    found: list[dict[str, Any]] = answer.get("CapacityReservations") or []
    if not found:
        raise InvalidArgument(
            f"capacity_reservation={id!r}: there is none in {region} that this account may use. Nothing was created. "
            "Give the id of one there, as `aws ec2 describe-capacity-reservations` lists them."
        )
    item = found[0]
    state = str(item.get("State", ""))
    if state != "active":
        begins = item.get("StartDate")
        when = f" It begins at {begins:%Y-%m-%d %H:%M} UTC." if state == "scheduled" and begins is not None else ""
        raise InvalidArgument(
            f"capacity_reservation={id!r} is {state}: no machine can be launched into it.{when} Nothing was created. "
            "Open the pool when it is active, or give another."
        )
    return Reservation(
        id,
        str(item["InstanceType"]),
        str(item["AvailabilityZone"]),
        int(item.get("AvailableInstanceCount") or 0),
        item.get("ReservationType") == "capacity-block",
    )
