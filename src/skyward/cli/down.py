"""`sky down`: ends pools and everything that they have created."""

from __future__ import annotations

import argparse
from typing import Any

from skyward.cli.ps import add_place

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "down",
        help="end pools and everything they have created",
        description="Ends pools and confirms it. Without --yes it only says what it would do. Pools that a process of "
        "this computer uses are left alone.",
    )
    parser.add_argument("pools", nargs="*", metavar="POOL", help="names, as `sky ps` shows them")
    parser.add_argument("--all", action="store_true", help="every pool whose process is gone")
    parser.add_argument("--expired", action="store_true", help="every pool whose time is over")
    parser.add_argument("--warm", action="store_true", help="images that pools with Image(warm=True) have kept")
    parser.add_argument("--yes", action="store_true", help="do it")
    parser.add_argument("--if-there", action="store_true", help="a pool that is not there is no error")
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
            print(text)
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
    for outcome in outcomes:
        print(outcome)
        if outcome.receipt is not None:
            print(outcome.receipt)
    if not outcomes:
        print("nothing to end")
    elif not arguments.yes:
        print("nothing was ended; say --yes to do it")
    return 1 if any(outcome.did in ("failed", "left alone") for outcome in outcomes) else 0
