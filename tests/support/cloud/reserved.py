"""Capacity that is reserved in the test cloud: reservations and capacity blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.cloud.wire import Answer, Request, error, listed, xml

__all__ = ["Reserved"]

_TARGET = "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"


@dataclass
class _Room:
    kind: str
    zone: str
    count: int
    block: bool
    state: str
    used: int = 0


@dataclass
class Reserved:
    """All reservations, by id."""

    rooms: dict[str, _Room] = field(default_factory=dict[str, _Room])

    def add(self, kind: str, zone: str, count: int, block: bool, state: str) -> str:
        """One more of them."""
        id = f"cr-{len(self.rooms) + 1:017x}"
        self.rooms[id] = _Room(kind, zone, count, block, state)
        return id

    def refusal(self, params: Mapping[str, str], zone: str, market: str) -> tuple[str, str] | None:
        """Why machines cannot be launched into the reservation that they name; counts them if they can."""
        id = params.get(_TARGET)
        if id is None:
            return None if market != "capacity-block" else ("InvalidParameterCombination", "no block is named")
        room = self.rooms.get(id)
        if room is None or room.state != "active":
            return "InvalidCapacityReservationId.NotFound", f"no reservation {id} that is active"
        if (room.kind, room.zone, room.block) != (params["InstanceType"], zone, market == "capacity-block"):
            return "InvalidParameterValue", f"{id} is for {room.kind} in {room.zone}"
        if room.used + int(params["MinCount"]) > room.count:
            return "ReservationCapacityExceeded", f"{id} is full"
        room.used += int(params["MaxCount"])
        return None

    def described(self, request: Request) -> Answer:
        """DescribeCapacityReservations."""
        ids = listed(request.params, "CapacityReservationId")
        unknown = [id for id in ids if id not in self.rooms]
        if unknown:
            return error("ec2", "InvalidCapacityReservationId.NotFound", f"no reservation {unknown[0]}")
        items = [
            f"<item><capacityReservationId>{id}</capacityReservationId><instanceType>{room.kind}</instanceType>"
            f"<availabilityZone>{room.zone}</availabilityZone><state>{room.state}</state>"
            f"<totalInstanceCount>{room.count}</totalInstanceCount>"
            f"<availableInstanceCount>{room.count - room.used}</availableInstanceCount>"
            f"<reservationType>{'capacity-block' if room.block else 'default'}</reservationType>"
            "<startDate>2030-01-02T11:30:00.000Z</startDate></item>"
            for id, room in self.rooms.items()
            if id in ids
        ]
        return xml("DescribeCapacityReservations", f"<capacityReservationSet>{''.join(items)}</capacityReservationSet>")
