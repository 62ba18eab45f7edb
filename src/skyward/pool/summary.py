"""What `sky ps` is told of a pool that is open: its state, nodes, calls and cost, as one record."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyward.api.context import PoolContext
from skyward.pool.state import PoolState

if TYPE_CHECKING:
    from skyward.client.engine import Engine

__all__ = ["Summary", "program", "spent", "summary_of"]

_HOUR = 3600.0


@dataclass(frozen=True)
class Summary:
    """A pool at this moment, in values that JSON has."""

    pool: str
    pid: int
    program: str
    state: str
    provider: str
    region: str
    machines: str
    """The name by which its machines are known, as `sky down` takes it; empty where none are rented."""
    began: float
    """When it was opened, in seconds since 1970."""
    nodes: int
    up: int
    """How many nodes take calls now."""
    running: int
    waiting: int
    done: int
    failed: int
    cost: float | None
    """Dollars so far, by the machines' price an hour; 0 where they cost nothing, None where the price is not known."""
    hourly: float | None


def summary_of(context: PoolContext, machines: str, engine: Engine, state: PoolState) -> Summary:
    """What is to be told now."""
    running, waiting, done, failed = engine.counts()
    hourly = context.prices[-1][1] if context.prices else 0.0
    return Summary(
        pool=context.name,
        pid=os.getpid(),
        program=program(),
        state=state.now,
        provider=context.provider.name,
        region=getattr(context.provider, "region", None) or "",
        machines=machines if context.provider.rented else "",
        began=state.began,
        nodes=context.nodes,
        up=len(engine.up()),
        running=running,
        waiting=waiting,
        done=done,
        failed=failed,
        cost=spent(context.prices, time.time()),
        hourly=hourly if math.isfinite(hourly) else None,
    )


def spent(prices: Sequence[tuple[float, float]], until: float) -> float | None:
    """Dollars from prices an hour, each with the time since when; None where one of them is not known."""
    ends = [*(since for since, _ in prices), until][1:]
    total = math.fsum(hourly * (end - since) / _HOUR for (since, hourly), end in zip(prices, ends, strict=True))
    return total if math.isfinite(total) else None


def program() -> str:
    """What this program is called."""
    return os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
