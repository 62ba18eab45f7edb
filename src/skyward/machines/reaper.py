"""Finds and ends what is left of pools, by ledgers and providers: `sky ps` and `sky down`."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any, Literal, cast

from skyward import extensions
from skyward.api.provider import Leftover, Provider
from skyward.errors import CloudRefused, CredentialsMissing, InvalidArgument, MissingPackage, SkywardError
from skyward.machines.ledger import History, histories, in_use, read, shown, usable
from skyward.machines.offers import money

__all__ = [
    "Found",
    "Outcome",
    "chosen",
    "discard",
    "down",
    "expired_leftovers",
    "kept",
    "mentioned",
    "pools",
    "renting_providers",
    "report_leftovers",
]

log = logging.getLogger("skyward.reaper")

Condition = Literal[
    "in use",  # its process lives, on this computer
    "abandoned",  # its process, on this computer, is gone
    "detached",  # a detached run has it, and ends its machines
    "expired",  # its time is over, wherever it was opened
    "elsewhere",  # opened on another computer, or its ledger is lost; may be in use there
    "not ours",  # all of it only carries our tags; somebody else has made it
]


@dataclass(frozen=True)
class Found:
    pool: str
    region: str
    condition: Condition
    provider: Provider
    leftovers: tuple[Leftover, ...] = ()
    foreign: tuple[Leftover, ...] = ()
    """Has the pool's tag but no proof: listed, never ended."""
    expires: float | None = None
    opened: float | None = None
    pid: int | None = None
    host: str | None = None
    unanswered: int = 0
    trouble: str = ""

    @property
    def hourly_cost(self) -> float:
        return sum(item.hourly_cost for item in self.leftovers)

    def __str__(self) -> str:
        who = f", process {self.pid} on {self.host}" if self.pid is not None else ""
        what = ", ".join(map(str, self.leftovers)) or "nothing that is seen"
        where = self.region or self.provider.name
        head = f"{shown(self.pool)}  {where}  {self.condition}"
        lines = [f"{head}{who}  {money(self.hourly_cost)} an hour: {what}"] if self.condition != "not ours" else [head]
        return "\n  ".join([*lines, *dict.fromkeys(item.foreign for item in self.foreign)])


@dataclass(frozen=True)
class Outcome:
    found: Found
    did: Literal["ended", "would end", "left alone", "failed"]
    why: str = ""
    receipt: object = None


@dataclass(frozen=True)
class _Answer:
    place: Provider
    leftovers: Sequence[Leftover] = ()
    error: SkywardError | None = None


@dataclass
class _Gathered:
    answer: _Answer
    history: History | None = None
    # by id: one place may be known by two names
    leftovers: dict[tuple[str, str], Leftover] = field(default_factory=dict[tuple[str, str], Leftover])


def renting_providers(endpoint_url: str | None = None) -> list[Provider]:
    made: list[Provider] = []
    for name, point in extensions.found("providers").items():
        try:
            kind: Any = point.load()
            provider = kind() if issubclass(kind, Provider) and kind.rented is not Provider.rented else None
        except Exception as exc:  # a package that is broken must not hide what others have left
            log.warning("the provider %s (%s) cannot be used: %s", name, point.value, exc)
            continue
        if provider is not None:  # with other settings it may rent: ledgers say which
            if endpoint_url is not None and hasattr(provider, "endpoint_url"):
                provider = replace(cast("Any", provider), endpoint_url=endpoint_url)
            made.append(provider)
    return made


def pools(
    providers: Sequence[Provider],
    regions: Iterable[str] = (),
    names: Sequence[str] = (),
    profile: str | None = None,
    quiet: bool = False,
) -> list[Found]:
    """For named pools with ledgers, only their providers are asked. `quiet` hides providers that nobody uses."""
    known = {provider.name: provider for provider in providers}
    # a ledger whose first line is lost does not say whose it is: then the first provider is asked
    owned = [(known.get(h.metadata.get("provider", next(iter(known), ""))), h) for h in histories()]
    recorded = {history.pool for provider, history in owned if provider is not None}
    named = bool(names) and recorded >= set(names)
    answers: dict[Provider, _Answer] = {}
    seen: dict[tuple[str, str, str], _Gathered] = {}
    for provider, history in owned:
        if provider is not None and (not named or history.pool in names):
            answer = _ask(provider, {**history.metadata, "region": history.region}, answers)
            region = history.region or _region(answer.place)
            seen[history.pool, provider.name, region] = _Gathered(answer, history)
    for answer in [*answers.values(), *([] if named else _ask_all(providers, list(regions), profile, answers, quiet))]:
        for item in answer.leftovers:
            key = (item.pool, answer.place.name, _region(answer.place))
            seen.setdefault(key, _Gathered(answer)).leftovers[item.kind, item.id] = item
    return [_found(*key, seen[key]) for key in sorted(seen) if key[0]]


def chosen(
    found: Sequence[Found], names: Sequence[str] = (), everything: bool = False, expired: bool = False
) -> list[tuple[Found, str]]:
    _check_chosen(names, everything, expired)
    known = {item.pool for item in found}
    missing = [name for name in names if name not in known]
    if missing:
        raise InvalidArgument(
            f"no pool {', '.join(map(shown, missing))} is open on this computer or has left anything behind; "
            f"{', '.join(map(shown, sorted(known))) or 'no pool'} has. `sky ps` lists all of them; pools of other "
            "regions need --region."
        )
    picked: list[tuple[Found, str]] = []
    for item in found:
        if names and item.pool not in names and not everything:
            continue
        if item.condition == "not ours":
            picked.append((item, "; ".join(dict.fromkeys(other.foreign for other in item.foreign))))
        elif item.condition == "in use":
            picked.append((item, f"in use by process {item.pid} on {item.host}; end that first"))
        elif item.pool in names or item.condition == "expired" or (everything and item.condition == "abandoned"):
            picked.append((item, ""))
        elif item.condition == "detached":
            picked.append((item, "a detached run has it: `sky runs`, `sky stop`; name it to end it anyway"))
        elif everything:
            who = f"by process {item.pid} on {item.host}" if item.host else "on another computer"
            picked.append((item, f"may be in use {who}, which cannot be seen from here; name it to end it"))
    return picked


def down(
    providers: Sequence[Provider],
    names: Sequence[str] = (),
    everything: bool = False,
    expired: bool = False,
    really: bool = False,
    regions: Iterable[str] = (),
    profile: str | None = None,
) -> list[Outcome]:
    """Ends pools and confirms it, or without `really` says what it would do; a failure does not stop the others."""
    _check_chosen(names, everything, expired)
    outcomes: list[Outcome] = []
    only = () if everything or expired else names
    try:
        found = pools(providers, regions, only, profile)
    except CredentialsMissing as exc:
        if not only or any(read(name) is not None for name in only):
            raise
        # most who mistype a name have no cloud at all
        listed = ", ".join(map(shown, only))
        raise InvalidArgument(f"no pool {listed} is known on this computer (`sky ps`), and elsewhere: {exc}") from exc
    for item, why in chosen(found, names, everything, expired):
        if why:
            outcomes.append(Outcome(item, "left alone", why))
        elif not really:
            outcomes.append(Outcome(item, "would end"))
        else:
            outcomes.append(_ended(item))
    return outcomes


def expired_leftovers(provider: Provider) -> list[Found]:
    """Pools that are over or abandoned, with something left."""
    left = [item for item in pools([provider]) if item.leftovers or item.unanswered or item.trouble]
    return [item for item in left if item.condition in ("expired", "abandoned")]


def mentioned(found: Sequence[Found], profile: str | None = None) -> str | None:
    found = [item for item in found if usable(item.pool) and item.condition != "not ours"]
    if not found:
        return None
    what = [
        f"{item.pool} ({item.condition}, {item.region or item.provider.name}, {money(item.hourly_cost)} an hour)"
        for item in found
    ]
    regions = {item.region: "" for item in found if item.region and read(item.pool) is None}
    words = [*(f"--region {quote(region)}" for region in regions)]
    words += [*([f"--profile {quote(profile)}"] if profile else []), "--yes"]
    names = " ".join(item.pool for item in found)
    return (
        f"earlier pools have left something behind: {', '.join(what)}. End it with: sky down {names} {' '.join(words)}"
    )


def kept(providers: Sequence[Provider]) -> list[Leftover]:
    found: list[Leftover] = []
    for provider in providers:
        try:
            found += provider.kept()
        except (MissingPackage, CredentialsMissing):
            continue  # nothing can be kept there; `pools` has said so
        except SkywardError as exc:
            log.warning("%s could not be asked what is kept there: %s", provider.name, exc)
    return found


def discard(providers: Sequence[Provider], really: bool) -> list[str]:
    if not really:
        return [f"{item}: would be deleted; add --yes to do it" for item in kept(providers)]
    return [f"{id}: deleted" for provider in providers for id in provider.discard()]


def report_leftovers(provider: Provider, tell: Callable[[str], None]) -> threading.Thread:
    def look() -> None:
        try:
            text = mentioned(expired_leftovers(provider), getattr(provider, "profile", None))
        except Exception as exc:  # not important: the launch itself tells the user what is wrong
            log.debug("cannot look for leftovers of earlier pools: %s", exc)
        else:
            if text:
                tell(text)

    thread = threading.Thread(target=look, name="skyward-leftovers", daemon=True)
    thread.start()
    return thread


def _check_chosen(names: Sequence[str], everything: bool, expired: bool) -> None:
    if not names and not everything and not expired:
        raise InvalidArgument("no pools named. Name some, or use --all or --expired.")


def _ask(provider: Provider, metadata: Mapping[str, Any], answers: dict[Provider, _Answer]) -> _Answer:
    try:
        place = provider.reopened(metadata)
        known = place in answers
    except SkywardError as exc:
        return _Answer(provider, error=exc)
    except Exception as exc:  # a value that no version of ours writes; whoever asked shows the error, and other pools
        log.debug("settings that cannot be used: %r", metadata, exc_info=True)
        return _Answer(provider, error=SkywardError(f"the ledger of the pool cannot be used: {exc!r}"))
    if not known:
        try:
            answers[place] = _Answer(place, place.find())
        except SkywardError as exc:
            answers[place] = _Answer(place, error=exc)
    return answers[place]


def _ask_all(
    providers: Sequence[Provider],
    regions: Sequence[str],
    profile: str | None,
    answers: dict[Provider, _Answer],
    quiet: bool,
) -> list[_Answer]:
    asked_for = profile is not None or bool(regions)
    used = {provider.name for provider in answers}
    providers = [provider for provider in providers if provider.rented]  # with its default settings
    own = [_ask(provider, {"profile": profile}, answers) for provider in providers]
    # a provider that no pool of this computer has used need not work here: no package, no commands, no cluster
    unused = [
        answer
        for answer in own
        if not asked_for
        and answer.place.name not in used
        and (_not_here(answer.error) or (quiet and _nobody(answer.error)))
    ]
    own = [answer for answer in own if answer not in unused]
    for answer in unused:
        log.info("%s was not asked what is left there: %s", answer.place.name, answer.error)
    failed = [answer.error for answer in own if answer.error is not None]
    if failed and all(answer.error is not None for answer in answers.values()):
        raise failed[0]
    more = [_ask(p, {"profile": profile, "region": region}, answers) for p in providers for region in regions]
    for answer in (*own, *more):
        if answer.error is not None:
            log.warning("%s could not be asked what is left there: %s", answer.place.name, answer.error)
    return own + more


def _not_here(error: SkywardError | None) -> bool:
    return error is not None and (not isinstance(error, CloudRefused) or error.kind == "other")


def _nobody(error: SkywardError | None) -> bool:
    return isinstance(error, CredentialsMissing) and error.code == "NoCredentials"


def _ended(item: Found) -> Outcome:
    if in_use(item.pool):  # asked again: somebody may have begun to end it meanwhile
        return Outcome(item, "left alone", "another process is already ending it")
    try:
        return Outcome(item, "ended", receipt=item.provider.give_back(item.pool, log.info))
    except SkywardError as exc:
        return Outcome(item, "failed", str(exc))


def _region(place: Provider) -> str:
    return getattr(place, "region", None) or ""


def _found(pool: str, provider: str, region: str, gathered: _Gathered) -> Found:
    history = gathered.history or read(pool)
    metadata: Mapping[str, Any] = history.metadata if history is not None else {}
    leftovers = tuple(item for item in gathered.leftovers.values() if not item.foreign)
    foreign = tuple(item for item in gathered.leftovers.values() if item.foreign)
    tagged = max((item.expires for item in leftovers if item.expires is not None), default=None)
    expires: float | None = metadata.get("expires") or tagged
    if history is None and not leftovers:
        condition: Condition = "not ours"
    elif history is not None and in_use(pool):
        condition = "in use"
    elif expires is not None and expires < time.time():
        condition = "expired"
    else:
        # computers may share a home directory whose locks each has for itself
        here = history is not None and metadata.get("host") in (None, socket.gethostname())
        condition = "abandoned" if here else "elsewhere"
        if history is not None and history.detached_until > time.time():
            condition = "detached"
    return Found(
        pool=pool,
        region=region,
        condition=condition,
        provider=gathered.answer.place,
        leftovers=leftovers,
        foreign=foreign,
        expires=expires,
        opened=next((r.time for r in history.records if r.fact == "open"), None) if history is not None else None,
        pid=metadata.get("pid"),
        host=metadata.get("host"),
        unanswered=len(history.unanswered) if history is not None else 0,
        trouble=str(gathered.answer.error or ""),
    )
