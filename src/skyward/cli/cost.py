"""`sky cost`: what was spent, by pool and day."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command, add_json, print_json

if TYPE_CHECKING:
    from skyward.history.spending import Row, Spending

__all__ = ["add", "run", "told"]


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

    from skyward.errors import InvalidArgument
    from skyward.history.spending import gather, rows, total

    if not 1 <= arguments.days <= 400:
        raise InvalidArgument(f"--days {arguments.days}: give a number from 1 to 400; older costs are not kept.")
    first = date.today() - timedelta(days=arguments.days - 1)
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
