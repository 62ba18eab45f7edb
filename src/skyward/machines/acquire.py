"""Gets machines for a pool and releases them; if the client dies, the watchdog does."""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from textwrap import indent
from typing import Any, Literal, TypeVar, cast

from skyward.api.budget import check_price
from skyward.api.context import PoolContext
from skyward.api.provider import Lease, Offer, Provider, Receipt
from skyward.api.spec import Spec
from skyward.errors import (
    CloudError,
    CloudRefused,
    InvalidArgument,
    NoCapacity,
    NoneAvailable,
    NotGivenBack,
    QuotaExceeded,
)
from skyward.machines.offers import RuledOut, money, wish
from skyward.machines.watchdog import Watchdog

__all__ = [
    "MACHINES",
    "Candidate",
    "Plans",
    "Prospect",
    "Selection",
    "acquire",
    "candidate",
    "look",
    "moves_on",
    "ordered",
    "taken",
]


_PATIENCE = 600.0  # machines take minutes to shut down
MACHINES = "machines"


def acquire(
    context: PoolContext, watchdog: Watchdog, steps: ExitStack, keep_receipt: Callable[[Receipt], None]
) -> Lease:
    """At least `min_nodes` machines; releasing them is a step on `steps`."""
    try:
        return _acquired(context, context.nodes, watchdog, steps, keep_receipt)
    except (NoCapacity, QuotaExceeded) as exc:
        if context.min_nodes == context.nodes or not context.provider.elastic:
            raise
        context.warn(f"{exc}\nTrying with min_nodes={context.min_nodes} instead of {context.nodes}.")
        return _acquired(context, context.min_nodes, watchdog, steps, keep_receipt)


def _acquired(
    context: PoolContext, count: int, watchdog: Watchdog, steps: ExitStack, keep_receipt: Callable[[Receipt], None]
) -> Lease:
    began = time.time()
    provider, name = context.provider, f"{context.name}-{secrets.token_hex(3)}"
    if provider.rented:
        from skyward.machines.reaper import report_leftovers

        steps.callback(report_leftovers(provider, context.warn).join, 1)
        # the ledger knows the provider and its settings; an endpoint that is not AWS's counts only if we say so
        argv = [sys.executable, "-P", "-m", "skyward", "down", name, "--yes", "--if-there"]
        argv += ["--endpoint-url", endpoint] if (endpoint := getattr(provider, "endpoint_url", None)) else []
        watchdog.add(MACHINES, argv, patience=_PATIENCE)

    def tell_left() -> None:
        if provider.rented and context.hurried():
            context.warn(
                f"releasing machines was interrupted; a watchdog finishes it. `sky ps` shows when {name} is gone."
            )

    def give_back() -> None:
        if context.handed_over:
            lease.leave()
            return
        if context.hurried() and provider.rented:
            lease.let_go()
            tell_left()
            return
        try:
            receipt = lease.close(context.report)
        except Exception as exc:
            if isinstance(exc, NotGivenBack) and not lease.hourly_cost:  # a program with its results need not fail
                tell_left()
                context.warn(f"{exc} A watchdog is trying again.")
                return
            watchdog.drop(MACHINES)  # the error names what is left
            raise
        except BaseException:
            lease.let_go()
            tell_left()
            raise
        watchdog.drop(MACHINES)
        for text in getattr(receipt, "remarks", ()):
            context.warn(text)
        known = isinstance(receipt, Receipt)
        keep_receipt(receipt if known else Receipt(name, text="" if receipt is None else str(receipt)))

    try:
        lease = provider.acquire(context.spec, name, count, context.provision_timeout, context.report)
    except Exception as exc:
        if not isinstance(exc, NotGivenBack) or exc.hourly_cost:
            watchdog.drop(MACHINES)  # else it tries again what costs nothing
        raise
    except BaseException:
        tell_left()
        raise
    steps.callback(give_back)
    lease.warn_with(context.warn)
    context.tell_cost(lease.hourly_cost, began)
    if context.budget is not None:
        check_price(context.budget, lease.hourly_cost, provider.name)
    return lease


# Which of several specs a pool takes: the cheapest, or the first, that is available, and why not the others.
#
# specs -> [Candidate] -> plans (asked only for "cheapest") -> in order -> the first whose machines are available


T = TypeVar("T")

Selection = Literal["cheapest", "first"]

# Refusals that another spec may not meet: full, not allowed, not logged in, no answer. Others are mistakes.
_ELSEWHERE = ("capacity", "quota", "permission", "credentials", "expired", "throttled", "server")


@dataclass(frozen=True)
class Candidate:
    provider: Provider
    spec: Spec

    @property
    def nodes(self) -> int:
        return cast(int, self.spec.nodes)

    def __str__(self) -> str:
        region = self.spec.region or getattr(self.provider, "region", None)
        return f"{wish(self.spec)}, from {self.provider.name}{f' in {region}' if region else ''}"


@dataclass(frozen=True)
class Prospect:
    candidate: Candidate
    plan: Iterable[Offer] = ()
    why_not: CloudError | None = None

    @property
    def possible(self) -> bool:
        return self.why_not is None and bool(self._offers)

    @property
    def hourly_cost(self) -> float:
        return self.candidate.nodes * self._offers[0].hourly_cost if self.possible else math.inf

    @property
    def cost(self) -> str:
        if not self.possible:
            return "nothing fits" if self.why_not is None else "not available"
        return "price unknown" if math.isinf(self.hourly_cost) else f"{money(self.hourly_cost)} an hour"

    @property
    def _offers(self) -> tuple[Offer, ...]:
        return tuple(self.plan)

    def __str__(self) -> str:
        if self.why_not is not None:
            return f"{self.candidate}: {self.why_not}"
        if isinstance(self.plan, list):
            return f"{self.candidate}: {', '.join(offer.name for offer in self._offers)}"
        return str(self.plan)


@dataclass(frozen=True)
class Plans:
    prospects: tuple[Prospect, ...]
    selection: Selection

    @property
    def first(self) -> Prospect:
        return self.prospects[0]

    @property
    def offers(self) -> Sequence[Offer]:
        return tuple(self.first.plan)

    @property
    def ruled_out(self) -> Sequence[RuledOut]:
        return getattr(self.first.plan, "ruled_out", ())

    @property
    def hourly_cost(self) -> float:
        return self.first.hourly_cost

    def _repr_html_(self) -> str:
        from skyward.api.html import table

        rows = [(number, prospect.cost, prospect) for number, prospect in enumerate(self.prospects, 1)]
        return table(self._head, ["", "price", "what would be launched"], rows)

    @property
    def _head(self) -> str:
        why = (
            "by price, for all nodes together"
            if self.selection == "cheapest"
            else "in the order in which they are given"
        )
        return f'{len(self.prospects)} specs, tried {why} (selection="{self.selection}"), until one is available:'

    def __str__(self) -> str:
        lines = [self._head]
        for number, prospect in enumerate(self.prospects, 1):
            lines.append(f"{number}. [{prospect.cost}] {indent(str(prospect), ' ' * 3).lstrip()}")
        return "\n\n".join(lines)


def candidate(spec: Spec, fallback: Provider) -> Candidate:
    if isinstance(spec.nodes, tuple):
        raise InvalidArgument(
            f"nodes={spec.nodes!r}: a pool has one number of nodes, and does not grow and shrink. Write "
            f"nodes={spec.nodes[1]}, min_nodes={spec.nodes[0]} to have it open with fewer, until the others come."
        )
    found: Any = spec.provider if spec.provider is not None else fallback
    if isinstance(found, type) and issubclass(found, Provider):
        arguments = 'hosts=["gpu1", "gpu2"]' if found.__name__ == "SSH" else ""
        raise InvalidArgument(
            f"provider={found.__name__}: add parentheses, provider=sky.{found.__name__}({arguments})."
        )
    if not isinstance(found, Provider):
        raise InvalidArgument(
            f"provider={found!r}: expected a sky.Provider. Write {_provider_meant(cast(object, found))}."
        )
    return Candidate(found, spec)


def _provider_meant(found: object) -> str:
    kinds = {"aws": "sky.AWS()", "ec2": "sky.AWS()", "local": "sky.Local()", "localhost": "sky.Local()"}
    if isinstance(found, str):
        return f"provider={kinds.get(found.lower(), f'sky.SSH(hosts=[{found!r}])')}"
    if isinstance(found, list | tuple):
        return f"provider=sky.SSH(hosts={list(cast('Sequence[object]', found))!r})"
    return "provider=sky.SSH(hosts=[...]), provider=sky.AWS() or provider=sky.Local()"


def look(candidates: Sequence[Candidate], selection: Selection) -> Plans:
    return Plans(ordered([_planned(choice) for choice in candidates], selection), selection)


def ordered(prospects: Sequence[Prospect], selection: Selection) -> tuple[Prospect, ...]:
    if selection == "first":
        return tuple(prospects)
    return tuple(sorted(prospects, key=lambda prospect: (not prospect.possible, prospect.hourly_cost)))


def moves_on(error: BaseException) -> bool:
    """Whether to try another spec; not after a mistake, nor while something is left."""
    if isinstance(error, CloudRefused):
        return error.kind in _ELSEWHERE
    return isinstance(error, CloudError) and not isinstance(error, NotGivenBack)


def taken(candidates: Sequence[Candidate], acquire: Callable[[Candidate], T], tell: Callable[[str], None]) -> T:
    failed: list[str] = []
    for number, choice in enumerate(candidates, 1):
        try:
            return acquire(choice)
        except CloudError as exc:
            if len(candidates) == 1 or not moves_on(exc):
                raise
            failed.append(f"{choice}: {exc}")
            if number == len(candidates):
                raise NoneAvailable(f"{number} specs", failed) from exc
            tell(f"spec {choice} is not available; trying {candidates[number]}. {exc}")
    raise InvalidArgument("no spec was given, so there is nothing to open. Give one, or provider=...")


def _planned(choice: Candidate) -> Prospect:
    try:
        return Prospect(choice, choice.provider.offers(choice.spec, choice.nodes))
    except CloudError as exc:
        if not moves_on(exc):
            raise
        return Prospect(choice, why_not=exc)
