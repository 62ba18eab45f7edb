"""`sky join`: makes this machine a node of a pool that waits for machines."""

from __future__ import annotations

import argparse
from typing import Any

from skyward.cli.common import add_command

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "join",
        "make this machine a node of a pool",
        "Makes this machine a node of a pool that was opened with sky.Join, until the pool is closed.",
        [
            "sky join --file ~/pool.join",
            "sky join --file ~/pool.join --place 3",
        ],
        "exit status: 0 when the pool was closed, 1 if it could not be joined or was lost, 2 for a wrong command line.",
    )
    parser.add_argument("--file", help="the file that the pool has written (default: the variable SKYWARD_JOIN)")
    parser.add_argument("--place", type=int, help="which node to become, counted from 0 (default: the next free one)")
    parser.add_argument("--stdin", action="store_true", help="leave the pool when standard input ends")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from skyward.node import join

    argv = ["--file", arguments.file] if arguments.file is not None else []
    argv += ["--place", str(arguments.place)] if arguments.place is not None else []
    return join.main([*argv, "--stdin"] if arguments.stdin else argv)
