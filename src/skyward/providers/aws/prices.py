"""What machines and their disks cost: asked of AWS, and unknown where the account may not ask."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from skyward.errors import CloudRefused
from skyward.machines.offers import Market, PriceSource
from skyward.machines.parallel import each
from skyward.providers.aws.api import Api

__all__ = ["LIST_PRICES", "PUBLIC_ADDRESS", "ROOM_GB", "Disk", "Prices", "ask", "forget", "root_disk"]


_HOURS = 730  # of a month, as AWS's own calculator has it
_FREE_IOPS, _FREE_THROUGHPUT = 3000, 125  # are in the price of the size
_IOPS_A_MIB = 4  # a volume has to have so many for each MiB/s
# Images of this size have drivers and libraries in them that are read at boot and by the first import.
_LARGE_IMAGE = 30
_LARGE_THROUGHPUT = 300
ROOM_GB = 30


@dataclass(frozen=True)
class Disk:
    gb: int
    throughput: int = _FREE_THROUGHPUT
    """MiB/s."""
    iops: int = _FREE_IOPS

    def __str__(self) -> str:
        fast = f", {self.throughput} MiB/s" if self.throughput > _FREE_THROUGHPUT else ""
        return f"{self.gb} GB gp3{fast}"


@dataclass(frozen=True)
class DiskPrices:
    """Dollars per month for a GB, an extra IOPS, and an extra MiB/s."""

    gb: float
    iops: float
    throughput: float

    def hourly(self, disk: Disk) -> float:
        iops, throughput = max(0, disk.iops - _FREE_IOPS), max(0, disk.throughput - _FREE_THROUGHPUT)
        return (disk.gb * self.gb + iops * self.iops + throughput * self.throughput) / _HOURS


LIST_PRICES = DiskPrices(0.08, 0.005, 0.04)
"""us-east-1, https://aws.amazon.com/ebs/pricing; used where AWS gives no others."""


def root_disk(image_gb: int, size: int | None = None, throughput: int | None = None, most: float = 0.0) -> Disk:
    """`most`: what the machine can read in MB/s (0: not known)."""
    gb = max(size, image_gb) if size else max(50, image_gb + ROOM_GB)
    if throughput is None:
        raised = _LARGE_THROUGHPUT if image_gb >= _LARGE_IMAGE else _FREE_THROUGHPUT
        throughput = max(_FREE_THROUGHPUT, min(raised, int(most)) if most else raised)
    return Disk(gb, throughput, max(_FREE_IOPS, throughput * _IOPS_A_MIB))


PUBLIC_ADDRESS = 0.005
"""Dollars per hour in every region: https://aws.amazon.com/vpc/pricing."""

_FIXED = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",  # without it, capacity blocks come along
}
_VALUE = 1024  # characters of a filter's value
_AT_ONCE = 4
_PATIENCE = 15.0  # seconds that a throttled question is repeated; prices are not worth more
# AWS's price of throughput is for 1024 MiB/s.
_DISK_PARTS = {"VolumeUsage.gp3": ("gb", 1.0), "P-IOPS.gp3": ("iops", 1.0), "P-Throughput.gp3": ("throughput", 1024.0)}

_Answer = tuple[dict[str, float | None], dict[str, CloudRefused]]
_known: dict[tuple[Any, ...], Any] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Prices:
    demand: dict[str, float]
    spot: dict[tuple[str, str], float]
    notes: tuple[str, ...] = ()
    disk: DiskPrices = field(default_factory=lambda: LIST_PRICES)

    def of(self, kind: str, zone: str, market: Market) -> tuple[float, PriceSource]:
        demand = self.demand.get(kind, math.inf)
        if market == "on-demand":
            return demand, "unknown" if math.isinf(demand) else "live"
        spot = self.spot.get((kind, zone))
        if spot is not None:
            return spot, "live"
        # AWS never charges more for spot than for on-demand unless told so.
        return demand, "unknown" if math.isinf(demand) else "at most"


def ask(api: Api, kinds: Sequence[str], spot: bool = True) -> Prices:
    notes: list[str] = []
    pace = api.account.pace
    hasty = replace(api, account=replace(api.account, pace=replace(pace, budget=min(pace.budget, _PATIENCE))))
    demand = _demand(hasty, sorted(set(kinds)), notes)
    disk = _disk(hasty, notes) if demand else LIST_PRICES  # who may not ask for the one may not ask for the other
    return Prices(demand, _spot(api, sorted(set(kinds)), notes) if spot else {}, tuple(notes), disk)


def forget() -> None:
    with _lock:
        _known.clear()


def list_price(product: Mapping[str, Any], name: str = "instanceType") -> tuple[str, float] | None:
    kind = product.get("product", {}).get("attributes", {}).get(name)
    terms: dict[str, Any] = product.get("terms", {}).get("OnDemand", {})
    for term in terms.values():
        for dimension in term.get("priceDimensions", {}).values():
            price = float(dimension.get("pricePerUnit", {}).get("USD") or 0)
            if kind and price > 0:
                return str(kind), price
    return None


def _demand(api: Api, kinds: list[str], notes: list[str]) -> dict[str, float]:
    account = api.account
    place = (account.endpoint_url, account.profile, account.region)
    refused: dict[str, CloudRefused] = {}
    with _lock:
        unasked = [kind for kind in kinds if (*place, kind) not in _known]
        for prices, refusals in _answers(api, unasked):
            _known.update({(*place, kind): price for kind, price in prices.items()})
            refused |= refusals
        known = {kind: _known.get((*place, kind)) for kind in kinds}
    if refused:
        # Prices are not worth failing for: whoever may not ask is told, and what is known stays known.
        exc = next(iter(refused.values()))
        which = "are" if len(refused) == len(kinds) else f"of {len(refused)} of {len(kinds)} types are"
        notes.append(f"prices: on-demand prices {which} not known, since AWS refused {exc.action} ({exc.code})")
    return {kind: price for kind, price in known.items() if price is not None}


def _answers(api: Api, kinds: list[str]) -> list[_Answer]:
    answers = each(partial(_batch, api), _batches(kinds), _AT_ONCE)
    priced = any(price is not None for prices, _ in answers for price in prices.values())
    final = any(exc.kind != "other" for _, refused in answers for exc in refused.values())
    if priced or final or len(kinds) < 2:
        return answers
    # several at once is what AWS does not take, or does not understand
    return each(partial(_batch, api), [[kind] for kind in kinds], _AT_ONCE)


def _batches(kinds: Sequence[str]) -> list[list[str]]:
    batches: list[list[str]] = []
    for kind in kinds:
        if not batches or len(",".join([*batches[-1], kind])) > _VALUE:
            batches.append([])
        batches[-1].append(kind)
    return batches


def _batch(api: Api, kinds: list[str]) -> _Answer:
    try:
        found = _types(api, "ANY_OF", ",".join(kinds)) if len(kinds) > 1 else _types(api, "TERM_MATCH", kinds[0])
        return {kind: found.get(kind) for kind in kinds}, {}
    except CloudRefused as exc:
        return {}, dict.fromkeys(kinds, exc)


def _types(api: Api, how: str, value: str) -> dict[str, float]:
    return _products(api, {**_FIXED, "regionCode": api.account.region}, "instanceType", (how, value))


def _disk(api: Api, notes: list[str]) -> DiskPrices:
    account = api.account
    key = (account.endpoint_url, account.profile, account.region, "gp3 volumes")
    with _lock:
        if key in _known:
            return _known[key]
        try:
            found = _products(api, {"volumeApiName": "gp3", "regionCode": account.region}, "usagetype")
        except CloudRefused as exc:
            notes.append(f"prices: disks are counted at the prices of us-east-1, since AWS refused ({exc.code})")
            return LIST_PRICES
        parts = {
            field: price / unit
            for usage, price in found.items()
            for end, (field, unit) in _DISK_PARTS.items()
            if usage.endswith(end)
        }
        _known[key] = replace(LIST_PRICES, **parts)
        return _known[key]


def _products(
    api: Api, requested: Mapping[str, str], name: str, which: tuple[str, str] | None = None
) -> dict[str, float]:
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in requested.items()]
    if which is not None:
        filters.append({"Type": which[0], "Field": name, "Value": which[1]})
    prices: dict[str, float] = {}
    token: str | None = None
    while True:
        more: dict[str, Any] = {"NextToken": token} if token else {}
        answer = api.call("pricing", "get_products", ServiceCode="AmazonEC2", Filters=filters, MaxResults=100, **more)
        items: list[str] = answer.get("PriceList") or []
        for item in items:
            found = list_price(json.loads(item), name)
            if found is not None:
                prices[found[0]] = found[1]
        token = answer.get("NextToken")
        if not token:
            return prices


def _spot(api: Api, kinds: list[str], notes: list[str]) -> dict[tuple[str, str], float]:
    try:
        history = api.pages(
            "ec2",
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=kinds,
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(UTC),
        )
    except CloudRefused as exc:
        if exc.kind in ("credentials", "expired"):
            raise
        notes.append(f"prices: spot prices are not known ({exc.code}); spot costs at most the on-demand price")
        return {}
    newest: dict[tuple[str, str], tuple[str, float]] = {}
    for item in history:
        key, when = (item["InstanceType"], item["AvailabilityZone"]), str(item["Timestamp"])
        if key not in newest or when > newest[key][0]:
            newest[key] = (when, float(item["SpotPrice"]))
    return {key: price for key, (_, price) in newest.items()}
