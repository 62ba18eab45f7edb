"""`sky script`: prints the script that sets up a host."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from skyward.cli.common import add_command, add_json, print_json

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "script",
        "print the script that sets a host up",
        "Prints the script that sets a host up for an image. A pool adds the packages' exact versions and runs it "
        "there, as the user that it logs in as.",
        ["sky script", "sky script --python 3.12 --pip torch --apt git", "sky script --pip numpy | less"],
        shape="one object: python, pip, apt (what was asked for), script (the text).",
    )
    parser.add_argument("--python", default="auto", metavar="X.Y", help="the version of Python (default: this one)")
    parser.add_argument("--pip", action="append", default=[], metavar="PACKAGE", help="as in Image(pip=[...])")
    parser.add_argument("--apt", action="append", default=[], metavar="PACKAGE", help="as in Image(apt=[...])")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from importlib import metadata

    from skyward.api.image import Image
    from skyward.setup.env.script import script

    image = Image(python=arguments.python, pip=arguments.pip, apt=arguments.apt)
    text = script(image, metadata.version("uv"))
    if arguments.json:
        print_json({"python": arguments.python, "pip": arguments.pip, "apt": arguments.apt, "script": text})
        return 0
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0
