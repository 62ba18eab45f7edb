"""`sky runs`: lists the runs of this computer, and removes those that are named."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command, add_json, in_bytes, print_json, table

if TYPE_CHECKING:
    from skyward.history.runs import Run as Kept

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "runs",
        "list runs, or remove what they have kept",
        "Lists the runs of this computer, the one that was written to last first: detached runs, with where they run, "
        "since when, until when at the latest, what their machines have cost, and their state; and the results that "
        "`resume=` has kept under a name. `sky runs drop` removes runs with all that they have kept.",
        ["sky runs", "sky runs --json", "sky runs drop grid-1"],
        "exit status: 0, also if there is none; 1 if a run that is named is not known or in use; 2 for a wrong "
        "command line.",
        shape="one object per line: name, kind, began, changed (seconds since 1970), size (bytes), results (how many "
        "are kept), in_use; of a detached run also stage (running, finished, failed, ..., not reached), where (the "
        "provider), started, until (when it ends at the latest), spent (dollars; null if not known).",
    )
    parser.add_argument("action", nargs="?", choices=("drop",), help="drop: remove the runs that are named")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the name of a run")
    add_json(parser)
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    from skyward.errors import HostUnreachable
    from skyward.history import runs
    from skyward.machines.parallel import each
    from skyward.pool.run import Run
    from skyward.pool.run_record import KIND

    if arguments.action == "drop":
        if not arguments.names:
            arguments.error("no runs named. `sky runs` lists them")
        for found in [runs.find(name) for name in arguments.names]:
            if found.kind == KIND:
                run = Run(found.name)
                run.check_over()
                try:
                    run.remove()
                except HostUnreachable as exc:
                    print(f"sky: warning: its folder {run.folder} stays there: {exc}", file=sys.stderr)
            runs.drop(found)
            print_json({"dropped": found.name}) if arguments.json else print(f"{found.name}: removed")
        return 0
    rows = each(_row, runs.runs())
    if arguments.json:
        for row in rows:
            print_json(row)
    elif not rows:
        print("no run has kept anything on this computer")
    else:
        print("\n".join(table([_HEAD, *map(_shown, rows)], right=_RIGHT)))
    return 0


_HEAD = ("run", "kind", "where", "started", "until", "spent", "results", "size", "changed", "")
_RIGHT = ("results", "size", "spent")


def _row(found: Kept) -> dict[str, Any]:
    kept = [fact for fact in found.facts()[0] if fact.get("fact") in ("result", "told")]  # told: a trial has ended
    return {
        "name": found.name,
        "kind": found.kind,
        "began": found.began,
        "changed": found.changed,
        "size": found.size,
        "results": len({(fact.get("item"), fact.get("version"), fact.get("number")) for fact in kept}),
        "in_use": found.in_use,
        **_of_detached(found),
    }


def _of_detached(found: Kept) -> dict[str, Any]:
    from skyward.errors import SkywardError
    from skyward.pool.run import Run
    from skyward.pool.run_record import KIND

    known: dict[str, Any] = dict.fromkeys(("stage", "where", "started", "until", "spent"))
    if found.kind != KIND:
        return known
    run = Run(found.name)
    known["where"] = run.about.get("provider")
    try:
        status = run.status
    except SkywardError:  # `sky attach` says more
        return {**known, "stage": "not reached"}
    until = None if status.over else status.until
    return {**known, "stage": status.stage, "started": status.began, "until": until, "spent": status.spent}


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    started, until, changed = (_when(row[name]) for name in ("started", "until", "changed"))
    spent = f"${row['spent']:,.2f}" if row["spent"] else ""
    stage = row["stage"] or ("in use" if row["in_use"] else "")
    of_run = row["name"], row["kind"], row["where"] or "", started, until, spent
    return (*of_run, str(row["results"] or ""), in_bytes(row["size"]), changed, stage)


def _when(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%b %d %H:%M", time.localtime(seconds))
