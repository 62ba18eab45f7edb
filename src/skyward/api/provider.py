"""Where machines come from. A provider gets them and gives them back, and knows nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from skyward.accelerators import Accelerator
from skyward.api.shell import Access, SshTarget
from skyward.api.spec import Spec

__all__ = ["Holding", "Machine", "Offer", "Provider", "Report"]

Report = Callable[[str], None]


@dataclass(frozen=True)
class Offer:
    """What could be had, and for how much an hour."""

    name: str
    hourly_cost: float = 0.0
    vcpus: float | None = None
    memory_gb: float | None = None


@dataclass(frozen=True)
class Machine:
    """A machine of a pool; `reached` says how to talk to it, `private_ip` is empty until it is known."""

    id: str
    reached: Literal["local", "ssh"]
    private_ip: str
    public_ip: str | None = None
    ssh: SshTarget | None = None
    hourly_cost: float = 0.0

    @property
    def preemptible(self) -> bool:
        """Whether its owner may take it away at any time."""
        return False

    @property
    def gone(self) -> str:
        """Why it is not there any more; empty if it is."""
        return ""


@dataclass(frozen=True)
class Holding:
    """The machines that a pool has, and the name under which its provider knows them."""

    pool: str
    machines: tuple[Machine, ...]
    hourly_cost: float = 0.0
    accelerator: Accelerator | None = None
    """Which variant the machines have, where the spec left that open."""


class Provider(ABC):
    """The contract of a provider; each is one frozen dataclass in one file of `providers/`."""

    @property
    def name(self) -> str:
        """What the provider is called in messages."""
        return type(self).__name__

    @property
    def default_nodes(self) -> int:
        """How many nodes a pool has if it does not say."""
        return 1

    @property
    def access(self) -> Access:
        """How its machines are got at."""
        return Access()

    @property
    def elastic(self) -> bool:
        """Whether a pool that is open can be given more machines."""
        return False

    def plan(self, spec: Spec, count: int) -> object:
        """What would be had for `spec`, and for how much; as text it is for people. Creates nothing."""
        return list(self.offers(spec))

    def acquire(
        self, spec: Spec, name: str, count: int, timeout: float, report: Report, joining: str | None = None
    ) -> Holding:
        """Machines that run and have addresses, under `name` or, if given, among those of the pool `joining`.

        When this fails, or is interrupted, nothing that it created is left.
        """
        offer = next(iter(self.offers(spec)))
        return Holding(name, tuple(self.launch(offer, count, name)))

    def give_back(self, holding: Holding, report: Report) -> object:
        """Ends all machines of a pool and confirms it; gives a receipt, where there is something to account for."""
        self.terminate(holding.machines)
        return None

    def ending(self, name: str) -> list[str] | None:
        """The command that ends what a pool of that name has, should we be killed; None if nothing could be left."""
        return None

    def let_go(self, name: str) -> None:  # noqa: B027 - most providers have nothing to let go of
        """Leaves what a pool of that name has to whoever runs `ending`, although this process lives."""

    def dismiss(self, machines: Sequence[Machine]) -> None:
        """Gives back machines of a pool that goes on, with others or, for a while, with none."""
        self.terminate(machines)

    @abstractmethod
    def offers(self, spec: Spec) -> Iterable[Offer]:
        """What could be had for `spec`, with prices."""

    @abstractmethod
    def launch(self, offer: Offer, count: int, label: str) -> list[Machine]:
        """Machines, as soon as they have ids; `label` is on everything that is created."""

    @abstractmethod
    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        """The same machines as they are now; never waits."""

    @abstractmethod
    def terminate(self, machines: Sequence[Machine]) -> None:
        """Gives machines back; silent about those already gone."""

    @abstractmethod
    def find(self, label: str) -> list[Machine]:
        """Everything that carries `label`."""
