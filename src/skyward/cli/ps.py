"""`sky ps`: lists pools that have machines, or may have left some."""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["add", "add_place", "run"]


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("ps", help="list pools of yours that have machines, or may have left some")
    add_place(parser)
    parser.set_defaults(run=run)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where to look."""
    parser.add_argument("--region", action="append", default=[], help="look there too (may be repeated)")
    parser.add_argument("--profile", help="the profile of your cloud settings")
    parser.add_argument("--endpoint-url", metavar="URL", help="your own endpoint of AWS, if a pool was opened with one")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from skyward.errors import CredentialsMissing
    from skyward.machines import reaper
    from skyward.machines.ledger import histories

    providers = reaper.renting_providers(arguments.endpoint_url)
    try:
        found = reaper.pools(providers, arguments.region, profile=arguments.profile)
    except CredentialsMissing as exc:
        if arguments.region or arguments.profile or any(True for _ in histories()):
            raise
        # no pool of this computer has ever used a cloud: whoever has hosts alone needs no login
        print(f"sky: clouds were not asked: {exc}", file=sys.stderr)
        found = []
    for pool in found:
        print(pool)
    if not found:
        print("no pools")
    for item in reaper.kept(providers):
        print(f"{item}; `sky down --warm` deletes it")
    return 0
