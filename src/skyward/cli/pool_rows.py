"""The rows of `sky ps`: what programs say of their pools, merged with what histories, ledgers and providers know."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyward.history.history import History
    from skyward.history.store import Entry
    from skyward.machines.reaper import Found
    from skyward.pool.stacks_socket import Silent
    from skyward.pool.summary import Summary

__all__ = ["Row", "merged"]


@dataclass(frozen=True)
class Row:
    """One pool. None is what nobody knows; times are seconds, or seconds since 1970, money is dollars."""

    pool: str
    state: str
    provider: str = ""
    region: str = ""
    nodes: int | None = None
    up: int | None = None
    running: int | None = None
    waiting: int | None = None
    done: int | None = None
    failed: int | None = None
    cost: float | None = None
    hourly: float | None = None
    began: float | None = None
    age: float | None = None
    program: str = ""
    pid: int | None = None
    host: str = ""
    machines: str = ""
    """The name for `sky down`, where machines are rented."""
    left: tuple[str, ...] = ()
    """What exists at the provider."""
    notes: tuple[str, ...] = ()


def merged(
    told: Sequence[Summary],
    silent: Sequence[Silent],
    recorded: Sequence[tuple[Entry, History]],
    found: Sequence[Found],
    now: float,
) -> list[Row]:
    """One row a pool: those that programs have open, the newest last, and then what is left of others.

    `recorded` are histories that are being written: pools that have not said anything yet, or do not answer.
    """
    rows = [_told(each) for each in told]
    known = [(row.pool, row.pid) for row in rows]
    stuck = [each.pid for each in silent]
    for entry, history in sorted(recorded, key=lambda each: each[0].began):
        key = (entry.pool, entry.about.get("pid"))
        if key in known:
            known.remove(key)  # the same pool: two of one name in one program have two histories
        elif history.state not in ("closed", "killed"):  # a moment ago
            rows.append(_recorded(entry, history, "no answer" if key[1] in stuck else history.state, now))
    named = {row.pid for row in rows}
    unnamed = {each.pid: each.why for each in silent if each.pid not in named}
    rows += [Row("unknown", "no answer", pid=pid or None, notes=(why,)) for pid, why in unnamed.items()]
    rows.sort(key=lambda row: row.began or math.inf)
    others: list[Row] = []
    for item in found:
        place = next((at for at, row in enumerate(rows) if _same(row, item)), None)
        if place is None:
            others.append(_left(item, now))
        else:
            rows[place] = _with(rows[place], item)
    return [replace(row, age=now - row.began if row.began else None) for row in (*rows, *others)]


def _told(summary: Summary) -> Row:
    known = {name: getattr(summary, name) for name in Row.__dataclass_fields__ if hasattr(summary, name)}
    return Row(**known, host=socket.gethostname())


def _recorded(entry: Entry, history: History, state: str, now: float) -> Row:
    calls = history.calls()
    return Row(
        pool=entry.pool,
        state=state,
        provider=history.provider,
        nodes=history.nodes,
        running=sum(call.outcome == "running" for call in calls),
        done=sum(call.items - call.failed for call in calls if call.failed_items or call.outcome == "ok"),
        failed=sum(call.failed for call in calls),
        cost=history.cost(now) if history.price_known else None,
        began=entry.began,
        program=str(entry.about.get("program", "")),
        pid=entry.about.get("pid"),
        host=socket.gethostname(),
    )


def _same(row: Row, item: Found) -> bool:
    """Whether what is found belongs to an open pool; one that is opening does not know the name of its machines yet."""
    if row.machines:
        return row.machines == item.pool
    opening = item.pool.rpartition("-")[0] == row.pool and item.condition == "in use"
    return opening and item.pid == row.pid and item.host == row.host


def _with(row: Row, item: Found) -> Row:
    left = _left(item, 0.0)
    hourly = row.hourly if row.hourly is not None else left.hourly
    return replace(row, machines=item.pool, region=left.region, left=left.left, notes=left.notes, hourly=hourly)


def _left(item: Found, now: float) -> Row:
    hourly = item.hourly_cost if math.isfinite(item.hourly_cost) else None
    cost = None if hourly is None or item.opened is None else hourly * max(0.0, now - item.opened) / 3600
    notes = [*dict.fromkeys(other.foreign for other in item.foreign)]
    notes += [f"{item.unanswered} calls may have created something that is not seen yet"] if item.unanswered else []
    notes += [f"the provider could not be asked: {item.trouble}"] if item.trouble else []
    return Row(
        pool=item.pool,
        state=item.condition,
        provider=item.provider.name,
        region=item.region,
        nodes=sum(thing.kind == "machine" for thing in item.leftovers),
        cost=cost,
        hourly=hourly,
        began=item.opened,
        pid=item.pid,
        host=item.host or "",
        machines=item.pool,
        left=tuple(map(str, item.leftovers)),
        notes=tuple(notes),
    )
