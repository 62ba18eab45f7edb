"""Instances as machines of a pool."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from skyward.api.provider import Leftover, Machine
from skyward.api.shell import SshTarget
from skyward.errors import CloudRefused, InvalidArgument
from skyward.machines.ledger import pool_dir
from skyward.machines.offers import Market
from skyward.machines.price import Price
from skyward.providers.aws.api import Api
from skyward.providers.aws.tags import POOL, as_dict, expiry, filters, price_of
from skyward.providers.aws.ways import LOGINS

__all__ = ["CloudMachine", "State", "described", "end", "machine", "tagged"]

_VALUES = 200  # that many values one filter takes
State = Literal["pending", "running", "stopping", "stopped", "shutting-down", "terminated"]


@dataclass(frozen=True)
class CloudMachine(Machine):
    """An instance: where it stands, what it costs, and how it is doing."""

    region: str = ""
    zone: str = ""
    kind: str = ""
    market: Market = "on-demand"
    price: Price = field(default_factory=Price)
    """What `hourly_cost` consists of."""
    launched: float = 0.0
    ended: float | None = None
    state: State = "pending"
    reason: str = ""
    token: str = ""
    """The token of the call that launched it, and the name of the key that it was launched with: neither can change."""
    key_name: str = ""
    image: str = ""
    architecture: str = "x86_64"
    volumes: tuple[str, ...] = ()
    """Disks that end with it."""
    tags: dict[str, str] = field(default_factory=dict[str, str], hash=False)

    @property
    def alive(self) -> bool:
        """Whether it runs, or will, or could again: whether it may cost money."""
        return self.state not in ("shutting-down", "terminated")

    @property
    def preemptible(self) -> bool:
        return self.market == "spot"

    @property
    def gone(self) -> str:
        return "" if self.state in ("pending", "running") else f"AWS has ended it ({self.reason or self.state})"

    @property
    def taken_back(self) -> bool:
        """Whether AWS has ended it because it needed the room."""
        return self.market == "spot" and self.reason.startswith("Server.Spot")

    @property
    def ready(self) -> bool:
        """Whether it runs and has an address by which it is reached."""
        return self.state == "running" and self.ssh is not None

    def leftover(self) -> Leftover:
        """The machine as `sky ps` lists it."""
        cost = self.hourly_cost if self.alive else 0.0
        detail = f"{self.kind}, {self.state}"
        return Leftover(self.tags.get(POOL, ""), self.id, "machine", detail, cost, expiry(self.tags))


def described(api: Api, ids: Sequence[str], **how: Any) -> list[CloudMachine]:
    """Instances by id, in the order of the ids; those that AWS does not show (yet, or any more) are left out."""
    found: dict[str, CloudMachine] = {}
    for start in range(0, len(ids), _VALUES):
        some = _asked(api, filters(instance_id=ids[start : start + _VALUES]), **how)
        found |= {item.id: item for item in some}
    return [found[id] for id in ids if id in found]


def tagged(api: Api, **requested: str) -> list[CloudMachine]:
    """Instances by tag (`pool=`, `owner=`), in any state."""
    return _asked(api, filters(**requested))


def end(api: Api, ids: Sequence[str]) -> dict[str, CloudRefused]:
    """Has instances terminated; those that AWS refuses or does not know (yet) come back with the refusal."""
    if not ids:
        return {}
    try:
        api.call("ec2", "terminate_instances", InstanceIds=list(ids), SkipOsShutdown=True)
    except CloudRefused as exc:
        if exc.kind in ("expired", "credentials", "permission", "throttled", "server"):
            raise
        if len(ids) == 1:
            return {ids[0]: exc}
        # One bad id spoils the call for all: the others go one by one.
        return {id: refused for one in ids for id, refused in end(api, [one]).items()}
    return {}


def machine(
    item: dict[str, Any],
    region: str,
    user: str = "ubuntu",
    private: bool = False,
    proxy: Callable[[str], str] | None = None,
) -> CloudMachine:
    """A machine from one item of DescribeInstances."""
    tags = as_dict(item)
    price = price_of(tags)
    state: State = item["State"]["Name"]
    public_ip, private_ip = item.get("PublicIpAddress"), item.get("PrivateIpAddress") or ""
    address = private_ip if private or proxy else public_ip
    target = _target(address, user, tags.get(POOL, "")) if address else None
    if target is not None and proxy is not None:
        target = replace(target, proxy=proxy(item["InstanceId"]), proxy_logins=LOGINS)
    launched = item.get("LaunchTime")
    reason: dict[str, str] = item.get("StateReason") or {}
    return CloudMachine(
        id=item["InstanceId"],
        private_ip=private_ip,
        public_ip=public_ip,
        ssh=target,
        region=region,
        zone=item.get("Placement", {}).get("AvailabilityZone", ""),
        kind=item.get("InstanceType", ""),
        market="spot" if item.get("InstanceLifecycle") == "spot" else "on-demand",
        hourly_cost=price.known_total,
        price=price,
        launched=launched.timestamp() if launched is not None else 0.0,
        ended=_ended(item.get("StateTransitionReason") or ""),
        state=state,
        reason=reason.get("Code", "") if state != "running" else "",
        token=item.get("ClientToken") or "",
        key_name=item.get("KeyName") or "",
        image=item.get("ImageId") or "",
        architecture=item.get("Architecture") or "x86_64",
        volumes=_volumes(item),
        tags=tags,
    )


def _asked(api: Api, requested: list[dict[str, Any]], **how: Any) -> list[CloudMachine]:
    reservations = api.pages("ec2", "describe_instances", "Reservations", Filters=requested)
    items: list[dict[str, Any]] = []
    for reservation in reservations:
        items += reservation.get("Instances") or []
    return [machine(item, api.account.region, **how) for item in items]


def _target(address: str, user: str, pool: str) -> SshTarget | None:
    try:
        directory = pool_dir(pool)
    except InvalidArgument:
        return None  # nothing that we have named
    if not directory.exists():
        return None  # a pool of another computer: its keys are there
    key, known = str(directory / "id_ed25519"), str(directory / "known_hosts")
    return SshTarget(host=address, user=user, key=key, known_hosts=known, config=False)


def _volumes(item: dict[str, Any]) -> tuple[str, ...]:
    mappings: list[dict[str, Any]] = item.get("BlockDeviceMappings") or []
    disks: list[dict[str, Any]] = [mapping.get("Ebs") or {} for mapping in mappings]
    return tuple(str(disk["VolumeId"]) for disk in disks if disk.get("DeleteOnTermination") and "VolumeId" in disk)


def _ended(reason: str) -> float | None:
    # "User initiated (2026-05-06 12:34:56 GMT)"
    found = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", reason)
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp() if found else None
