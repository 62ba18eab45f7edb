"""How a machine is reached: the contract of a shell, and what a provider says about its machines."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, Protocol

__all__ = ["Access", "Finished", "JoinTarget", "PodTarget", "Process", "Shell", "SshTarget"]


@dataclass(frozen=True)
class SshTarget:
    """For the ssh program; what is left out comes from the user's own ssh settings."""

    host: str
    user: str | None = None
    port: int | None = None
    key: str | None = None
    host_keys: Literal["strict", "accept-new"] = "strict"
    known_hosts: str | None = None
    config: bool = True
    """Whether the user's ~/.ssh/config counts; not for machines of a cloud."""
    proxy: str | None = None
    """The command that carries ssh's bytes there, as in its option ProxyCommand."""
    proxy_logins: tuple[str, ...] = ()
    """Variables with secrets that this command needs; ssh gets no others."""

    def __str__(self) -> str:
        return f"{self.user}@{self.host}" if self.user else self.host


@dataclass(frozen=True)
class JoinTarget:
    """A machine that has connected to us: its place in a pool, and what it calls itself."""

    pool: str
    place: int
    name: str
    open_shell: Callable[[], Shell] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class PodTarget:
    pod: str
    namespace: str
    context: str | None = None
    """Which cluster, and as whom; None: as kubectl finds out inside a cluster."""

    def __str__(self) -> str:
        return self.pod


@dataclass(frozen=True)
class Access:
    """How a provider's machines are reached, beyond their addresses."""

    lease: float = 900.0
    """Seconds that machines continue without hearing from us; means nothing on this computer."""
    ssh_timeout: float = 60.0
    network: Literal["auto", "mesh", "star"] = "auto"
    lease_file: str | None = None
    """A file on each machine that must be touched within every lease, or the machine shuts down."""
    notices: Callable[[], float] | None = None
    """Runs in each machine's agent until the machine is about to be taken away; returns the seconds left. A function of
    a module that nodes have: it is sent by name.
    """
    settle: Callable[[Shell, SshTarget], str | None] | None = None
    """Called once a machine accepts our login, during setup; the user sees what it returns."""
    prepare: Callable[[Shell, str], tuple[dict[str, str], str | None]] | None = None
    """Called with a machine's id after login, before setup: returns variables for all processes there, and what the
    user sees.
    """
    detaches: bool = False
    """Whether a detached run can have the machines; without it, those that have a `lease_file`, or are `local`."""
    stays: bool = False
    """Whether a run's files can be read where it ran when it is over; without it, node 0 is kept for a while."""
    login: str = ""
    """Which setting names the user who logs in, for the message about refused logins."""
    local: bool = False
    """Whether the machines are this computer: they end with it, share its disk, and need no lease."""


@dataclass(frozen=True)
class Finished:
    code: int
    out: bytes
    err: str


class Process(Protocol):
    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Shell(Protocol):
    """One machine. Implementations quote paths and arguments."""

    @property
    def name(self) -> str: ...

    def connect(self, deadline: float, booting: bool = False, report: Callable[[str], None] | None = None) -> None:
        """Makes the machine reachable, or says why it is not; tries until `deadline` (monotonic). A `booting` machine
        may refuse for a while. `report` gets why it retries.
        """
        ...

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> Process:
        """With pipes, out of reach of Ctrl-C in our terminal."""
        ...

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished: ...

    def upload(self, source: bytes | Path, dest: str) -> None:
        """Mode 0600; half a file is never visible."""
        ...

    def reach(self, host: str, port: int) -> socket.socket:
        """To an address that the machine itself can connect to."""
        ...

    def command(self, argv: Sequence[str]) -> list[str]:
        """What another process of this computer runs for `argv` to run there, once we are gone. Empty if the machine
        does it itself.
        """
        ...

    def ending(self) -> tuple[list[str], str | None]:
        """What that process does to release the machine: a command to run, a directory to remove."""
        ...

    def said(self) -> str: ...

    def close(self) -> None: ...
