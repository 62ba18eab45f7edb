"""`sky cost`: what was spent, by pool and day."""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from skyward import events
from skyward.cli.common import add_command, add_json, print_json
from skyward.events import Event
from skyward.history.lines import parsed
from skyward.history.state import PoolState
from skyward.history.store import Entry, entries
from skyward.machines import spent
from skyward.machines.ledger import histories
from skyward.machines.spent import Charge

if TYPE_CHECKING:
    from skyward.cli.cost import Row, Spending

__all__ = [
    "By",
    "Row",
    "Spending",
    "add",
    "by_day",
    "gather",
    "of_events",
    "rows",
    "run",
    "told",
    "total",
]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "cost",
        "what was spent, by pool and day",
        "Shows what the pools of this computer have cost, with disks and public addresses, as on their receipts; pools "
        "that are still open count so far. A pool that runs over midnight is in both days. Machines without a known "
        "price are counted apart. Traffic, and images that are kept for warm starts, are not included.",
        [
            "sky cost",
            "sky cost --days 7 --by day",
            "sky cost --by pool --json | jq -s 'map(.dollars) | add'",
        ],
        shape="one object per line; pools whose provider has no prices are not included.",
    )
    parser.add_argument("--days", type=int, default=30, metavar="N", help="how many days, with today (30)")
    parser.add_argument("--by", choices=("pool", "day", "provider"), help="sum up by this (default: by pool and day)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict
    from datetime import date, datetime, timedelta

    from skyward.cli.cost import gather, rows, total
    from skyward.errors import InvalidArgument
    from skyward.pool.run import copy_histories

    if not 1 <= arguments.days <= 400:
        raise InvalidArgument(f"--days {arguments.days}: give a number from 1 to 400; older costs are not kept.")
    first = date.today() - timedelta(days=arguments.days - 1)
    copy_histories()
    spending = gather(datetime(first.year, first.month, first.day).timestamp())
    found = rows(spending.charges, arguments.by or "pool and day", first)
    if arguments.json:
        for row in found:
            record = asdict(row)
            amounts = {name: round(record[name], 6) for name in ("dollars", "spot", "on_demand")}
            print_json({**record, **amounts})
        return 0
    when = "today" if arguments.days == 1 else f"in the last {arguments.days} days"
    print("\n".join(told(found, total(spending.charges, first), spending, when)))
    return 0


def told(found: list[Row], whole: Row, spending: Spending, when: str) -> list[str]:
    lines = _table([*found, whole]) if found else [f"nothing was spent {when}, as far as this computer knows"]
    if whole.unknown:
        machines = "1 machine" if whole.unknown == 1 else f"{whole.unknown} machines"
        lines += ["", f"the price of {machines} is not known, and is not included"]
    if spending.unpriced:
        pools = ", ".join(f"{count} of {provider}" for provider, count in spending.unpriced)
        lines += ["", f"pools without prices, not counted: {pools}"]
    return [*lines, *(["", "traffic is not counted"] if found else [])]


def _table(found: list[Row]) -> list[str]:
    cells = [_cells(row) for row in found]
    head = ("day", "pool", "provider", "cost", "spot", "on-demand", "")
    used = [n for n in range(len(head)) if any(row[n] for row in cells[:-1])]
    cells[-1] = tuple("total" if n == used[0] else text for n, text in enumerate(cells[-1]))
    lines = [head, *cells]
    widths = {n: max(len(line[n]) for line in lines) for n in used}
    return [
        "  ".join(line[n].rjust(widths[n]) if 3 <= n <= 5 else line[n].ljust(widths[n]) for n in used).rstrip()
        for line in lines
    ]


def _cells(row: Row) -> tuple[str, ...]:
    from skyward.machines.offers import money

    unknown = "" if not row.unknown else " + 1 unknown" if row.unknown == 1 else f" + {row.unknown} unknown"
    split = [money(part) if part else "" for part in (row.spot, row.on_demand)]
    state = "so far" if row.running else ""
    return (row.day or "", row.pool or "", row.provider or "", money(row.dollars) + unknown, *split, state)


# What pools have cost, by pool and day: kept charges, ledgers of open pools, and histories.


By = Literal["pool and day", "pool", "day", "provider"]


@dataclass(frozen=True)
class Row:
    day: str | None = None
    pool: str | None = None
    provider: str | None = None
    dollars: float = 0.0
    spot: float = 0.0
    on_demand: float = 0.0
    machines: int = 0
    unknown: int = 0
    running: bool = False


@dataclass(frozen=True)
class Spending:
    charges: tuple[Charge, ...] = ()
    unpriced: tuple[tuple[str, int], ...] = ()


def gather(since: float, now: float | None = None, root: Path | None = None) -> Spending:
    now = time.time() if now is None else now
    running = [charge for found in histories(root) for charge in spent.of_ledger(found, now)]
    known = spent.once([*spent.kept(root), *running])
    spans: dict[str, list[tuple[float, float]]] = {}
    for charge in known:
        spans.setdefault(charge.pool, []).append((charge.began, charge.ended))
    unpriced: Counter[str] = Counter()
    told: list[Charge] = []
    for entry in entries(root):
        events_of_pool, last = _pool_events(entry)
        end = now if entry.running else last
        if end < since or any(began <= end and entry.began <= ended for began, ended in spans.get(entry.pool, ())):
            continue
        found = list(of_events(entry.pool, events_of_pool, end, entry.running))
        told += found
        if not found:
            unpriced[_provider(events_of_pool)] += 1
    charges = (charge for charge in (*known, *told) if charge.ended >= since)
    return Spending(tuple(charges), tuple(sorted(unpriced.items())))


def of_events(pool: str, found: Sequence[Event], end: float, running: bool) -> Iterator[Charge]:
    state = PoolState()
    for event in found:
        state.apply(event, event.time)
    closed = bool(state.rates) and state.hourly is None
    for began, until, hourly in state.prices(end):
        last = not closed and began == state.rates[-1][0]
        cost = hourly * (until - began) / 3600 if math.isfinite(hourly) else 0.0
        unknown = not math.isfinite(hourly)
        yield Charge(pool, state.provider or "unknown", began, until, cost, unknown=unknown, running=running and last)


def by_day(charge: Charge, zone: tzinfo | None = None) -> Iterator[tuple[date, Charge]]:
    length, began = charge.ended - charge.began, charge.began
    while True:
        day = datetime.fromtimestamp(began, zone).date()
        following = day + timedelta(days=1)
        midnight = datetime(following.year, following.month, following.day, tzinfo=zone).timestamp()
        ended = min(charge.ended, midnight)
        share = (ended - began) / length if length > 0 else 1.0
        over = ended >= charge.ended
        running = charge.running and over
        yield day, replace(charge, began=began, ended=ended, dollars=charge.dollars * share, running=running)
        if over:
            return
        began = ended


def rows(charges: Iterable[Charge], by: By, since: date, zone: tzinfo | None = None) -> list[Row]:
    found: dict[tuple[str | None, str | None, str | None], list[Charge]] = {}
    for charge in charges:
        for day, part in by_day(charge, zone):
            if day < since:
                continue
            key = (
                day.isoformat() if "day" in by else None,
                charge.pool if "pool" in by else None,
                charge.provider if by != "day" else None,
            )
            found.setdefault(key, []).append(part)
    made = [_row(key, parts) for key, parts in found.items()]
    if "day" in by:
        return sorted(sorted(made, key=lambda row: (-row.dollars, row.pool or "")), key=_day, reverse=True)
    return sorted(made, key=lambda row: (-row.dollars, row.pool or "", row.provider or ""))


def total(charges: Iterable[Charge], since: date, zone: tzinfo | None = None) -> Row:
    return _row((None, None, None), [part for c in charges for day, part in by_day(c, zone) if day >= since])


def _row(key: tuple[str | None, str | None, str | None], parts: Sequence[Charge]) -> Row:
    def names(some: Iterable[Charge]) -> int:
        return len({(part.provider, part.pool, part.machine) for part in some})

    return Row(
        *key,
        dollars=sum(part.dollars for part in parts),
        spot=sum(part.dollars for part in parts if part.market == "spot"),
        on_demand=sum(part.dollars for part in parts if part.market == "on-demand"),
        machines=names(part for part in parts if part.machine),
        unknown=names(part for part in parts if part.unknown),
        running=any(part.running for part in parts),
    )


def _day(row: Row) -> str:
    return row.day or ""


def _provider(found: Iterable[Event]) -> str:
    names = [event.provider for event in found if isinstance(event, events.PoolOpening)]
    return names[-1] if names else "unknown"


def _pool_events(entry: Entry) -> tuple[list[Event], float]:
    found: list[Event] = []
    try:
        last = entry.path.stat().st_mtime
        with entry.path.open("rb") as file:
            for line in file:
                event = parsed(line) if line.startswith(b'{"event":"Pool') else None
                if event is not None:
                    found.append(event)
    except OSError:  # removed at this moment
        return [], 0.0
    closed = [event.time for event in found if isinstance(event, events.PoolClosed)]
    return found, closed[-1] if closed else last
