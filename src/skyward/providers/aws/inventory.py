"""Everything that carries a pool's tag, besides machines, and how each kind is deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyward.api.provider import Leftover
from skyward.errors import CloudRefused
from skyward.providers.aws.api import Api
from skyward.providers.aws.tags import POOL, as_dict, expiry, filters

__all__ = ["KINDS", "Thing", "delete", "things"]


@dataclass(frozen=True)
class Thing:
    """Something of a pool that is no machine."""

    kind: str
    id: str
    tags: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    name: str = ""
    """What it was called when it was made; empty for what has no name."""
    resource: str = ""
    """The id by which it is tagged, where that is another one."""

    def leftover(self) -> Leftover:
        """It as `sky ps` lists it."""
        return Leftover(self.tags.get(POOL, ""), self.id, self.kind, expires=expiry(self.tags))


@dataclass(frozen=True)
class _Kind:
    describe: str
    key: str
    id: str
    delete: str
    parameter: str
    name: str = ""
    resource: str = ""


# In the order in which they can be deleted: a group outlives what stands in it.
KINDS: dict[str, _Kind] = {
    "volume": _Kind("describe_volumes", "Volumes", "VolumeId", "delete_volume", "VolumeId"),
    "key-pair": _Kind(
        "describe_key_pairs", "KeyPairs", "KeyName", "delete_key_pair", "KeyName", "KeyName", "KeyPairId"
    ),
    "placement-group": _Kind(
        "describe_placement_groups",
        "PlacementGroups",
        "GroupName",
        "delete_placement_group",
        "GroupName",
        "GroupName",
        "GroupId",
    ),
    "security-group": _Kind(
        "describe_security_groups", "SecurityGroups", "GroupId", "delete_security_group", "GroupId", "GroupName"
    ),
}


def things(api: Api, **requested: str) -> list[Thing]:
    """What carries a tag (`pool=`, `owner=`) and is no machine."""
    found: list[Thing] = []
    for kind, how in KINDS.items():
        items = api.pages("ec2", how.describe, how.key, Filters=filters(**requested))
        found += [
            Thing(kind, item[how.id], as_dict(item), item.get(how.name, ""), item.get(how.resource, ""))
            for item in items
            if not _leaving(item)
        ]
    return found


def delete(api: Api, thing: Thing) -> bool:
    """Deletes something; False while something else still needs it. What is gone already is gone."""
    how = KINDS[thing.kind]
    try:
        api.call("ec2", how.delete, True, **{how.parameter: thing.id})
    except CloudRefused as exc:
        if exc.kind == "missing":
            return True
        if exc.kind == "in use" or exc.code in ("VolumeInUse", "IncorrectState"):
            return False
        raise
    return True


def _leaving(item: dict[str, Any]) -> bool:
    # A volume that is attached goes with its machine; one being deleted is on its way.
    return item.get("State") in ("deleting", "deleted")
