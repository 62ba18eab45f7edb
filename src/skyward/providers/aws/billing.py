"""What machines come to, as AWS bills them, and what its quotas allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyward.api.provider import Availability, Offer
from skyward.errors import CloudError
from skyward.machines.cloud import Bill
from skyward.machines.offers import CloudOffer, Market, Price
from skyward.providers.aws.api import Api, quota_code, quota_of

__all__ = ["AwsBill", "allowed", "charge", "verdict"]


# Linux machines, gp3 volumes and public addresses are billed by the second, for a minute at least:
# https://aws.amazon.com/ec2/pricing/on-demand, https://aws.amazon.com/ebs/pricing, https://aws.amazon.com/vpc/pricing
_LEAST_SECONDS = 60.0
# A spot machine that AWS takes back before it is so old costs nothing; its disk and its address do:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/billing-for-interrupted-spot-instances.html
_FREE_IF_TAKEN_BACK = 3600.0


def charge(hourly: Price, market: Market, seconds: float, taken_back: bool = False) -> Price:
    costs = hourly.times(max(seconds, _LEAST_SECONDS) / 3600)
    if market == "spot" and taken_back and seconds < _FREE_IF_TAKEN_BACK:
        return Price(0.0, costs.disk, costs.address)
    return costs


@dataclass(frozen=True)
class AwsBill(Bill):
    @property
    def charged(self) -> Price:
        return charge(self.hourly, self.market, self.seconds, self.taken_back)

    @property
    def where(self) -> str:
        return f"{super().where} by AWS" if self.taken_back else super().where


_CAPACITY = "capacity not known"


def allowed(connect: Callable[[str], Api], offers: Sequence[Offer], count: int) -> list[Availability]:
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
