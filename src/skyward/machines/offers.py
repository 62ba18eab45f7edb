"""Which machines to take: pure choices, with a reason for everything that is ruled out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from skyward.api.provider import Offer
from skyward.errors import SkywardError

if TYPE_CHECKING:
    from skyward.accelerators import Accelerator
    from skyward.api.provider import Availability, Provider
    from skyward.api.spec import Allocation, Architecture, Spec

__all__ = [
    "CloudOffer",
    "Market",
    "Offers",
    "Plan",
    "Planned",
    "Price",
    "PriceSource",
    "Quote",
    "Quotes",
    "Refusal",
    "RuledOut",
    "Shape",
    "affordable",
    "ask",
    "money",
    "offer_record",
    "ordered",
    "price_record",
    "unfit",
    "variant",
    "wish",
]


@dataclass(frozen=True)
class Price:
    """Dollars for one machine with disk and address; infinite where it is not known."""

    machine: float = 0.0
    disk: float = 0.0
    address: float = 0.0

    @property
    def total(self) -> float:
        return self.machine + self.disk + self.address

    @property
    def known_total(self) -> float:
        return (self if self.known else replace(self, machine=0.0)).total

    @property
    def known(self) -> bool:
        return math.isfinite(self.machine)

    def times(self, count: float) -> Price:
        return Price(self.machine * count, self.disk * count, self.address * count)

    def record(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> Price:
        names = cls.__dataclass_fields__
        try:
            price = cls(**{name: float(value) for name, value in recorded.items() if name in names})
        except (TypeError, AttributeError) as exc:
            raise ValueError(f"{recorded!r} is no price") from exc
        if not (price.machine >= 0 and 0 <= price.disk < math.inf and 0 <= price.address < math.inf):
            raise ValueError(f"{recorded!r} is no price")
        return price

    def __str__(self) -> str:
        machine = money(self.machine) if self.known else "price unknown"
        parts = [f"machine {machine}"]
        parts += [f"disk {money(self.disk)}"] if self.disk else []
        parts += [f"public address {money(self.address)}"] if self.address else []
        return " + ".join(parts)


def money(dollars: float) -> str:
    return f"${dollars:,.2f}" if dollars >= 1 else f"${dollars:.4f}".rstrip("0").rstrip(".") if dollars else "$0"


Market = Literal["spot", "on-demand"]
PriceSource = Literal["live", "at most", "unknown"]

# What devices report lies a little beside the number they are sold with: 22888 MiB is a "24 GB" card.
_TOLERANCE = 0.08
# A node runs Python, an agent and a runner beside the user's code; less than this is not a node.
_LEAST_VCPUS, _LEAST_GB = 2.0, 3.5
# Names that clouds use for what the catalogue calls otherwise.
_ALIASES = {"rtxproserver6000": "rtxpro6000", "trainium": "trainium1", "inferentia": "inferentia1"}


@dataclass(frozen=True)
class Shape:
    kind: str
    vcpus: float
    memory_gb: float
    architectures: tuple[str, ...] = ("x86_64",)
    accelerator: str = ""
    accelerators: int = 0
    accelerator_gb: float = 0.0
    fraction: bool = False
    bare_metal: bool = False
    outdated: bool = False
    burstable: bool = False
    cluster: bool = False
    disk_mbps: float = 0.0
    efa_cards: tuple[int, ...] = ()
    markets: tuple[Market, ...] = ("on-demand", "spot")


@dataclass(frozen=True)
class CloudOffer(Offer):
    kind: str = ""
    region: str = ""
    zone: str = ""
    market: Market = "on-demand"
    architecture: Architecture = "x86_64"
    accelerator: str = ""
    accelerators: int = 0
    accelerator_gb: int = 0
    price: PriceSource = "unknown"
    parts: Price = field(default_factory=Price)
    cluster: bool = False
    burstable: bool = False
    disk_mbps: float = 0.0
    efa_cards: tuple[int, ...] = ()
    reservation: str = ""
    block: bool = False

    def __str__(self) -> str:
        how = f"{'block' if self.block else 'reservation'} {self.reservation}" if self.reservation else self.market
        return f"{self.kind} ({how}, {self.zone or self.region})"


@dataclass(frozen=True)
class RuledOut:
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class Plan:
    provider: str
    wish: str
    nodes: int
    offers: tuple[CloudOffer, ...]
    ruled_out: tuple[RuledOut, ...] = ()
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[CloudOffer]:
        return iter(self.offers)

    @property
    def hourly_cost(self) -> float:
        return self.nodes * self.offers[0].hourly_cost if self.offers else math.inf

    def _repr_html_(self) -> str:
        from skyward.api.html import table

        rows = [
            (number, f"{self.nodes} x {offer}", _accelerators(offer), _priced(offer, self.nodes))
            for number, offer in enumerate(self.offers[:8], 1)
        ]
        more = str(self).split("\n")[1 + len(rows) :]
        return table(f"{self.wish}, from {self.provider}", ["", "machines", "with", "price"], rows, more)

    def __str__(self) -> str:
        lines = [f"{self.wish}, from {self.provider}:"]
        for number, offer in enumerate(self.offers[:8], 1):
            what = f" with {_accelerators(offer)}" if offer.accelerators else ""
            lines.append(f"  {number}. {self.nodes} x {offer}{what}, {_priced(offer, self.nodes)}")
        if len(self.offers) > 8:
            lines.append(f"  ... and {len(self.offers) - 8} more, tried in this order when there is no capacity")
        if not self.offers:
            lines.append("  nothing fits")
        if self.ruled_out:
            lines.append("ruled out:")
            lines += [f"  {item}" for item in self.ruled_out[:12]]
            if len(self.ruled_out) > 12:
                lines.append(f"  ... and {len(self.ruled_out) - 12} more")
        return "\n".join([*lines, *self.notes])


class Planned(Protocol):
    @property
    def offers(self) -> Sequence[Offer]: ...

    @property
    def ruled_out(self) -> Sequence[RuledOut]: ...

    @property
    def hourly_cost(self) -> float: ...


class Offers(list[Offer]):
    ruled_out: Sequence[RuledOut] = ()

    def __init__(self, offers: Iterable[Offer], nodes: int) -> None:
        super().__init__(offers)
        self.offers: Sequence[Offer] = tuple(self)
        self.hourly_cost = nodes * self[0].hourly_cost if self else math.inf
        self._nodes = nodes

    def __str__(self) -> str:
        lines: list[str] = []
        for number, offer in enumerate(self, 1):
            cost = self._nodes * offer.hourly_cost
            price = "price unknown" if math.isinf(cost) else f"{money(cost)} an hour" if cost else "no price"
            lines.append(f"  {number}. {offer.name}, {price}")
        return "\n".join(lines or ["  nothing fits"])


def _accelerators(offer: CloudOffer) -> str:
    memory = f" ({offer.accelerator_gb}GB)" if offer.accelerator_gb else ""
    return f"{offer.accelerators} x {offer.accelerator}{memory}" if offer.accelerators else ""


def wish(spec: Spec) -> str:
    parts: list[str] = []
    if spec.accelerator is not None:
        parts.append(spec.accelerator.described())
    if spec.vcpus is not None:
        parts.append(f"{spec.vcpus:g} vCPUs")
    if spec.memory_gb is not None:
        parts.append(f"{spec.memory_gb:g} GB of memory")
    if spec.architecture is not None:
        parts.append(spec.architecture)
    each = f" with {', '.join(parts)}" if parts else ""
    nodes = spec.nodes if isinstance(spec.nodes, int) else spec.nodes[1]
    return f"{nodes} {'node' if nodes == 1 else 'nodes'}{each}, {spec.allocation}"


def unfit(shape: Shape, spec: Spec, burstable: bool = True, named: bool = False) -> str | None:
    """Why machines of this shape are unsuitable, or None. `named`: the user asks for this type."""
    requested = spec.accelerator
    if requested is not None:
        reason = _other_accelerator(shape, requested)
        if reason is not None:
            return reason
    elif shape.accelerator:
        return f"has {shape.accelerators} x {shape.accelerator}, none asked (accelerator=... asks for it)"
    usual = requested is None and not named
    vcpus = spec.vcpus or (_LEAST_VCPUS if usual else 1)
    memory = spec.memory_gb or (_LEAST_GB if usual else 0.5)
    architecture = spec.architecture or ("x86_64" if usual else None)
    if shape.vcpus < vcpus:
        return f"{shape.vcpus:g} vCPUs, {vcpus:g} asked"
    if shape.memory_gb < memory * (1 - _TOLERANCE):
        return f"{shape.memory_gb:g} GB of memory, {memory:g} asked"
    if architecture is not None and architecture not in shape.architectures:
        return f"{'/'.join(shape.architectures)}, {architecture} asked"
    if shape.bare_metal and not named:
        return "bare metal, which takes many minutes to start"
    if shape.outdated and usual:
        return "of an old generation"
    if shape.burstable and not burstable:
        return "its CPUs are burstable: fast for a while, then slow"
    return None


def variant(shape: Shape, requested: Accelerator | None) -> int:
    if requested is None:
        return 0
    reported, sizes = shape.accelerator_gb, requested.variants
    if not reported:
        return sizes[0] if len(sizes) == 1 else 0
    return next((size for size in sizes if _about(reported, size)), round(reported))


def ordered(offers: Iterable[CloudOffer], allocation: Allocation) -> list[CloudOffer]:
    """In the order in which they are tried: at one price, newer first."""
    by_price = sorted(
        offers, key=lambda o: (o.hourly_cost, -_generation(o.kind), o.vcpus or 0, o.memory_gb or 0, o.kind, o.zone)
    )
    spot = [offer for offer in by_price if offer.market == "spot"]
    demand = [offer for offer in by_price if offer.market == "on-demand"]
    match allocation:
        case "spot":
            return spot
        case "on-demand":
            return demand
        case "spot-if-available":
            return spot + demand
        case "cheapest":
            return by_price


def affordable(
    offers: Iterable[CloudOffer], nodes: int, limit: float | None
) -> tuple[list[CloudOffer], list[RuledOut]]:
    if limit is None:
        return list(offers), []
    kept: list[CloudOffer] = []
    expensive: dict[tuple[str, str], CloudOffer] = {}
    for offer in offers:
        if nodes * offer.hourly_cost <= limit:
            kept.append(offer)
        else:
            expensive.setdefault((offer.kind, offer.market), offer)  # its other zones cost even more
    return kept, [RuledOut(str(offer), _too_expensive(offer, nodes, limit)) for offer in expensive.values()]


def _too_expensive(offer: CloudOffer, nodes: int, limit: float) -> str:
    total = nodes * offer.hourly_cost
    if math.isinf(total):
        return f"its price is not known, and max_hourly_cost={limit:g} is set"
    most = "up to " if offer.price == "at most" else ""
    return f"{most}{money(total)} an hour for {nodes}, max_hourly_cost={limit:g}"


def _priced(offer: CloudOffer, nodes: int) -> str:
    if math.isinf(offer.hourly_cost):
        return "price unknown"
    return f"{money(nodes * offer.hourly_cost)} an hour{' at most' if offer.price == 'at most' else ''}"


def _other_accelerator(shape: Shape, requested: Accelerator) -> str | None:
    if not shape.accelerator or _key(shape.accelerator) != _key(requested.name):
        return f"has {shape.accelerator or 'no accelerator'}, {requested.name} asked"
    if shape.fraction:
        return f"has a fraction of one {shape.accelerator}"
    if shape.accelerators < requested.count:
        return f"has {shape.accelerators} x {shape.accelerator}, {requested.count} asked"
    if requested.exact and shape.accelerator_gb and not _about(shape.accelerator_gb, requested.memory_gb):
        return f"its {shape.accelerator} has {shape.accelerator_gb:.0f} GB, {requested.memory_gb} GB asked"
    return None


def _generation(kind: str) -> int:
    found = re.match(r"[a-z]+(\d+)", kind)
    return int(found[1]) if found else 0


def _about(reported: float, asked: float) -> bool:
    # reported in GB; makers sell some as GB and some as GiB
    return min(abs(reported - asked), abs(reported / 1.073741824 - asked)) <= _TOLERANCE * asked


def _key(name: str) -> str:
    key = re.sub(r"[-_ ]", "", name).lower()
    return _ALIASES.get(key, key)


# What providers offer for one wish, side by side: prices for all nodes, what is known of availability, and why not.
#
# spec -> provider.offers -> fits? -> provider.availability -> [Quote], sorted by price; everything else is a Refusal


@dataclass(frozen=True)
class Quote:
    provider: str
    nodes: int
    offer: Offer
    availability: Availability

    @property
    def hourly_cost(self) -> float:
        return self.nodes * self.offer.hourly_cost

    @property
    def per_accelerator(self) -> float | None:
        count = self.offer.accelerators if isinstance(self.offer, CloudOffer) else 0
        return self.offer.hourly_cost / count if count else None

    def record(self) -> dict[str, Any]:
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
    provider: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.provider}: {f'{self.what}: ' if self.what else ''}{self.why}"


@dataclass(frozen=True)
class Quotes:
    quotes: tuple[Quote, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Quotes) -> Quotes:
        notes = tuple(dict.fromkeys((*self.notes, *other.notes)))
        return Quotes(sorted_quotes((*self.quotes, *other.quotes)), (*self.refusals, *other.refusals), notes)


def ask(provider: Provider, spec: Spec, count: int, name: str = "") -> Quotes:
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
        refused = [Refusal(name, "", "it has nothing that fits")]
    return Quotes(sorted_quotes(quotes), (*small, *refused), tuple(notes))


def too_small(offer: Offer, spec: Spec) -> str | None:
    if spec.vcpus is not None and offer.vcpus is not None and offer.vcpus < spec.vcpus:
        return f"{offer.vcpus:g} vCPUs, {spec.vcpus:g} asked"
    if spec.memory_gb is not None and offer.memory_gb is not None and offer.memory_gb < spec.memory_gb * 0.92:
        return f"{offer.memory_gb:g} GB of memory, {spec.memory_gb:g} asked"
    return None


def sorted_quotes(quotes: Iterable[Quote]) -> tuple[Quote, ...]:
    return tuple(sorted(quotes, key=lambda quote: (quote.availability.possible is False, quote.hourly_cost)))


def offer_record(offer: Offer) -> dict[str, Any]:
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
    return None if dollars is None or not math.isfinite(dollars) else round(dollars, 6)
