"""`sky history`: lists the pools of the last thirty days on this computer."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command, add_json, print_json

if TYPE_CHECKING:
    from skyward.history.history import History

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "history",
        "list the pools of the last thirty days",
        "Lists the pools that were opened on this computer, the newest first: when, how they ended, nodes, calls, "
        "failures, how many of these `sky replay` can run again, and cost, where known.",
        [
            "sky history",
            "sky history --limit 5",
            "sky history --json",
            "sky logs NAME              what its bodies wrote",
            "sky view NAME              its page in the browser",
            "sky replay                 the failed calls that can be run again",
        ],
        "exit status: 0, also if there is none; 2 for a wrong command line.",
        shape="one object per line: id, pool, began (seconds since 1970), state (opening, open, closing, closed, "
        "killed), provider, nodes, calls, failed, replayable (ids for `sky replay`), stopped, seconds, cost (dollars, "
        "null if not known), program.",
    )
    parser.add_argument("--limit", type=_count, default=20, metavar="N", help="how many pools (20)")
    add_json(parser)
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    from skyward.history.failed_calls import kept
    from skyward.history.history import read
    from skyward.history.store import entries
    from skyward.pool.run import copy_histories

    copy_histories()
    rows: list[dict[str, Any]] = []
    costs: dict[str, str] = {}
    for entry in entries()[: arguments.limit]:
        history = read(entry)
        calls = history.calls()
        costs[entry.id] = _cost(history)
        rows.append(
            {
                "id": entry.id,
                "pool": entry.pool,
                "began": entry.began,
                "state": history.state,
                "provider": history.provider,
                "nodes": history.nodes,
                "calls": sum(call.items for call in calls),
                "failed": sum(call.failed for call in calls),
                "replayable": [call.id for call, _ in kept(entry) if not call.refused],
                "stopped": sum(call.items for call in calls if call.outcome == "cancelled"),
                "seconds": round(max(0.0, history.events[-1].time - entry.began), 1) if history.events else 0.0,
                "cost": round(history.cost(), 4) if history.price_known else None,
                "program": str(entry.about.get("program", "")),
            }
        )
    if arguments.json:
        for row in rows:
            print_json(row)
        return 0
    if not rows:
        print("no pool was opened on this computer in the last thirty days")
        return 0
    print(f"{'pool':28} {'opened':16} {'state':8} {'provider':9} nodes  calls failed replay    time     cost  program")
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["began"]))
        print(
            f"{row['pool']:28.28} {when:16} {row['state']:8} {row['provider']:9.9} {row['nodes']:5} {row['calls']:6} "
            f"{row['failed']:6} {len(row['replayable']):6} {row['seconds']:6.0f} s {costs[row['id']]:>8}  "
            f"{row['program']}"
        )
    return 0


def _cost(history: History) -> str:
    from skyward.events import PoolOpened

    if not history.price_known:
        return "unknown"
    if history.priced:
        return f"${history.cost():.2f}"
    return "no price" if any(isinstance(event, PoolOpened) for event in history.events) else ""
