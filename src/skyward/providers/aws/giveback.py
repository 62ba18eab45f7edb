"""Releases a pool: ends, deletes, and reads back until nothing that was made for it is left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any, cast

from skyward.api.provider import Availability, Leftover, Offer
from skyward.errors import CloudError, CloudRefused, NotGivenBack
from skyward.machines.cloud import OWNER, POOL, Bill, Claim, CloudReceipt, ends, expiry, remark
from skyward.machines.ledger import History, Ledger, Record, read
from skyward.machines.offers import CloudOffer, Market, Price, money
from skyward.machines.spent import keep
from skyward.providers.aws.api import Api, Report, as_dict, filters, quota_code, quota_of
from skyward.providers.aws.machines import CloudMachine, described, end, tagged

__all__ = [
    "KINDS",
    "AwsBill",
    "Thing",
    "allowed",
    "charge",
    "delete",
    "found_leftovers",
    "give_back",
    "things",
    "verdict",
]


@dataclass(frozen=True)
class Thing:
    kind: str
    id: str
    tags: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    name: str = ""
    resource: str = ""

    def leftover(self) -> Leftover:
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
    """False while something else still needs it."""
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


@dataclass
class _Work:
    history: History
    claim: PoolClaim
    machines: dict[str, CloudMachine] = field(default_factory=dict[str, CloudMachine])
    ended: dict[str, float] = field(default_factory=dict[str, float])
    gone: list[str] = field(default_factory=list[str])
    deleted: list[Thing] = field(default_factory=list[Thing])
    left: list[str] = field(default_factory=list[str])
    strange: dict[str, str] = field(default_factory=dict[str, str])
    why: str = ""


def give_back(
    api: Api, pool: str, owner: str, ledger: Ledger | None, report: Report = lambda text: None
) -> CloudReceipt:
    """Confirms it, or says what is left. Without a complete ledger, waits for tagged things that appear late."""
    pace, began = api.account.pace, time.monotonic()
    history = ledger.history if ledger is not None else History(pool)
    work = _Work(history, PoolClaim(pool, owner, history))
    certain, quiet = work.history.certain, None
    watch = max((record.time for record in work.history.unanswered), default=0.0) + pace.unanswered
    try:
        while True:
            busy = _end_machines(api, pool, work, ledger)
            if not busy:
                busy = _delete_things(api, pool, work, ledger)
            now = time.monotonic()
            if busy:
                quiet = None
            else:
                quiet = now if quiet is None else quiet
                if certain or (now - quiet >= pace.settle and time.time() >= watch):
                    break
            # machines that are shutting down take their time and cost nothing; refusals are tried for less long
            limit = pace.budget * (1 if work.why else 3) + (0 if certain else pace.unanswered + pace.settle)
            if now - began > limit:
                cause = work.why or "They did not go within the time that was given."
                raise NotGivenBack(pool, api.account.region, work.left, _cost(work), cause)
            time.sleep(min(pace.poll, pace.settle) if not busy else pace.poll)
    except CloudRefused as exc:
        left = work.left or _unconfirmed(work)
        raise NotGivenBack(pool, api.account.region, left, _cost(work), str(exc)) from exc
    receipt = _receipt(api, work)
    keep(receipt.charges())
    if ledger is not None:
        ledger.remove()
    report(f"everything of pool {pool} is given back; {money(receipt.total)}")
    return receipt


def _end_machines(api: Api, pool: str, work: _Work, ledger: Ledger | None) -> bool:
    listed = {machine.id: machine for machine in tagged(api, pool=pool)}
    # Ids that our ledger has and the tag does not show: not there yet, long forgotten, or without their tags.
    missing = [id for id in work.history.left("instance") if id not in listed and id not in work.gone]
    listed |= {machine.id: machine for machine in described(api, missing)}
    found = {id: machine for id, machine in listed.items() if work.claim.owns_machine(machine)}
    work.strange |= {id: id for id in listed if id not in found and listed[id].alive}
    work.machines |= found
    known = dict.fromkeys([*missing, *work.machines])
    unseen = [id for id in known if id not in listed and id not in work.gone]
    refused = end(api, [machine.id for machine in found.values() if machine.alive]) | end(api, unseen)
    for id in known:
        if id not in refused:
            work.ended.setdefault(id, time.time())
    over = [id for id, machine in found.items() if machine.state == "terminated"]
    over += [id for id in unseen if id in refused and _forgotten(work, refused[id], api.account.pace.unanswered, id)]
    fresh = [id for id in over if id not in work.gone]
    for id in fresh:
        work.ended[id] = (found[id].ended if id in found else None) or work.ended.get(id) or time.time()
    work.gone += fresh
    if ledger is not None:
        ledger.gone("instance", *fresh)
    work.left = [id for id in [*found, *unseen] if id not in over]
    work.why = next((str(exc) for id, exc in refused.items() if id in work.left and exc.kind != "missing"), "")
    return bool(work.left)


def _delete_things(api: Api, pool: str, work: _Work, ledger: Ledger | None) -> bool:
    listed = things(api, pool=pool)
    found = [thing for thing in listed if work.claim.owns_thing(thing)]
    work.strange |= {thing.resource or thing.id: _named(thing) for thing in listed if thing not in found}
    failed: CloudRefused | None = None
    for thing in found:
        try:
            if delete(api, thing):
                work.deleted.append(thing)
                if ledger is not None:
                    ledger.gone(thing.kind, thing.id)
        except CloudRefused as exc:  # the others go all the same
            failed = failed or exc
    if failed is not None:
        work.left = [_named(thing) for thing in found if thing not in work.deleted]
        raise failed
    work.left = [_named(thing) for thing in found]
    return bool(found)  # read back before it is believed


def _forgotten(work: _Work, refused: CloudRefused, seconds: float, id: str) -> bool:
    made = work.history.made("instance").get(id)
    return refused.kind == "missing" and made is not None and time.time() - made.time > seconds


def _named(thing: Thing) -> str:
    return f"{thing.kind} {thing.id}" if thing.kind in ("key-pair", "placement-group") else thing.id


def _unconfirmed(work: _Work) -> list[str]:
    kinds = dict.fromkeys(record.kind for record in work.history.records if record.fact == "answer")
    return [id for kind in kinds for id in work.history.left(kind) if id not in work.gone]


def _cost(work: _Work) -> float:
    made = work.history.made("instance")
    prices: dict[str, float] = {id: float(record.data.get("price", 0)) for id, record in made.items()}
    prices |= {id: machine.hourly_cost for id, machine in work.machines.items()}
    return sum(price for id, price in prices.items() if id not in work.ended and price != float("inf"))


def _receipt(api: Api, work: _Work) -> CloudReceipt:
    made = work.history.made("instance")
    bills = [
        _bill(
            id, work.machines.get(id), made[id].data if id in made else {}, made[id].time if id in made else 0.0, work
        )
        for id in dict.fromkeys([*made, *work.machines])
    ]
    machines = [Thing("instance", id) for id in work.machines]
    ended = [Thing("instance", id) for id in work.gone]
    created = [*_things(work.history.records, "answer"), *machines, *work.deleted]
    gone = [*_things(work.history.records, "gone"), *ended, *work.deleted]
    region = api.account.region
    told = [_remark(work.history.pool, region, work.strange)] if work.strange else []
    return CloudReceipt(work.history.pool, region, tuple(bills), _names(created), _names(gone), tuple(told), "AWS")


def _things(records: Iterable[Record], fact: str) -> list[Thing]:
    return [Thing(record.kind, id) for record in records if record.fact == fact for id in record.ids]


def _names(some: Iterable[Thing]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_named(thing) for thing in some))


def _bill(id: str, machine: CloudMachine | None, details: Mapping[str, Any], asked: float, work: _Work) -> AwsBill:
    began = machine.launched if machine is not None and machine.launched else asked
    noted = ends(work.history).get(id)
    seen = machine.ended if machine is not None else None
    ended = seen or (noted.time if noted is not None else None) or work.ended.get(id) or time.time()
    return AwsBill(
        id,
        machine.kind if machine is not None else str(details.get("type", "")),
        machine.zone if machine is not None else str(details.get("zone", "")),
        machine.market if machine is not None else details.get("market", "on-demand"),
        max(0.0, ended - began),
        _price(machine, details),
        machine.taken_back if machine is not None else noted is not None and noted.taken_back,
        began,
    )


def _price(machine: CloudMachine | None, details: Mapping[str, Any]) -> Price:
    recorded = details.get("parts") or ({"machine": details["price"]} if "price" in details else None)
    try:
        return Price.read(recorded) if recorded else machine.price if machine is not None else Price()
    except ValueError:
        return machine.price if machine is not None else Price()


@dataclass(frozen=True)
class PoolClaim(Claim):
    """A claim that also knows disks, which are proven by their machines."""

    volumes: set[str] = field(default_factory=set[str], hash=False)

    def __post_init__(self) -> None:
        noted = (record.data.get("volumes") for record in self.history.records if record.fact == "note")
        self.volumes.update(str(id) for ids in noted if isinstance(ids, list) for id in cast("list[object]", ids))

    def owns_machine(self, machine: CloudMachine) -> bool:
        owned = self.owns("instance", machine.id, machine.tags, machine.key_name, machine.token)
        if owned:
            self.volumes.update(machine.volumes)
        return owned

    def owns_thing(self, thing: Thing) -> bool:
        if thing.kind == "volume":
            return self.tagged(thing.tags) and thing.id in self.volumes
        return self.owns(thing.kind, thing.id, thing.tags, thing.name)


def _remark(pool: str, region: str, strange: Mapping[str, str]) -> str:
    ids = [id for id in strange if re.fullmatch(r"[A-Za-z0-9-]+", id)]
    command = f"aws ec2 delete-tags --region {quote(region)} --resources {' '.join(ids)} --tags Key={POOL}"
    return remark(pool, list(strange.values()), command)


def found_leftovers(api: Api, owner: str) -> list[Leftover]:
    """Everything with the owner's tag; what others tagged has a reason in `foreign`."""
    machines = [machine for machine in tagged(api, tag_key=POOL) if machine.state != "terminated"]
    others = things(api, tag_key=POOL)
    mine = owner[:256]
    tags = [item.tags for item in (*machines, *others)]
    pools = {tag.get(POOL, "") for tag in tags if tag.get(OWNER) == mine}
    pools |= {name for tag in tags if (name := tag.get(POOL, "")) not in pools and read(name) is not None}
    claims = {pool: PoolClaim(pool, owner, read(pool) or History(pool)) for pool in pools}
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
        why = _remark(pool, api.account.region, ids) if ids else ""
        found += [replace(item, foreign=why) for item, _ in strange if item.pool == pool]
    return found


# What AWS bills, and what the quotas of an account allow.


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
