"""The command line: which commands there are, and how errors are shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from skyward.cli import down, history, logs, ps, script, stacks, top, view
from skyward.errors import SkywardError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except SkywardError as exc:
        print(f"sky: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone, and Python would complain about it at exit
        return 1


def _parser() -> argparse.ArgumentParser:
    from skyward import __version__

    parser = argparse.ArgumentParser(prog="sky", description="Compute that exists only while it is needed.")
    parser.add_argument("--version", action="version", version=f"skyward {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (ps, logs, top, view, history, stacks, down, script):
        command.add(commands)
    return parser
