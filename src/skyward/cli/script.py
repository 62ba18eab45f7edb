"""`sky script`: prints the script that sets a host up."""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "script",
        help="print the script that sets a host up",
        description="Prints the script that sets a host up for an image. A pool sends it, with the packages' exact "
        "versions, and runs it there as the user that it logs in as.",
    )
    parser.add_argument("--python", default="auto", metavar="X.Y", help="the version of Python (default: this one)")
    parser.add_argument("--pip", action="append", default=[], metavar="PACKAGE", help="as in Image(pip=[...])")
    parser.add_argument("--apt", action="append", default=[], metavar="PACKAGE", help="as in Image(apt=[...])")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from importlib import metadata

    from skyward.api.image import Image
    from skyward.setup.env.script import script

    image = Image(python=arguments.python, pip=arguments.pip, apt=arguments.apt)
    sys.stdout.write(script(image, metadata.version("uv")))
    sys.stdout.flush()
    return 0
