"""The `sky` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from skyward.errors import SkywardError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Does what the command line says; gives the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except SkywardError as exc:
        print(f"sky: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone, and Python would complain of it at exit
        return 1


def _parser() -> argparse.ArgumentParser:
    from skyward import __version__

    parser = argparse.ArgumentParser(prog="sky", description="Compute that exists only while it is needed.")
    parser.add_argument("--version", action="version", version=f"skyward {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    script = commands.add_parser(
        "script",
        help="print the script that sets a host up",
        description="Prints the script that sets a host up for an image. A pool sends it, with the packages' exact "
        "versions, and runs it there as the user that it logs in as.",
    )
    script.add_argument("--python", default="auto", metavar="X.Y", help="the version of Python (default: this one)")
    script.add_argument("--pip", action="append", default=[], metavar="PACKAGE", help="as in Image(pip=[...])")
    script.add_argument("--apt", action="append", default=[], metavar="PACKAGE", help="as in Image(apt=[...])")
    script.set_defaults(run=_script)

    listing = commands.add_parser("ps", help="list pools of yours that have machines, or may have left some")
    _add_place(listing)
    listing.set_defaults(run=_ps)

    down = commands.add_parser(
        "down",
        help="end pools and everything they have created",
        description="Ends pools and confirms it. Without --yes it only says what it would do. Pools that a process of "
        "this computer uses are left alone.",
    )
    down.add_argument("pools", nargs="*", metavar="POOL", help="names, as `sky ps` shows them")
    down.add_argument("--all", action="store_true", help="every pool whose process is gone")
    down.add_argument("--expired", action="store_true", help="every pool whose time is over")
    down.add_argument("--yes", action="store_true", help="do it")
    down.add_argument("--if-there", action="store_true", help="a pool that is not there is no error")
    _add_place(down)
    down.set_defaults(run=_down)
    return parser


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--region", action="append", default=[], help="look there too (may be repeated)")
    parser.add_argument("--profile", help="the profile of your AWS settings")


def _ps(arguments: argparse.Namespace) -> int:
    from skyward.machines import reaper
    from skyward.providers.aws.provider import AWS

    found = reaper.pools(AWS(profile=arguments.profile), arguments.region)
    for pool in found:
        print(pool)
    if not found:
        print("no pools")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    from skyward.machines import ledger, reaper
    from skyward.providers.aws.provider import AWS

    names: list[str] = arguments.pools
    if arguments.if_there:
        names = [name for name in names if ledger.read(name) is not None]
        if not names:
            return 0
    outcomes = reaper.down(
        names, arguments.all, arguments.expired, arguments.yes, AWS(profile=arguments.profile), arguments.region
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


def _script(arguments: argparse.Namespace) -> int:
    from importlib import metadata

    from skyward.api.image import Image
    from skyward.setup.env.script import script

    image = Image(python=arguments.python, pip=arguments.pip, apt=arguments.apt)
    sys.stdout.write(script(image, metadata.version("uv")))
    sys.stdout.flush()
    return 0
