"""`sky ps`: lists pools that programs of this computer have open, and pools that have left something anywhere."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command, add_json, print_json, table

if TYPE_CHECKING:
    from skyward.api.provider import Leftover
    from skyward.cli.pool_rows import Row
    from skyward.machines.reaper import Found

__all__ = ["add", "add_place", "lines", "run"]

_HEAD = ("POOL", "STATE", "PROVIDER", "NODES", "RUNNING", "WAITING", "DONE", "FAILED", "COST", "AGE", "PROGRAM")
_RIGHT = ("NODES", "RUNNING", "WAITING", "DONE", "FAILED", "COST", "AGE")
_METADATA = "AWS_EC2_METADATA_DISABLED"  # botocore knows it
_CODES = (
    "exit status: 0 also if there are none; 1 if no cloud could be asked although --region, --profile or a ledger of "
    "this computer names one; 2 for a wrong command line."
)


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "ps",
        "list pools that are open, or have left something",
        "Lists the pools that programs of yours have open on this computer, whatever their provider, and pools that "
        "have machines at a provider, or may have left some: found by the ledgers of this computer and by tags. Each "
        "is listed once. States: opening, open, closing; no answer (its program is stopped or very busy); in use; "
        "abandoned (its program is gone); expired (its time is over); elsewhere (opened on another computer, or its "
        "ledger is lost); not ours (only tagged like a pool). Nothing is said of a cloud that nobody is logged in to, "
        "unless --region, --profile, AWS_PROFILE or a ledger names it. `sky history` lists pools that were closed.",
        [
            "sky ps",
            "sky ps --here                   clouds and clusters are not asked",
            "sky ps --region eu-west-1       look there, too, without a ledger",
            "sky ps --json | jq -r .pool",
        ],
        _CODES,
        "one object a line: kind (pool, or kept for an image), pool, state, provider, region, nodes, up (nodes that "
        "take calls), running, waiting, done, failed (calls), cost (dollars so far), hourly (dollars an hour), began "
        "(seconds since 1970), age (seconds), program, pid, host, machines (the name for `sky down`), left (what "
        "exists at the provider), notes (sentences). null is what is not known.",
    )
    parser.add_argument("--here", action="store_true", help="only pools that programs of this computer have open")
    add_json(parser)
    add_place(parser)
    parser.set_defaults(run=run)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where to look."""
    parser.add_argument(
        "--region", action="append", default=[], metavar="REGION", help="look there too (may be repeated)"
    )
    parser.add_argument("--profile", metavar="NAME", help="the profile of your cloud settings")
    parser.add_argument("--endpoint-url", metavar="URL", help="your own endpoint of AWS, if a pool was opened with one")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from skyward.cli.pool_rows import merged
    from skyward.history.history import read
    from skyward.history.store import entries
    from skyward.pool.stacks_socket import summaries

    recorded = [(entry, read(entry)) for entry in entries() if entry.running]  # first: those that close now are gone
    told, silent = summaries()
    found, kept, code = ([], [], 0) if arguments.here else _asked(arguments)
    rows = merged(told, silent, recorded, found, time.time())
    if arguments.json:
        for row in rows:
            print_json({"kind": "pool", **asdict(row)})
        for item in kept:
            print_json({"kind": "kept", "id": item.id, "text": str(item), "hourly": item.hourly_cost})
        return code
    print("\n".join(lines(rows)))
    for item in kept:
        print(f"{item}; `sky down --warm` deletes it")
    return code


def _asked(arguments: argparse.Namespace) -> tuple[list[Found], list[Leftover], int]:
    """What providers and ledgers know; an error is said, and does not hide what is open here."""
    from skyward.errors import CredentialsMissing, SkywardError
    from skyward.machines import reaper
    from skyward.machines.ledger import histories

    providers = reaper.renting_providers(arguments.endpoint_url)
    named = bool(arguments.region or arguments.profile or arguments.endpoint_url or os.environ.get("AWS_PROFILE"))
    used = any(ledger.metadata.get("provider", "AWS") == "AWS" for ledger in histories())
    try:
        with nullcontext() if named or used or _is_of_amazon() else _without_metadata_service():
            found = reaper.pools(providers, arguments.region, profile=arguments.profile, quiet=not named)
            return found, reaper.kept(providers), 0
    except CredentialsMissing as exc:
        print(f"sky: clouds were not asked: {exc}", file=sys.stderr)
        # no pool of this computer has ever used a cloud: whoever has hosts alone needs no login
        return [], [], int(bool(arguments.region or arguments.profile) or any(True for _ in histories()))
    except SkywardError as exc:
        print(f"sky: {exc}", file=sys.stderr)
        return [], [], 1


@contextmanager
def _without_metadata_service() -> Generator[None]:
    """Has nobody wait two seconds for the service that has logins on machines of AWS, and nowhere else."""
    before = os.environ.get(_METADATA)
    os.environ[_METADATA] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_METADATA]
        else:
            os.environ[_METADATA] = before


def _is_of_amazon() -> bool:
    """Whether this computer is, or may be, a machine of AWS."""
    for path, begins in (("/sys/class/dmi/id/sys_vendor", "Amazon"), ("/sys/hypervisor/uuid", "ec2")):
        try:
            if Path(path).read_text().startswith(begins):
                return True
        except (OSError, ValueError):
            continue
    return False


def lines(rows: list[Row]) -> list[str]:
    """The table for people: a row a pool, and below it what it has and what can be done."""
    from skyward.machines.names import shown, usable
    from skyward.machines.offers import money

    if not rows:
        return ["no pools"]
    head, *main = table([_HEAD, *map(_cells, rows)], _RIGHT)
    text = [head]
    for row, line in zip(rows, main, strict=True):
        text.append(line)
        if row.machines and row.state != "not ours":
            name = f"{shown(row.machines)}: " if row.machines != row.pool else ""
            hourly = "price not known" if row.hourly is None else f"{money(row.hourly)} an hour"
            hourly = "no price" if row.hourly == 0 else hourly
            text.append(f"  {name}{', '.join(row.left) or 'nothing that is seen'}; {hourly}")
        if row.state in ("abandoned", "expired") and usable(row.machines):
            text.append(f"  `sky down {row.machines} --yes` ends it")
        text += [f"  {note}" for note in row.notes]
    return text


def _cells(row: Row) -> tuple[str, ...]:
    from skyward.machines.names import shown

    nodes = "" if row.nodes is None else f"{row.nodes}" if row.up is None else f"{row.up}/{row.nodes}"
    calls = ("" if count is None else f"{count:,}" for count in (row.running, row.waiting, row.done, row.failed))
    cost = f"${row.cost:,.2f}" if row.cost else "no price" if row.cost == row.hourly == 0 else ""
    who = [shown(row.program)] if row.program else []
    who += [f"({row.pid})" if who else f"process {row.pid}"] if row.pid else []
    who += [f"on {shown(row.host)}"] if row.state == "elsewhere" and row.host else []
    place = " ".join(filter(None, (row.provider, row.region)))
    return (shown(row.pool), row.state, place, nodes, *calls, cost, _age(row.age), " ".join(who))


def _age(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return ""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
