"""Machines for a pool, got and given back; should we be killed in between, a watchdog gives them back."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from skyward.api.provider import Holding, Report
from skyward.machines.selection import Candidate

__all__ = ["Acquisition"]

_PATIENCE = 600.0  # machines take minutes to shut down


@dataclass(frozen=True)
class Acquisition:
    """How one pool gets its machines."""

    pool: str
    timeout: float
    report: Report
    warn: Report
    hurried: Callable[[], bool]
    """Whether the user has no more patience: then the watchdog does what is left to do."""
    given_back: Callable[[object], None]
    """Gets the receipt."""

    def acquire(self, one: Candidate, stack: ExitStack) -> Holding:
        """Machines, with their giving back on `stack`."""
        provider, name = one.provider, f"{self.pool}-{secrets.token_hex(3)}"
        if provider.rented:
            from skyward.machines.ledger import Ledger
            from skyward.machines.reaper import look_around
            from skyward.machines.watchdog import Watchdog

            stack.callback(look_around(provider, self.warn).join, 1)
            watchdog = Watchdog()
            stack.callback(watchdog.close)
            # the ledger knows the provider and its settings
            argv = [sys.executable, "-P", "-m", "skyward", "down", name, "--yes", "--if-there"]
            watchdog.add("machines", argv, patience=_PATIENCE)
            stack.callback(watchdog.drop, "machines")

            def interrupted(kind: type[BaseException] | None, *_: object) -> None:
                # an ExitStack goes on after an interrupt, so giving back may have been cut short just now
                if self.hurried() or (kind is not None and not issubclass(kind, Exception)):
                    ledger = Ledger.held(name)
                    if ledger is not None:
                        ledger.let_go()  # so that the watchdog can take it over
                    watchdog.hand_over()
                if self.hurried():
                    self.warn(
                        f"giving back was interrupted; a watchdog does it now. `sky ps` shows when {name} is gone."
                    )

            stack.push(interrupted)
        holding = provider.acquire(one.spec, name, one.nodes, self.timeout, self.report)

        def give_back() -> None:
            if not self.hurried():
                self.given_back(provider.give_back(holding.pool, self.report))

        stack.callback(give_back)
        return holding
