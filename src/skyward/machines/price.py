"""What a machine costs an hour, in its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["Price", "money"]


@dataclass(frozen=True)
class Price:
    """Dollars for one machine and all that comes with it; the machine is infinite where its price is not known."""

    machine: float = 0.0
    disk: float = 0.0
    address: float = 0.0
    """Of the public address."""

    @property
    def total(self) -> float:
        """All parts together; the one place where they are added up."""
        return self.machine + self.disk + self.address

    @property
    def known_total(self) -> float:
        """All parts together whose price is known."""
        return (self if self.known else replace(self, machine=0.0)).total

    @property
    def known(self) -> bool:
        """Whether the machine's own price is known."""
        return math.isfinite(self.machine)

    def times(self, count: float) -> Price:
        """So many of them, or one for so many hours."""
        return Price(self.machine * count, self.disk * count, self.address * count)

    def record(self) -> dict[str, float]:
        """The parts as plain numbers, for files and tags."""
        return asdict(self)

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> Price:
        """The parts from what `record` made; ValueError where those are no prices, whoever wrote them."""
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
    """Dollars, with as many digits as matter."""
    return f"${dollars:,.2f}" if dollars >= 1 else f"${dollars:.4f}".rstrip("0").rstrip(".") if dollars else "$0"
