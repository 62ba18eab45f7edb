"""`sky down`: ends pools and everything that they created."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from skyward.cli.common import add_command, add_json, print_json
from skyward.cli.ps import add_place

if TYPE_CHECKING:
    from skyward.cli.ps import Row

__all__ = ["add", "run"]

_CLOSING_PATIENCE = 120.0  # besides the time that bodies have to end
_SILENT_PATIENCE = 15.0


class _Outcome(NamedTuple):
    pool: str
    provider: str
    region: str
    did: str
    why: str = ""
    receipt: object = None


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "down",
        "end pools and everything they have created",
        "Ends pools and confirms it. Without --yes it only shows what it would do. A pool that a program on this "
        "computer has open is ended if you name it: the program closes it, as `pool.close()` does, and its calls are "
        "stopped. A program that does not do so in time (two minutes, or 15 seconds if it does not answer) is killed.",
        [
            "sky down lab                  what would be ended",
            "sky down lab --yes            ends it, also if it is open in another terminal",
            "sky down 4711 --yes           the pools that this process has open",
            "sky down train-4f09a1 --yes   ends what a pool has left at its provider",
            "sky down --all --yes          every pool whose program, on this computer, is gone",
            "sky down --expired --yes      every pool whose time is over, wherever it was opened",
            "sky down --warm --yes         images that pools have kept",
        ],
        "exit status: 0 if everything was ended (or would be, without --yes), 1 if something failed or was left alone, "
        "2 for a wrong command line, 130 after Ctrl-C.",
        "one object per line: kind (pool, or kept for an image), pool, provider, region, did (ended, would end, left "
        "alone, failed), why (a sentence, or empty), receipt (text, or null); of an image: text.",
    )
    parser.add_argument("pools", nargs="*", metavar="POOL", help="names, as `sky ps` shows them, or ids of processes")
    parser.add_argument("--all", action="store_true", help="every pool whose process is gone")
    parser.add_argument("--expired", action="store_true", help="every pool whose time is over")
    parser.add_argument("--warm", action="store_true", help="images that pools with Image(warm=True) have kept")
    parser.add_argument("--yes", action="store_true", help="do it")
    parser.add_argument("--if-there", action="store_true", help="leave open pools alone; no error if nothing is left")
    add_json(parser)
    add_place(parser)
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    from skyward.machines import ledger, reaper

    names: list[str] = arguments.pools
    if not (names or arguments.all or arguments.expired or arguments.warm):
        arguments.error("no pools named. Name some, or use --all, --expired or --warm")
    outcomes: list[_Outcome] = []
    if arguments.if_there:
        names = [name for name in names if ledger.read(name) is not None]
        if not names:
            return 0
    elif names:
        outcomes, names = _close_open(names, arguments.yes)
    providers = reaper.renting_providers(arguments.endpoint_url)
    if arguments.warm:
        for text in reaper.discard(providers, arguments.yes):
            print_json({"kind": "kept", "text": text}) if arguments.json else print(text)
    if names or arguments.all or arguments.expired:
        ended = reaper.down(
            providers,
            names,
            arguments.all,
            arguments.expired,
            arguments.yes,
            arguments.region,
            arguments.profile,
        )
        outcomes += [
            _Outcome(item.found.pool, item.found.provider.name, item.found.region, item.did, item.why, item.receipt)
            for item in ended
        ]
    elif not outcomes:
        return 0
    _show(outcomes, arguments)
    return 1 if any(outcome.did in ("failed", "left alone") for outcome in outcomes) else 0


def _close_open(names: list[str], really: bool) -> tuple[list[_Outcome], list[str]]:
    from skyward.cli.ps import merged, of_this_computer

    told, silent, recorded = of_this_computer()
    outcomes: list[_Outcome] = []
    matched: set[str] = set()
    for row in merged(told, silent, recorded, [], time.time()):
        meant = {row.pool, row.machines, str(row.pid)} & {*names}
        if meant:
            matched |= meant
            sockets = {each.socket: each.grace + _CLOSING_PATIENCE for each in told if _is(row, each.pool, each.pid)}
            sockets = sockets or {each.socket: _SILENT_PATIENCE for each in silent if each.pid == row.pid}
            outcomes.append(_Outcome(row.pool, row.provider, row.region, *_closed(row, sockets, really)))
    return outcomes, [name for name in names if name not in matched]


def _is(row: Row, pool: str, pid: int) -> bool:
    return (row.pool, row.pid) == (pool, pid)


def _closed(row: Row, sockets: dict[str, float], really: bool) -> tuple[str, str]:
    from skyward.machines import ledger
    from skyward.pool.inspect_socket import close

    who = f"{row.program or 'a program'}, process {row.pid}"
    if not sockets:
        return "left alone", f"it is {row.state} in {who}. Wait for that, or end the program"
    if not really:
        doubt = ", which does not answer and may have to be ended" if row.state == "no answer" else ""
        return "would end", f"it is open in {who}{doubt}; its calls are stopped"
    for path, patience in sockets.items():
        problem = close(path, patience, lambda text: print(f"sky: {row.pool}: {text}", file=sys.stderr))
        if problem:
            return "failed", f"it was open in {who}. {problem}"
    if row.machines and ledger.read(row.machines) is not None:
        return "failed", f"{who}, did not release everything. Run `sky down {row.machines} --yes` to finish it"
    return "ended", f"it was open in {who}"


def _show(outcomes: list[_Outcome], arguments: argparse.Namespace) -> None:
    from skyward.machines.ledger import shown

    for outcome in outcomes:
        if arguments.json:
            receipt = None if outcome.receipt is None else str(outcome.receipt)
            print_json({"kind": "pool", **outcome._asdict(), "receipt": receipt})
            continue
        print(f"{shown(outcome.pool)}: {outcome.did}{f' ({outcome.why})' if outcome.why else ''}")
        if outcome.receipt is not None:
            print(outcome.receipt)
    if not arguments.json and not outcomes:
        print("nothing to end")
    elif not arguments.json and not arguments.yes:
        print("nothing was ended; add --yes to do it")
