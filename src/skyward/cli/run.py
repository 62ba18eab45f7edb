"""`sky run`: runs a program with a pool that is open while it runs."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import Any

from skyward.cli.common import add_command, add_pool_options, make_pool

__all__ = ["add", "run", "show_error"]

_CODES = "exit status: that of the program; 1 if it raised or the pool could not be opened, 130 after Ctrl-C."


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "run",
        "run a program with a pool",
        "Opens a pool, runs a Python file in which `pool` is that pool (and `>> sky` means it), and closes the pool, "
        "however the program ends. What follows -- are arguments of the program.",
        [
            "sky run train.py -- --epochs 3     the default pool of sky.toml, else this computer",
            "sky run train.py --pool gpu        [pools.gpu] of sky.toml",
            "sky run train.py --host gpu1 --host gpu2 --pip torch",
            "sky run train.py --provider aws --nodes 2 --accelerator A100",
        ],
        _CODES,
    )
    parser.add_argument("file", metavar="FILE", help="the program, a Python file")
    add_pool_options(parser)
    parser.usage = "sky run [OPTIONS] FILE [-- ARGUMENTS]"
    parser.set_defaults(run=run, takes_rest=True)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    import runpy

    from skyward.errors import InvalidArgument

    path = Path(arguments.file)
    if not path.is_file():
        raise InvalidArgument(f"{path} is no file. Give the path of a Python program.")
    pool = make_pool(arguments)
    sys.argv = [str(path), *arguments.rest]
    sys.path.insert(0, str(path.resolve().parent))
    with pool:
        try:
            runpy.run_path(str(path), init_globals={"pool": pool}, run_name="__main__")
        except SystemExit as exc:
            return _status(exc.code)
        except Exception as exc:  # shown as Python shows it, less the frames that started the program
            show_error(exc, str(path))
            return 1
    return 0


def _status(code: object) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return 1


def show_error(exc: Exception, path: str) -> None:
    """Prints the traceback of a program, less the frames that started it."""
    left = exc.__traceback__
    while left is not None and left.tb_frame.f_code.co_filename != path:
        left = left.tb_next
    if left is None and not isinstance(exc, SyntaxError):  # a program that is no Python has no frames
        left = exc.__traceback__
    traceback.print_exception(type(exc), exc, left)
