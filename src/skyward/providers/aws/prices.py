"""What machines cost an hour: asked of AWS, and unknown where the account may not ask."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from skyward.errors import CloudRefused
from skyward.machines.offers import Market, PriceSource
from skyward.machines.parallel import each
from skyward.providers.aws.api import Api

__all__ = ["Prices", "ask", "list_price"]

# From so many types on it is less work to read the whole list of a region.
_MANY = 12
_FIXED = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",  # without it, capacity blocks come along
}
_lists: dict[tuple[Any, ...], dict[str, float]] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Prices:
    """Prices of one region, and a sentence on where they come from."""

    demand: dict[str, float]
    spot: dict[tuple[str, str], float]
    notes: tuple[str, ...] = ()

    def of(self, kind: str, zone: str, market: Market) -> tuple[float, PriceSource]:
        """Dollars an hour and how far to trust them; without a spot price, what spot costs at most."""
        demand = self.demand.get(kind, math.inf)
        if market == "on-demand":
            return demand, "unknown" if math.isinf(demand) else "live"
        spot = self.spot.get((kind, zone))
        if spot is not None:
            return spot, "live"
        # AWS never charges more for spot than for on-demand unless told so.
        return demand, "unknown" if math.isinf(demand) else "at most"


def ask(api: Api, kinds: Sequence[str], spot: bool = True) -> Prices:
    """Prices for these kinds in the region of `api`."""
    notes: list[str] = []
    demand = _demand(api, sorted(set(kinds)), notes)
    return Prices(demand, _spot(api, sorted(set(kinds)), notes) if spot else {}, tuple(notes))


def list_price(product: dict[str, Any]) -> tuple[str, float] | None:
    """Type and on-demand price from one item of GetProducts."""
    kind = product.get("product", {}).get("attributes", {}).get("instanceType")
    terms: dict[str, Any] = product.get("terms", {}).get("OnDemand", {})
    for term in terms.values():
        for dimension in term.get("priceDimensions", {}).values():
            price = float(dimension.get("pricePerUnit", {}).get("USD") or 0)
            if kind and price > 0:
                return str(kind), price
    return None


def _demand(api: Api, kinds: list[str], notes: list[str]) -> dict[str, float]:
    region = api.account.region
    key = (api.account.endpoint_url, api.account.profile, region, tuple(kinds))
    try:
        with _lock:
            if key not in _lists:
                _lists[key] = _asked(api, kinds, region)
            return _lists[key]
    except CloudRefused as exc:
        # Prices are not worth failing for: whoever may not ask is told.
        notes.append(f"prices: on-demand prices are not known, since AWS refused {exc.action} ({exc.code})")
        return {}


def _asked(api: Api, kinds: list[str], region: str) -> dict[str, float]:
    if len(kinds) > _MANY:
        return _products(api, {**_FIXED, "regionCode": region})

    def one(kind: str) -> dict[str, float]:
        return _products(api, {**_FIXED, "regionCode": region, "instanceType": kind})

    return {kind: price for some in each(one, kinds, 6) for kind, price in some.items()}


def _products(api: Api, requested: dict[str, str]) -> dict[str, float]:
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in requested.items()]
    prices: dict[str, float] = {}
    token: str | None = None
    while True:
        more = {"NextToken": token} if token else {}
        answer = api.call(
            "pricing", "get_products", False, ServiceCode="AmazonEC2", Filters=filters, MaxResults=100, **more
        )
        items: list[str] = answer.get("PriceList") or []
        for item in items:
            found = list_price(json.loads(item))
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
