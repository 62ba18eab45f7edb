"""The contract of a provider: where machines come from, and how they are given back. It knows nothing else.

    sky offers            Provider.offers -> availability
    pool opens            Provider.offers (only to plan) -> acquire -> Lease
    while it is open      Lease.refresh, readmit, more, terminate      if the provider is `elastic`
    pool closes           Lease.close -> Provider.give_back
    sky ps, sky down      Provider.reopened -> find -> give_back       if the provider is `rented`

Every method blocks, and threads call them. A provider keeps no state: what it has for an open pool is in the lease.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, cast

from skyward.api.shell import Access
from skyward.errors import SkywardError

if TYPE_CHECKING:
    from skyward.accelerators import Accelerator
    from skyward.api.shell import JoinTarget, PodTarget, Shell, SshTarget
    from skyward.api.spec import Spec

__all__ = ["Admission", "Availability", "Lease", "Leftover", "Machine", "Offer", "Provider", "Receipt", "Report"]

Report = Callable[[str], None]
"""Tells the user, in a few words, what is being waited for."""


@dataclass(frozen=True)
class Offer:
    """A kind of machine that is available.

    Args:
        name: what it is called.
        hourly_cost: dollars per hour; infinite if unknown. Default: 0.
        vcpus: how many virtual CPUs it has. Default: not known.
        memory_gb: its memory in GB. Default: not known.
    """

    name: str
    hourly_cost: float = 0.0
    vcpus: float | None = None
    memory_gb: float | None = None


@dataclass(frozen=True)
class Availability:
    """Whether an offer is available, as far as is known beforehand: in words, and where certain, as True or False."""

    text: str = ""
    possible: bool | None = None


@dataclass(frozen=True)
class Machine:
    """A machine of a pool, and how it is reached: by ssh, as one that has joined, as a pod, or else as this computer.

    Args:
        id: what its provider calls it.
        private_ip: the address by which the other machines reach it. Default: not known, then it is found out.
        public_ip: the address by which everybody does. Default: none.
        ssh: how it is reached. Default: None, it has joined or is this computer.
        hourly_cost: dollars per hour. Default: 0.
        joined: its place, if it has connected to us. Default: None.
        pod: its pod, if it is reached by `kubectl exec`. Default: None.
    """

    id: str
    private_ip: str = ""
    public_ip: str | None = None
    ssh: SshTarget | None = None
    hourly_cost: float = 0.0
    joined: JoinTarget | None = None
    pod: PodTarget | None = None

    @property
    def is_local(self) -> bool:
        """Whether it is this computer."""
        return self.ssh is None and self.joined is None and self.pod is None

    @property
    def preemptible(self) -> bool:
        """Whether its owner may take it away at any time."""
        return False

    @property
    def gone(self) -> str:
        """Why it no longer exists; empty while it does."""
        return ""

    @property
    def shell_command(self) -> str:
        """What gives a person a shell there, where that is not ssh; empty if unknown."""
        return ""


@dataclass(frozen=True)
class Receipt:
    """That a pool's machines were given back; providers that create something have subclasses that say more."""

    pool: str
    text: str = field(default="", kw_only=True)

    @property
    def is_empty(self) -> bool:
        return type(self) is Receipt and not self.text

    def __str__(self) -> str:
        return self.text or f"pool {self.pool} is closed; there was nothing to pay for or to end."


@dataclass(frozen=True)
class Leftover:
    """Something that was created for a pool and still exists: a machine, or anything else."""

    pool: str
    id: str
    kind: str = "machine"
    detail: str = ""
    """For people, such as "g5.xlarge, running"."""
    hourly_cost: float = 0.0
    """Dollars per hour now: 0 for a machine that is ending."""
    expires: float | None = None
    """When the pool's time is over, by the tags (seconds since 1970)."""
    foreign: str = ""
    """Why it is not the pool's although it has its tag, and what to do; empty for the pool's."""

    def __str__(self) -> str:
        name = self.id if self.kind == "machine" else f"{self.kind} {self.id}"
        return f"{name} ({self.detail})" if self.detail else name


@dataclass(frozen=True)
class Admission:
    """Whom the machines let in, as far as their provider decides that."""

    changed: str = ""
    """What was just changed, for the user."""
    allowed: str = ""
    """Who is let in and how to change that: part of the message about machines that do not answer."""


class _Held(Protocol):
    """Shows other processes that a pool is in use."""

    def let_go(self) -> None: ...

    def note(self, **data: Any) -> None: ...


class Lease:
    """What a provider holds for an open pool: returned by `Provider.acquire`, used by many threads, until it is closed.

    Its machines are neither watched nor replaced; an elastic provider returns a subclass.

    Args:
        provider: whose machines they are.
        pool: the name under which they were acquired.
        machines: those that the pool opens with.
        hourly_cost: dollars for all of them; infinite if unknown. Default: the sum of theirs.
        accelerator: which variant they have, if the spec left that open.
        ledger: the pool's, if the provider writes one.
    """

    def __init__(
        self,
        provider: Provider,
        pool: str,
        machines: Iterable[Machine] = (),
        *,
        hourly_cost: float | None = None,
        accelerator: Accelerator | None = None,
        ledger: _Held | None = None,
    ) -> None:
        self.provider = provider
        self.pool = pool
        self.machines = tuple(machines)
        self.accelerator = accelerator
        self._hourly_cost = hourly_cost
        self._held = ledger
        self.ends_at = float("inf")
        """When the machines end at the latest, whatever we do: seconds since 1970."""

    @property
    def hourly_cost(self) -> float:
        if self._hourly_cost is not None:
            return self._hourly_cost
        return sum(machine.hourly_cost for machine in self.machines)

    def more(self, spec: Spec, count: int, timeout: float, report: Report) -> Sequence[Machine]:
        """`count` more machines, as `Provider.acquire` gets them."""
        raise SkywardError(f"{self.provider.name} has no more machines for an open pool.")

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        """The same machines as they are now, in the same order; never waits."""
        return list(machines)

    def readmit(self) -> Admission:
        """Has machines let in this computer, whose address may have changed; called while they do not answer."""
        return Admission()

    def terminate(self, machines: Sequence[Machine]) -> None:
        """Ends some of the `machines`; it is no error if they are gone."""
        raise SkywardError(f"{self.provider.name} cannot end single machines of a pool.")

    def warn_with(self, warn: Report) -> None:
        """Sets who hears what the user should know while the pool is open."""

    def close(self, report: Report) -> object:
        """Gives everything back, as `Provider.give_back` does; may be repeated."""
        self.let_go()
        return self.provider.give_back(self.pool, report)

    def hand_over(self, run: str, until: float) -> None:
        """Leaves everything to a detached run, until it is over: no process of this computer uses it."""
        if self._held is not None:
            self._held.note(detached=run, until=until)
        self.let_go()

    def leave(self) -> None:
        """Closes what this process has open, once everything was handed over."""

    def way_back(self) -> Mapping[str, Any] | None:
        """How other processes reach node 0 of a detached run, as JSON; None: by ssh."""
        return None

    def keeps(self, directory: str) -> bool:
        """Whether a directory of node 0 can be read on the way back when its machine is gone."""
        return False

    def let_go(self) -> None:
        """Leaves everything to other processes, such as the watchdog: they may now give it back."""
        if self._held is not None:
            self._held.let_go()


class Provider(ABC):
    """Gets machines and gives them back. A provider is a frozen dataclass: its fields are its settings.

    Only `offers` and `acquire` are required. A provider that rents machines (`rented`) also has `give_back` and `find`;
    one that can give machines to an open pool (`elastic`) returns a `Lease` of its own, which has `more`, `refresh` and
    `terminate`.
    """

    def __repr__(self) -> str:
        """Settings that are not the default, for providers whose dataclass has no repr."""
        shown = [(field.name, vars(self)[field.name], field.default) for field in fields(cast(Any, self))]
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value, default in shown if value != default)})"

    @property
    def name(self) -> str:
        """What the provider is called in messages."""
        return type(self).__name__

    @property
    def default_nodes(self) -> int:
        """How many nodes a pool has by default."""
        return 1

    @property
    def access(self) -> Access:
        """How its machines are reached, beyond their addresses; the default is right for hosts with ssh."""
        return Access()

    @property
    def rented(self) -> bool:
        """Whether machines exist because of the pool, and cost something until they are given back."""
        return False

    @property
    def elastic(self) -> bool:
        """Whether an open pool can get more machines, to replace lost ones."""
        return False

    @property
    def replaces_together(self) -> bool:
        """Whether machines that are lost together are replaced by one `Lease.more`, not each alone."""
        return False

    @abstractmethod
    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        """What is available for `count` nodes of `spec`, first choice first, with text for people. Creates nothing."""

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        """For `sky offers`: whether `count` machines of each of these `offers` are available, as far as is known."""
        return [Availability() for _ in offers]

    @abstractmethod
    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Lease:
        """`count` running machines of `spec` with addresses, within `timeout` seconds; if not, nothing is left.

        `pool` is a new name, and goes on everything created. `report` tells the user what is being waited for. They may
        be fewer if the spec has `min_nodes`, but not fewer than that; an elastic provider gets the others later, with
        `Lease.more`.
        """

    def give_back(self, pool: str, report: Report) -> object:
        """Ends everything that was created for a `pool` and confirms it; returns a receipt, or None if nothing was.

        Called when a lease is closed or, if its process was killed, by another one: it may be repeated, works without
        the ledger, and what is gone is no error. If something is left, it raises `NotGivenBack`. `report` tells the
        user what is being waited for.
        """
        return None

    def find(self) -> list[Leftover]:
        """Everything that exists for pools of this user, without the ledger. What has a pool's tag without proof says
        so in `foreign`; it is listed, never ended.
        """
        return []

    def warmed(self, key: str) -> Provider:
        """This provider for machines on which the environment of that `key` may be ready: see `keep`."""
        return self

    def keep(self, machine: Machine, shell: Shell, cache: str, directory: str) -> str | None:
        """Keeps the disk of a `machine` whose environment was just made, for the next pool with the same key.

        `shell` runs commands there. `cache` has the environment, `directory` is the pool's, still empty. Returns what
        to tell the user if it was not kept.
        """
        return f"{self.name} has no warm starts: Image(warm=True) does nothing there."

    def kept(self) -> list[Leftover]:
        """What `keep` has kept, with what it costs."""
        return []

    def discard(self, unused: float = 0.0) -> list[str]:
        """Deletes what was kept and has been `unused` for so many seconds; returns its ids."""
        return []

    def reopened(self, metadata: Mapping[str, Any]) -> Provider:
        """This provider with a pool's settings (`metadata`) from a ledger, or those given to `sky ps`."""
        return self
