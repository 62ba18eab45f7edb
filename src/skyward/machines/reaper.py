"""What is left of pools, found by ledgers and by tags, and ended when told: the work behind `sky ps` and `sky down`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from skyward.api.provider import Provider
from skyward.errors import InvalidArgument, SkywardError
from skyward.machines.ledger import History, histories, in_use, read
from skyward.machines.offers import money
from skyward.providers.aws.giveback import Receipt
from skyward.providers.aws.inventory import Thing
from skyward.providers.aws.machines import CloudMachine
from skyward.providers.aws.provider import AWS
from skyward.providers.aws.tags import POOL, expiry

__all__ = ["Found", "Outcome", "chosen", "down", "expired_leftovers", "look_around", "mentioned", "pools"]

log = logging.getLogger("skyward.reaper")

Condition = Literal[
    "in use",  # its process lives, on this computer
    "abandoned",  # its process, on this computer, is gone
    "expired",  # its time is over, wherever it was opened
    "elsewhere",  # opened on another computer, or its ledger is lost; may be in use there
]


@dataclass(frozen=True)
class Found:
    """A pool of which something is left, or may be."""

    pool: str
    region: str
    condition: Condition
    provider: AWS
    machines: tuple[CloudMachine, ...] = ()
    things: tuple[Thing, ...] = ()
    expires: float | None = None
    pid: int | None = None
    host: str | None = None
    unanswered: int = 0
    """Calls that may have made something which is not seen yet."""
    trouble: str = ""
    """Why the place could not be asked, so that only the ledger speaks."""

    @property
    def hourly_cost(self) -> float:
        """Dollars an hour that its machines cost at this moment."""
        return sum(machine.hourly_cost for machine in self.machines if machine.alive)

    def __str__(self) -> str:
        who = f", process {self.pid} on {self.host}" if self.pid is not None else ""
        what = [f"{machine.id} ({machine.kind}, {machine.state})" for machine in self.machines]
        what += [f"{thing.kind} {thing.id}" for thing in self.things]
        return f"{self.pool}  {self.region}  {self.condition}{who}  {money(self.hourly_cost)} an hour: " + (
            ", ".join(what) or "nothing that is seen"
        )


@dataclass(frozen=True)
class Outcome:
    """What became of a pool that was to be ended."""

    found: Found
    did: Literal["ended", "would end", "left alone", "failed"]
    why: str = ""
    receipt: Receipt | None = None

    def __str__(self) -> str:
        return f"{self.found.pool}: {self.did}{f' ({self.why})' if self.why else ''}"


@dataclass
class _Gathered:
    # by id: one place may be known by two names
    machines: dict[str, CloudMachine] = field(default_factory=dict[str, CloudMachine])
    things: dict[tuple[str, str], Thing] = field(default_factory=dict[tuple[str, str], Thing])
    history: History | None = None


def pools(provider: AWS | None = None, regions: Iterable[str] = (), names: Sequence[str] = ()) -> list[Found]:
    """Pools of this owner: those with a ledger here, and those whose tags are seen, in any state.

    Looked at are the provider's region, `regions`, and those that ledgers name; if pools are named, and there is a
    ledger for each, only theirs: ending one must not need anything else to work.
    """
    aws = provider or AWS()
    mine = [history for history in histories() if history.about.get("provider", "AWS") == "AWS"]
    known = bool(names) and {history.pool for history in mine} >= set(names)
    mine = [history for history in mine if not known or history.pool in names]
    homes = {history.pool: aws.reopened(history.about, history.region) for history in mine}
    places = {_place(there): there for there in homes.values()}
    for region in () if known else (aws.region, *regions):
        here = aws.reopened({"owner": aws.login()}, region)
        places[_place(here)] = here
    seen: dict[tuple[str, str], tuple[AWS, _Gathered]] = {}
    trouble: dict[str, str] = {}
    for place, there in places.items():
        try:
            machines, things = _hasty(there).inventory()
        except SkywardError as exc:
            if there.region == aws.region and there.endpoint_url == aws.endpoint_url:
                raise
            trouble[place] = str(exc)  # a place that cannot be asked must not hide the others
            continue
        for machine in machines:
            _at(seen, there, machine.tags.get(POOL, "")).machines[machine.id] = machine
        for thing in things:
            _at(seen, there, thing.pool).things[thing.kind, thing.id] = thing
    for history in mine:
        _at(seen, homes[history.pool], history.pool).history = history
    ordered = sorted(((key, value) for key, value in seen.items() if key[0]), key=lambda item: item[0])
    return [_found(key[0], *value, trouble.get(_place(value[0]), "")) for key, value in ordered]


def chosen(
    found: Sequence[Found], names: Sequence[str] = (), everything: bool = False, expired: bool = False
) -> list[tuple[Found, str]]:
    """The pools that are meant, each with the reason to leave it alone, or "" if it is to be ended."""
    if not names and not everything and not expired:
        raise InvalidArgument("nothing was said to be ended. Name pools, or say --all or --expired.")
    known = {item.pool for item in found}
    missing = [name for name in names if name not in known]
    if missing:
        raise InvalidArgument(
            f"there is no pool {', '.join(missing)}; there {'is' if len(known) == 1 else 'are'} "
            f"{', '.join(sorted(known)) or 'none'}. `sky ps` lists them; pools of other regions need --region."
        )
    picked: list[tuple[Found, str]] = []
    for item in found:
        if names and item.pool not in names and not everything:
            continue
        if item.condition == "in use":
            picked.append((item, f"in use by process {item.pid} on {item.host}; end that first"))
        elif item.pool in names or item.condition == "expired" or (everything and item.condition == "abandoned"):
            picked.append((item, ""))
        elif everything:
            picked.append((item, "may be in use on another computer; name it to end it"))
    return picked


def down(
    names: Sequence[str] = (),
    everything: bool = False,
    expired: bool = False,
    really: bool = False,
    provider: AWS | None = None,
    regions: Iterable[str] = (),
) -> list[Outcome]:
    """Ends pools and confirms it, or without `really` only says what it would do; one that fails stops no other."""
    outcomes: list[Outcome] = []
    meant = () if everything or expired else names
    for item, why in chosen(pools(provider, regions, meant), names, everything, expired):
        if why:
            outcomes.append(Outcome(item, "left alone", why))
        elif not really:
            outcomes.append(Outcome(item, "would end"))
        else:
            outcomes.append(_ended(item))
    return outcomes


def expired_leftovers(provider: AWS) -> list[Found]:
    """What opening a pool mentions: pools whose time is over or whose process is gone, with something left."""
    return [item for item in pools(provider) if item.condition in ("expired", "abandoned")]


def mentioned(found: Sequence[Found], profile: str | None = None) -> str | None:
    """Pools that were left behind in one sentence, with the command that ends them; None if there are none."""
    if not found:
        return None
    what = [f"{item.pool} ({item.condition}, {item.region}, {money(item.hourly_cost)} an hour)" for item in found]
    elsewhere = {item.region: "" for item in found if item.region != AWS.region and read(item.pool) is None}
    words = [*(f"--region {region}" for region in elsewhere), *([f"--profile {profile}"] if profile else []), "--yes"]
    names = " ".join(item.pool for item in found)
    return (
        f"earlier pools have left something behind: {', '.join(what)}. End it with: sky down {names} {' '.join(words)}"
    )


def look_around(provider: Provider, tell: Callable[[str], None]) -> threading.Thread:
    """Tells of leftovers of earlier pools while the caller does something else; whatever goes wrong is not told."""

    def look() -> None:
        try:
            text = mentioned(expired_leftovers(provider), provider.profile) if isinstance(provider, AWS) else None
        except Exception as exc:  # an aside: who opens a pool hears from the launch itself what is wrong
            log.debug("leftovers of earlier pools could not be looked for: %s", exc)
        else:
            if text:
                tell(text)

    thread = threading.Thread(target=look, name="skyward-leftovers", daemon=True)
    thread.start()
    return thread


def _ended(item: Found) -> Outcome:
    if in_use(item.pool):  # asked again: somebody may have begun to end it meanwhile
        return Outcome(item, "left alone", "somebody is ending it already")
    try:
        return Outcome(item, "ended", receipt=item.provider.release(item.pool))
    except SkywardError as exc:
        return Outcome(item, "failed", str(exc))


def _at(seen: dict[tuple[str, str], tuple[AWS, _Gathered]], there: AWS, pool: str) -> _Gathered:
    return seen.setdefault((pool, there.region), (there, _Gathered()))[1]


def _place(there: AWS) -> str:
    return f"{there.region} {there.profile} {there.endpoint_url} {there.owner}"


def _hasty(there: AWS) -> AWS:
    return replace(there, pace=replace(there.pace, budget=min(there.pace.budget, 20.0)))


def _found(pool: str, there: AWS, some: _Gathered, trouble: str) -> Found:
    history = some.history or read(pool)
    about: Mapping[str, Any] = history.about if history is not None else {}
    until = [expiry(item.tags) for item in [*some.machines.values(), *some.things.values()]]
    tagged = max((moment for moment in until if moment is not None), default=None)
    expires: float | None = about.get("expires") or tagged
    if history is not None and in_use(pool):
        condition: Condition = "in use"
    elif expires is not None and expires < time.time():
        condition = "expired"
    else:
        condition = "abandoned" if history is not None else "elsewhere"
    return Found(
        pool=pool,
        region=there.region,
        condition=condition,
        provider=there,
        machines=tuple(some.machines.values()),
        things=tuple(some.things.values()),
        expires=expires,
        pid=about.get("pid"),
        host=about.get("host"),
        unanswered=len(history.unanswered) if history is not None else 0,
        trouble=trouble,
    )
