"""Gets machines for a pool and gives them back; if the client dies in between, the watchdog gives them back."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack

from skyward.api.context import PoolContext
from skyward.api.provider import Holding
from skyward.errors import NoCapacity, QuotaExceeded
from skyward.machines.watchdog import Watchdog

__all__ = ["acquire"]

_PATIENCE = 600.0  # machines take minutes to shut down
_KEY = "machines"


def acquire(
    context: PoolContext, watchdog: Watchdog, steps: ExitStack, keep_receipt: Callable[[object], None]
) -> Holding:
    """The pool's machines, `min_nodes` of them if not all can be had; giving them back is a step on `steps`."""
    try:
        return _acquired(context, context.nodes, watchdog, steps, keep_receipt)
    except (NoCapacity, QuotaExceeded) as exc:
        if context.min_nodes == context.nodes or not context.provider.elastic:
            raise
        context.warn(f"{exc}\nTrying with min_nodes={context.min_nodes} instead of {context.nodes}.")
        return _acquired(context, context.min_nodes, watchdog, steps, keep_receipt)


def _acquired(
    context: PoolContext, count: int, watchdog: Watchdog, steps: ExitStack, keep_receipt: Callable[[object], None]
) -> Holding:
    provider, name = context.provider, f"{context.name}-{secrets.token_hex(3)}"
    if provider.rented:
        from skyward.machines.reaper import look_around

        steps.callback(look_around(provider, context.warn).join, 1)
        # the ledger knows the provider and its settings; an endpoint that is not AWS's counts only if we say so
        argv = [sys.executable, "-P", "-m", "skyward", "down", name, "--yes", "--if-there"]
        argv += ["--endpoint-url", endpoint] if (endpoint := getattr(provider, "endpoint_url", None)) else []
        watchdog.add(_KEY, argv, patience=_PATIENCE)

    def leave_to_watchdog() -> None:
        from skyward.machines.ledger import Ledger

        ledger = Ledger.held(name)
        if ledger is not None:
            ledger.let_go()  # so that the watchdog can take it over
        if provider.rented and context.hurried():
            context.warn(f"giving back was interrupted; a watchdog does it now. `sky ps` shows when {name} is gone.")

    def give_back() -> None:
        if context.hurried() and provider.rented:
            leave_to_watchdog()
            return
        try:
            receipt = provider.give_back(name, context.report)
        except Exception:
            watchdog.drop(_KEY)  # the error names what is left
            raise
        except BaseException:
            leave_to_watchdog()
            raise
        watchdog.drop(_KEY)
        for text in getattr(receipt, "remarks", ()):
            context.warn(text)
        keep_receipt(receipt)

    try:
        holding = provider.acquire(context.spec, name, count, context.provision_timeout, context.report)
    except Exception:
        watchdog.drop(_KEY)
        raise
    except BaseException:
        leave_to_watchdog()
        raise
    steps.callback(give_back)
    context.tell_cost(holding.hourly_cost)
    return holding
