"""The tags that everything of a pool carries from the call that creates it on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from skyward.machines.price import Price

__all__ = [
    "EXPIRES",
    "OWNER",
    "PARTS",
    "POOL",
    "PRICE",
    "VERSION",
    "Terms",
    "as_dict",
    "expiry",
    "filters",
    "price_of",
    "price_tags",
    "resource_name",
    "specification",
]

POOL, OWNER = "skyward:pool", "skyward:owner"
EXPIRES, VERSION = "skyward:expires-at", "skyward:version"
PRICE, PARTS = "skyward:hourly-cost", "skyward:hourly-parts"


@dataclass(frozen=True)
class Terms:
    """Whose pool it is and until when, as tags say it."""

    pool: str
    owner: str
    expires: float
    version: str
    extra: tuple[tuple[str, str], ...] = ()

    @property
    def tags(self) -> dict[str, str]:
        """Tags of everything; ours win over the user's."""
        until = datetime.fromtimestamp(self.expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ours = {POOL: self.pool, OWNER: self.owner[:256], EXPIRES: until, VERSION: self.version}
        return {**dict(self.extra), "Name": f"skyward {self.pool}", **ours}


def resource_name(pool: str) -> str:
    """What a pool's key and groups are called; unlike a tag, nobody can change it."""
    return f"skyward-{pool}"


def specification(kinds: Iterable[str], tags: Mapping[str, str]) -> list[dict[str, Any]]:
    """TagSpecifications for a create call."""
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    return [{"ResourceType": kind, "Tags": pairs} for kind in kinds]


def filters(**values: Sequence[str] | str) -> list[dict[str, Any]]:
    """Filters for a describe call; `pool=`, `owner=` stand for their tags, others for fields (`_` for `-`)."""
    names = {"pool": f"tag:{POOL}", "owner": f"tag:{OWNER}"}
    return [
        {"Name": names.get(key, key.replace("_", "-")), "Values": [value] if isinstance(value, str) else list(value)}
        for key, value in values.items()
    ]


def as_dict(thing: Mapping[str, Any]) -> dict[str, str]:
    """The tags of something that was described."""
    tags: list[dict[str, str]] = thing.get("Tags") or []
    return {tag["Key"]: tag["Value"] for tag in tags}


def price_tags(price: Price) -> dict[str, str]:
    """What a machine costs an hour, as tags: all of it, and its parts."""
    parts = " ".join(f"{name}={value:.6g}" for name, value in price.record().items())
    return {PRICE: f"{price.total:.6g}", PARTS: parts}


def price_of(tags: Mapping[str, str]) -> Price:
    """What a machine costs an hour, as its tags say, which anybody may have written; nothing where they cannot be."""
    try:
        parts = dict(part.split("=", 1) for part in tags.get(PARTS, "").split())
        return Price.read(parts or {"machine": tags.get(PRICE, 0)})
    except ValueError:
        return Price()


def expiry(tags: Mapping[str, str]) -> float | None:
    """When something expires, as a tag says; None where it says nothing that can be read."""
    try:
        return datetime.strptime(tags.get(EXPIRES, ""), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
