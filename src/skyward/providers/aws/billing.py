"""What machines came to, as AWS bills them: a receipt of a pool, with a bill for every machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyward.machines.offers import Market
from skyward.machines.price import Price, money
from skyward.machines.spent import Charge

__all__ = ["Bill", "Receipt", "charge"]

# Linux machines, gp3 volumes and public addresses are billed by the second, for a minute at least:
# https://aws.amazon.com/ec2/pricing/on-demand, https://aws.amazon.com/ebs/pricing, https://aws.amazon.com/vpc/pricing
_LEAST_SECONDS = 60.0
# A spot machine that AWS takes back before it is so old costs nothing; its disk and its address do:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/billing-for-interrupted-spot-instances.html
_FREE_IF_TAKEN_BACK = 3600.0


def charge(hourly: Price, market: Market, seconds: float, taken_back: bool = False) -> Price:
    """Dollars, in the same parts, for a machine of `seconds`; `taken_back`: AWS has ended it, not we."""
    costs = hourly.times(max(seconds, _LEAST_SECONDS) / 3600)
    if market == "spot" and taken_back and seconds < _FREE_IF_TAKEN_BACK:
        return Price(0.0, costs.disk, costs.address)
    return costs


@dataclass(frozen=True)
class Bill:
    """What one machine cost, from its launch to its end."""

    id: str
    kind: str
    zone: str
    market: Market
    seconds: float
    hourly: Price = field(default_factory=Price)
    taken_back: bool = False
    """Whether AWS has ended it, as it does with spot machines."""
    began: float = 0.0
    """When it was launched, in seconds since 1970; 0 where that is not known."""

    @property
    def hourly_cost(self) -> float:
        """Dollars an hour, with disk and public address; what is not known counts nothing."""
        return self.hourly.known_total

    @property
    def charged(self) -> Price:
        """Dollars, in parts; the machine's is infinite where its price is not known."""
        return charge(self.hourly, self.market, self.seconds, self.taken_back)

    @property
    def cost(self) -> float:
        """Dollars, traffic not counted; where the machine's price is not known, what the rest of it cost."""
        return self.charged.known_total

    @property
    def where(self) -> str:
        """In which zone, and how it was bought."""
        return f"{self.market}, {self.zone}{', taken back by AWS' if self.taken_back else ''}"

    @property
    def price(self) -> str:
        """The cost in words."""
        return f"{money(self.cost)}{'' if self.charged.known else ' and the machine, whose price is not known'}"

    def __str__(self) -> str:
        return f"{self.id}  {self.kind} ({self.where})  {self.seconds:,.0f} s  {self.price}"


@dataclass(frozen=True)
class Receipt:
    """What a pool created, what of it was read back as gone, and what it cost."""

    pool: str
    region: str
    machines: tuple[Bill, ...] = ()
    created: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    """What the user should know, such as that something strange carries the pool's tag."""

    def charges(self) -> list[Charge]:
        """What `sky cost` counts."""
        return [
            Charge(
                pool=self.pool,
                provider="AWS",
                began=bill.began,
                ended=bill.began + bill.seconds,
                dollars=bill.cost,
                machine=bill.id,
                market=bill.market,
                unknown=not bill.charged.known,
            )
            for bill in self.machines
            if bill.began
        ]

    def _repr_html_(self) -> str:
        from skyward.api.html import table

        columns = ["machine", "kind", "where", "seconds", "cost"]
        rows = [(bill.id, bill.kind, bill.where, f"{bill.seconds:,.0f}", bill.price) for bill in self.machines]
        return table(self._head, columns, rows, [self._total, *self.remarks])

    @property
    def costs(self) -> Price:
        """Dollars for all machines, in parts, as far as prices are known; traffic is not in it."""
        known = [bill.charged for bill in self.machines]
        return Price(
            sum(costs.machine for costs in known if costs.known),
            sum(costs.disk for costs in known),
            sum(costs.address for costs in known),
        )

    @property
    def total(self) -> float:
        """Dollars for all machines with disks and public addresses; traffic is not in it."""
        return self.costs.total

    def __str__(self) -> str:
        return "\n".join([self._head, *(f"  {line}" for line in (*self.machines, self._total, *self.remarks))])

    @property
    def _head(self) -> str:
        things = f"{len(self.created)} thing{'' if len(self.created) == 1 else 's'}"
        return f"pool {self.pool} in {self.region}: {things} created, {len(self.gone)} confirmed gone"

    @property
    def _total(self) -> str:
        unknown = sum(not bill.charged.known for bill in self.machines)
        least = f" and {unknown} {'machine' if unknown == 1 else 'machines'} of unknown price" if unknown else ""
        parts = f" ({self.costs}; traffic is not counted)" if self.machines else ""
        return f"total {money(self.total)}{least}{parts}"
