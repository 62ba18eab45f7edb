"""What a user's pools have in a region, found by tags; what only carries their tags is told apart."""

from __future__ import annotations

from dataclasses import replace

from skyward.api.provider import Leftover
from skyward.machines.ledger import History, read
from skyward.providers.aws.api import Api
from skyward.providers.aws.inventory import things
from skyward.providers.aws.machines import tagged
from skyward.providers.aws.ownership import Claim, remark
from skyward.providers.aws.tags import OWNER, POOL

__all__ = ["found_leftovers"]


def found_leftovers(api: Api, owner: str) -> list[Leftover]:
    """Everything that carries the owner's tag, and what others have tagged as part of the owner's pools.

    What is not proven to be the owner's has a reason in `foreign`.
    """
    machines = [machine for machine in tagged(api, tag_key=POOL) if machine.state != "terminated"]
    others = things(api, tag_key=POOL)
    mine = owner[:256]
    tags = [item.tags for item in (*machines, *others)]
    pools = {tag.get(POOL, "") for tag in tags if tag.get(OWNER) == mine}
    pools |= {name for tag in tags if (name := tag.get(POOL, "")) not in pools and read(name) is not None}
    claims = {pool: Claim(pool, owner, read(pool) or History(pool)) for pool in pools}
    found: list[Leftover] = []
    strange: list[tuple[Leftover, str]] = []
    for machine in machines:
        claim = claims.get(machine.tags.get(POOL, ""))
        if claim is not None and claim.owns_machine(machine):
            found.append(machine.leftover())
        elif claim is not None:
            strange.append((machine.leftover(), machine.id))
    for thing in others:
        claim = claims.get(thing.tags.get(POOL, ""))
        if claim is not None and claim.owns_thing(thing):
            found.append(thing.leftover())
        elif claim is not None:
            strange.append((thing.leftover(), thing.resource or thing.id))
    for pool in pools:
        ids = {
            id: item.id if item.kind == "machine" else f"{item.kind} {item.id}"
            for item, id in strange
            if item.pool == pool
        }
        why = remark(pool, api.account.region, ids) if ids else ""
        found += [replace(item, foreign=why) for item, _ in strange if item.pool == pool]
    return found
