"""Capacity that the account has reserved: a reservation, or a capacity block, by its id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyward.errors import CloudRefused, InvalidArgument
from skyward.providers.aws.api import Api

__all__ = ["Reservation", "find_reservation"]


@dataclass(frozen=True)
class Reservation:
    """Room for machines of one kind in one zone."""

    id: str
    kind: str
    zone: str
    free: int
    """How many machines there is room for now."""
    block: bool = False
    """Whether it is a capacity block: for a time, and paid in advance."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"{'capacity block' if self.block else 'reservation'} {self.id}"


def find_reservation(api: Api, id: str) -> Reservation:
    """The reservation with this id, if machines can be launched into it now."""
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
