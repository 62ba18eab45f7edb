"""Which shell reaches a machine: of ssh, or of one that has joined. Each is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyward.api.provider import Machine
from skyward.api.shell import Shell

__all__ = ["shell_of", "tell_of_strangers"]


def shell_of(machine: Machine) -> Shell:
    """The shell of another machine."""
    if machine.joined is not None:
        from skyward.setup.joined.arrivals import shell_for

        return shell_for(machine.joined)
    from skyward.setup.ssh.shell import SshShell

    assert machine.ssh is not None
    return SshShell(machine.ssh)


def tell_of_strangers(machines: Sequence[Machine], warn: Callable[[str], None]) -> None:
    """Has the user told of whoever wants to join and is not let in."""
    for pool in {machine.joined.pool for machine in machines if machine.joined is not None}:
        from skyward.setup.joined.arrivals import find_arrivals

        if (arrivals := find_arrivals(pool)) is not None:
            arrivals.warn_with(warn)
