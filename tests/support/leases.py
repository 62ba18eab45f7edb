"""Leases in tests: machines that are given back by another process than the one that got them."""

from __future__ import annotations

from typing import Any

import pytest

from skyward.api.provider import Lease, Provider
from skyward.api.shell import Shell
from skyward.setup.joined.arrivals import Arrivals

__all__ = ["listening", "quiet", "returned", "unreached"]


def listening(monkeypatch: pytest.MonkeyPatch) -> list[Arrivals]:
    """Fills with what listens for machines from now on: the secret with which they join is theirs."""
    found: list[Arrivals] = []
    listen = Arrivals.listen

    def noted(self: Arrivals, host: str, port: int, advertise: tuple[str, ...]) -> None:
        listen(self, host, port, advertise)
        found.append(self)

    monkeypatch.setattr(Arrivals, "listen", noted)
    return found


def quiet(text: str) -> None:
    """Nobody reads what a provider reports."""


def unreached() -> Shell:
    """How a machine is reached that a test has made up."""
    raise AssertionError("no machine is there")


def returned(lease: Lease, provider: Provider | None = None) -> Any:
    """The receipt of `Provider.give_back`, as another process calls it once the pool's own is gone."""
    lease.let_go()
    return (provider or lease.provider).give_back(lease.pool, quiet)
