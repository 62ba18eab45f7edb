"""`sky ps`: lists pools open on this computer, and pools with leftovers anywhere."""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command, add_json, print_json, table

if TYPE_CHECKING:
    from skyward.api.provider import Leftover
    from skyward.history.history import History
    from skyward.history.store import Entry
    from skyward.machines.reaper import Found
    from skyward.pool.inspect_socket import Silent, Summary

__all__ = ["Row", "add", "add_place", "lines", "merged", "of_this_computer", "run"]


_HEAD = ("POOL", "STATE", "PROVIDER", "NODES", "RUNNING", "WAITING", "DONE", "FAILED", "COST", "AGE", "PROGRAM")
_RIGHT = ("NODES", "RUNNING", "WAITING", "DONE", "FAILED", "COST", "AGE")
_METADATA = "AWS_EC2_METADATA_DISABLED"  # botocore knows it
_CODES = (
    "exit status: 0 also if there are none; 1 if no cloud could be asked although --region, --profile or a ledger of "
    "this computer names one; 2 for a wrong command line."
)


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "ps",
        "list pools that are open, or left machines behind",
        "Lists the pools that are open on this computer, and that have, or may have left, machines at a provider, "
        "found by ledgers and tags. States: opening, open, closing; no answer (its program is stopped or very busy); "
        "in use; abandoned (its program is gone); detached (a run has it, see `sky runs`); expired (its time is over); "
        "elsewhere (opened on another computer, or its ledger is lost); not ours (only tagged like a pool). A "
        "cloud without a login is left out, unless --region, --profile, AWS_PROFILE or a ledger names it.",
        [
            "sky ps",
            "sky ps --here                   clouds and clusters are not asked",
            "sky ps --region eu-west-1       look there, too, without a ledger",
            "sky ps --json | jq -r .pool",
        ],
        _CODES,
        "one object per line: kind (pool, or kept for an image), pool, state, provider, region, nodes, up (nodes that "
        "take calls), running, waiting, done, failed (calls), cost (dollars so far), hourly (dollars per hour), began "
        "(seconds since 1970), age (seconds), program, pid, host, machines (the name for `sky down`), left (what "
        "exists at the provider), notes (sentences). null is what is not known.",
    )
    parser.add_argument("--here", action="store_true", help="only pools that are open on this computer")
    add_json(parser)
    add_place(parser)
    parser.set_defaults(run=run)


def add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--region", action="append", default=[], metavar="REGION", help="look there too (repeat)")
    parser.add_argument("--profile", metavar="NAME", help="the profile of your cloud settings")
    parser.add_argument("--endpoint-url", metavar="URL", help="your own endpoint of AWS, if a pool was opened with one")


def run(arguments: argparse.Namespace) -> int:
    from skyward.pool.run import copy_histories

    if not arguments.here:
        copy_histories()
    here = of_this_computer()
    found, kept, code = ([], [], 0) if arguments.here else _asked(arguments)
    rows = merged(*here, found, time.time())
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
    """Skips the two-second wait outside AWS."""
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
    for path, begins in (("/sys/class/dmi/id/sys_vendor", "Amazon"), ("/sys/hypervisor/uuid", "ec2")):
        try:
            if Path(path).read_text().startswith(begins):
                return True
        except (OSError, ValueError):
            continue
    return False


def lines(rows: list[Row]) -> list[str]:
    from skyward.machines.ledger import shown, usable
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
    from skyward.machines.ledger import shown

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


@dataclass(frozen=True)
class Row:
    """Times in seconds or seconds since 1970; None means unknown."""

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
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def of_this_computer() -> tuple[list[Summary], list[Silent], list[tuple[Entry, History]]]:
    from skyward.history.history import read
    from skyward.history.store import entries
    from skyward.pool.inspect_socket import summaries

    recorded = [(entry, read(entry)) for entry in entries() if entry.running]  # first: those that close now are gone
    return *summaries(), recorded


def merged(
    told: Sequence[Summary],
    silent: Sequence[Silent],
    recorded: Sequence[tuple[Entry, History]],
    found: Sequence[Found],
    now: float,
) -> list[Row]:
    """`recorded` are histories of pools that do not answer."""
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
    calls, away = history.calls(), entry.away
    return Row(
        pool=entry.pool,
        state=state if away is None else "detached",
        provider=history.provider,
        nodes=history.nodes,
        running=sum(call.outcome == "running" for call in calls),
        done=sum(call.items - call.failed for call in calls if call.failed_items or call.outcome == "ok"),
        failed=sum(call.failed for call in calls),
        cost=history.cost(now) if history.price_known else None,
        hourly=None if history.priced or history.state == "opening" else 0.0,
        began=entry.began,
        program=str(entry.about.get("program", "")),
        pid=entry.about.get("pid") if away is None else None,
        host=socket.gethostname() if away is None else "",
        machines="" if away is None else away["machines"],
        notes=() if away is None else (f"`sky attach {away['run']}` shows it",),
    )


def _same(row: Row, item: Found) -> bool:
    """A pool that is opening does not know its machines' name."""
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
