"""`sky down`: ends pools and everything that they have created."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command, add_json, print_json
from skyward.cli.ps import add_place

if TYPE_CHECKING:
    from skyward.machines.reaper import Outcome

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "down",
        "end pools and everything they have created",
        "Ends pools and confirms it. Without --yes it only says what it would do. Pools that a process of this "
        "computer uses are left alone.",
        [
            "sky down train-4f09a1         what would be ended",
            "sky down train-4f09a1 --yes   ends it, and confirms",
            "sky down --all --yes          every pool whose program, on this computer, is gone",
            "sky down --expired --yes      every pool whose time is over, wherever it was opened",
            "sky down --warm --yes         images that pools have kept",
        ],
        "exit status: 0 if nothing is left of what was to be ended (or would be ended, without --yes), 1 if something "
        "failed or was left alone, 2 for a wrong command line, 130 after Ctrl-C.",
        "one object a line: kind (pool, or kept for an image), pool, provider, region, did (ended, would end, left "
        "alone, failed), why (a sentence, or empty), receipt (text, or null); of an image: text.",
    )
    parser.add_argument("pools", nargs="*", metavar="POOL", help="names, as `sky ps` shows them")
    parser.add_argument("--all", action="store_true", help="every pool whose process is gone")
    parser.add_argument("--expired", action="store_true", help="every pool whose time is over")
    parser.add_argument("--warm", action="store_true", help="images that pools with Image(warm=True) have kept")
    parser.add_argument("--yes", action="store_true", help="do it")
    parser.add_argument("--if-there", action="store_true", help="a pool that is not there is no error")
    add_json(parser)
    add_place(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from skyward.machines import ledger, reaper

    names: list[str] = arguments.pools
    if arguments.if_there:
        names = [name for name in names if ledger.read(name) is not None]
        if not names:
            return 0
    providers = reaper.renting_providers(arguments.endpoint_url)
    if arguments.warm:
        for text in reaper.discard(providers, arguments.yes):
            print_json({"kind": "kept", "text": text}) if arguments.json else print(text)
        if not names and not arguments.all and not arguments.expired:
            return 0
    outcomes = reaper.down(
        providers,
        names,
        arguments.all,
        arguments.expired,
        arguments.yes,
        arguments.region,
        arguments.profile,
    )
    code = 1 if any(outcome.did in ("failed", "left alone") for outcome in outcomes) else 0
    if arguments.json:
        for outcome in outcomes:
            _print_json(outcome)
        return code
    for outcome in outcomes:
        print(outcome)
        if outcome.receipt is not None:
            print(outcome.receipt)
    if not outcomes:
        print("nothing to end")
    elif not arguments.yes:
        print("nothing was ended; say --yes to do it")
    return code


def _print_json(outcome: Outcome) -> None:
    found = outcome.found
    receipt = None if outcome.receipt is None else str(outcome.receipt)
    place = {"pool": found.pool, "provider": found.provider.name, "region": found.region}
    print_json({"kind": "pool", **place, "did": outcome.did, "why": outcome.why, "receipt": receipt})
