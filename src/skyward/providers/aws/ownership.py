"""Whose something is: what carries a pool's tags, and what was proven to have been made for it.

Tags can be written by whoever may tag. What cannot be changed afterwards is the proof: the id in our ledger, the token
and the key's name with which a machine was launched, and the names of keys and groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import cast

from skyward.machines.ledger import History
from skyward.machines.names import shown, usable
from skyward.providers.aws.inventory import Thing
from skyward.providers.aws.machines import CloudMachine
from skyward.providers.aws.tags import OWNER, POOL, resource_name

__all__ = ["Claim", "remark"]


@dataclass(frozen=True)
class Claim:
    """What is known of a pool, by which its own things are told from those that only carry its tags."""

    pool: str
    owner: str
    history: History
    volumes: set[str] = field(default_factory=set[str], hash=False)
    """Disks that go with machines of the pool: those in the ledger, and those of machines that were seen."""

    def __post_init__(self) -> None:
        noted = (record.data.get("volumes") for record in self.history.records if record.fact == "note")
        self.volumes.update(str(id) for ids in noted if isinstance(ids, list) for id in cast("list[object]", ids))

    def owns_machine(self, machine: CloudMachine) -> bool:
        """Whether a machine was launched for the pool; if so, its disks are the pool's as well."""
        listed = machine.id in self.history.made("instance")
        launched = machine.token != "" and machine.token in self._tokens
        named = machine.key_name == resource_name(self.pool)
        # by its launch alone, for a machine whose tags somebody has removed
        owned = (listed and launched) or (self._tagged(machine.tags) and (listed or launched or named))
        if owned:
            self.volumes.update(machine.volumes)
        return owned

    def owns_thing(self, thing: Thing) -> bool:
        """Whether something else was made for the pool."""
        if not self._tagged(thing.tags):
            return False
        if thing.kind == "volume":
            return thing.id in self.volumes
        return thing.name == resource_name(self.pool) or thing.id in self.history.made(thing.kind)

    @property
    def _tokens(self) -> set[str]:
        asked = (record for record in self.history.records if record.fact == "intent" and record.kind == "instance")
        return {str(record.data.get("token", "")) for record in asked} - {""}

    def _tagged(self, tags: Mapping[str, str]) -> bool:
        return usable(self.pool) and tags.get(POOL) == self.pool and tags.get(OWNER) == self.owner[:256]


def remark(pool: str, region: str, strange: Mapping[str, str]) -> str:
    """What the user is told of things that claim to be a pool's and are not; ids by which they are tagged -> names."""
    them, carry = ("it", "carries") if len(strange) == 1 else ("them", "carry")
    ids = [id for id in strange if re.fullmatch(r"[A-Za-z0-9-]+", id)]
    command = f"aws ec2 delete-tags --region {quote(region)} --resources {' '.join(ids)} --tags Key={POOL}"
    return (
        f"{', '.join(map(shown, strange.values()))} {carry} the tag of pool {shown(pool)}, but nothing proves that "
        f"Skyward made {them} for you: not ours, left alone. Find out who wrote the tag. To remove it: {command}"
    )
