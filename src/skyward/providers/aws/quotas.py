"""What the quotas of an account say about offers; asked only where someone wants to know, never to launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyward.api.provider import Availability, Offer
from skyward.errors import CloudError
from skyward.machines.offers import CloudOffer
from skyward.providers.aws.api import Api
from skyward.providers.aws.errors import quota_code, quota_of

__all__ = ["allowed", "verdict"]

_CAPACITY = "capacity not known"


def allowed(connect: Callable[[str], Api], offers: Sequence[Offer], count: int) -> list[Availability]:
    """What the quotas of the account say about `count` machines of each offer; `connect` is told the region."""
    limits: dict[tuple[str, str], float | None] = {}
    found: list[Availability] = []
    for offer in offers:
        code = quota_code(offer.kind, offer.market) if isinstance(offer, CloudOffer) else ""
        if not isinstance(offer, CloudOffer) or not code or offer.reservation:
            found.append(Availability(_CAPACITY))
            continue
        place = (offer.region, code)
        if place not in limits:
            limits[place] = _limit(connect(offer.region), code)
        found.append(verdict(offer, count, limits[place]))
    return found


def verdict(offer: CloudOffer, count: int, limit: float | None) -> Availability:
    """Whether a quota of `limit` vCPUs has room for `count` machines, if nothing else runs; None: not known."""
    if limit is None:
        return Availability(f"quota not known; {_CAPACITY}")
    asked = count * (offer.vcpus or 0)
    if asked > limit:
        quota = quota_of(offer.kind, offer.market)
        return Availability(f"quota {quota} allows {limit:g} vCPUs, {asked:g} asked", possible=False)
    return Availability(f"within the quota of {limit:g} vCPUs; {_CAPACITY}")


def _limit(api: Api, code: str) -> float | None:
    try:
        answer = api.call("service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode=code)
        return float(answer["Quota"]["Value"])
    except (CloudError, KeyError, TypeError, ValueError):  # not allowed to ask: Skyward does not need it to launch
        return None
