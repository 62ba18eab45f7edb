"""How long a sum of dollars lasts at given prices per hour."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skyward.errors import InvalidArgument

__all__ = ["LAST_MACHINE", "check_price", "spent_at"]

LAST_MACHINE = 600.0
"""No other machine is launched for a budget that ends sooner."""

_HOUR = 3600.0
_LEAST = 60.0


def spent_at(dollars: float, prices: Sequence[tuple[float, float]]) -> float:
    """At the last price; each price has its start."""
    for number, (since, hourly) in enumerate(prices):
        end = since + _HOUR * dollars / hourly if hourly > 0 else math.inf
        if number + 1 == len(prices) or end <= prices[number + 1][0]:
            return end
        dollars -= hourly * max(0.0, prices[number + 1][0] - since) / _HOUR
    return math.inf


def check_price(budget: float, hourly: float, provider: str) -> None:
    if not hourly:
        raise InvalidArgument(
            f"budget={budget:g}: {provider} has no prices, so Skyward cannot tell when it is spent. Limit the time "
            "instead, with ttl=seconds."
        )
    if not math.isfinite(hourly):
        raise InvalidArgument(
            f"budget={budget:g}: the price of these machines is not known, so Skyward cannot tell when it is spent. "
            f"Choose "
            "others (`sky offers` lists them with prices), or limit the time instead, with ttl=seconds."
        )
    if _HOUR * budget / hourly < _LEAST:
        raise InvalidArgument(
            f"budget={budget:g}: at {hourly:g} dollars an hour for all nodes, that lasts {_HOUR * budget / hourly:.0f} "
            "s. Raise it, or ask for fewer or cheaper machines."
        )
