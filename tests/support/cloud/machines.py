"""The machines of a test cloud: when they are seen, when they run, how many of them there are room for."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from skyward.errors import InvalidArgument

__all__ = ["Hooks", "ImageHooks", "Instance", "Machines", "NoticeHooks", "Times"]


@dataclass
class Times:
    """How long things take in this cloud, in seconds."""

    visible: float = 0.0
    """Until what was made is shown."""
    boot: float = 0.0
    """From pending to running."""
    shutdown: float = 0.0
    """From shutting down to terminated."""


@dataclass
class Instance:
    """A machine, as the cloud itself knows it."""

    id: str
    region: str
    zone: str
    kind: str
    market: str
    private_ip: str
    public_ip: str | None
    user_data: str
    public_key: str
    """The key that may log in."""
    groups: tuple[str, ...]
    tags: Mapping[str, str]
    made: float
    visible_at: float
    running_at: float
    ended: float | None = None
    gone_at: float = 0.0
    reason: str = ""
    died: bool = False
    image: str = ""
    """What it was launched from."""
    token: str = ""
    """The client token of the call that launched it."""
    noticed: float | None = None
    """When it is taken away, if it was given notice."""

    def state(self, now: float) -> str:
        """Its state at a moment."""
        if self.ended is not None:
            return "terminated" if now >= self.gone_at else "shutting-down"
        return "running" if now >= self.running_at else "pending"


class Hooks(Protocol):
    """What stands behind machines: real hosts, or nothing."""

    def machine_started(self, instance: Instance) -> None:
        """A machine was launched; returns when it may be seen as running. May change the addresses that are shown."""
        ...

    def machine_terminated(self, instance: Instance) -> None:
        """A machine was terminated, reclaimed, or has ended itself."""
        ...


@runtime_checkable
class NoticeHooks(Hooks, Protocol):
    """Hooks that are also told when a machine is given notice."""

    def machine_noticed(self, instance: Instance, deadline: float) -> None:
        """A machine is taken away at this time (in seconds since 1970); what it may know of it is up to its hooks."""
        ...


@runtime_checkable
class ImageHooks(Hooks, Protocol):
    """Hooks that also keep what is on a machine's disk when an image is made of it."""

    def image_made(self, instance: Instance, image: str) -> None:
        """An image is made of a machine that goes on running; machines with that `image` start with what it has now."""
        ...


@dataclass
class Machines:
    """All machines that ever were, and room for more."""

    times: Times = field(default_factory=Times)
    hooks: Hooks | None = None
    all: dict[str, Instance] = field(default_factory=dict[str, Instance])
    rooms: list[tuple[str, str, str, int]] = field(default_factory=list[tuple[str, str, str, int]])
    lock: threading.RLock = field(default_factory=threading.RLock)

    def room(self, zone: str, kind: str, market: str, requested: int) -> int:
        """How many of `requested` are available; the limits set last count."""
        with self.lock:
            for zones, kinds, markets, most in reversed(self.rooms):
                if fnmatchcase(zone, zones) and fnmatchcase(kind, kinds) and fnmatchcase(market, markets):
                    used = sum(
                        fnmatchcase(i.zone, zones) and fnmatchcase(i.kind, kinds) and fnmatchcase(i.market, markets)
                        for i in self.all.values()
                        if i.ended is None
                    )
                    return max(0, min(requested, most - used))
        return requested

    def started(self, instance: Instance) -> None:
        """A machine is there."""
        with self.lock:
            self.all[instance.id] = instance
        if self.hooks is not None:
            self.hooks.machine_started(instance)

    def noticed(self, id: str, deadline: float) -> None:
        """A spot machine is told when it will be taken away."""
        with self.lock:
            instance = self.all.get(id)
            if problem := _no_notice(id, instance):
                raise InvalidArgument(f"{problem}. Give notice to one of cloud.running() whose market is 'spot'.")
            assert instance is not None
            instance.noticed = deadline
        if isinstance(self.hooks, NoticeHooks):
            self.hooks.machine_noticed(instance, deadline)

    def ended(self, id: str, reason: str = "Client.UserInitiatedShutdown") -> bool:
        """A machine ends; False if it had already."""
        with self.lock:
            instance = self.all[id]
            if instance.ended is not None:
                return False
            instance.ended = time.time()
            instance.gone_at = instance.ended + self.times.shutdown
            instance.reason = reason
        if self.hooks is not None:
            self.hooks.machine_terminated(instance)
        return True

    def shown(self, id: str) -> Instance | None:
        """A machine, if calls can see it by now."""
        with self.lock:
            instance = self.all.get(id)
        return instance if instance is not None and time.time() >= instance.visible_at else None


def _no_notice(id: str, instance: Instance | None) -> str:
    """Why a machine gets no notice; nothing if it does."""
    if instance is None:
        return f"no notice for {id!r}: this cloud has never had such a machine"
    if instance.ended is not None:
        return f"no notice for {id!r}: it has ended already ({instance.reason})"
    return (
        "" if instance.market == "spot" else f"no notice for {id!r}: it is {instance.market}, which EC2 never reclaims"
    )
