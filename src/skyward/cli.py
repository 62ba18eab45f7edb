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
    return parser


def _script(arguments: argparse.Namespace) -> int:
    from importlib import metadata

    from skyward.image import Image
    from skyward.recipe import script

    image = Image(python=arguments.python, pip=arguments.pip, apt=arguments.apt)
    sys.stdout.write(script(image, metadata.version("uv")))
    sys.stdout.flush()
    return 0
