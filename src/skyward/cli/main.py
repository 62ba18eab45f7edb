"""The command line: which commands there are, and how errors are shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from skyward.cli import doctor, down, exec, history, init, join, logs, ps, run, script, stacks, top, version, view
from skyward.cli.common import EXIT_CODES
from skyward.errors import SkywardError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    parser = _parser()
    arguments, unknown = parser.parse_known_args(given[:cut])
    if unknown and getattr(arguments, "takes_rest", False):
        end = " ".join(
            ["sky", *[word for word in given[:cut] if word not in unknown], "--", *unknown, *given[cut + 1 :]]
        )
        parser.error(f"unrecognized arguments: {' '.join(unknown)}. What is not for sky stands after --: {end}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.rest = given[cut + 1 :]  # argparse would lose the place of the mark
    if arguments.rest and not getattr(arguments, "takes_rest", False):
        parser.error(f"only `sky run` and `sky exec` take something after --, not: {' '.join(arguments.rest)}")
    try:
        return arguments.run(arguments)
    except SkywardError as exc:
        print(f"sky: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what was open is closed
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone, and Python would complain about it at exit
        return 1


def _parser() -> argparse.ArgumentParser:
    from skyward import __version__

    parser = argparse.ArgumentParser(
        prog="sky",
        description="Compute that exists only while it is needed.",
        epilog=f"`sky COMMAND --help` explains a command, with examples.\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"skyward {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (init, run, exec, ps, logs, top, view, history, stacks, down, join, script, doctor, version):
        command.add(commands)
    return parser
