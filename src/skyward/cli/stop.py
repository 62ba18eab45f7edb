"""`sky stop`: ends a detached run."""

from __future__ import annotations

import argparse
from typing import Any

from skyward.cli.common import add_command, add_json, print_json

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "stop",
        "end a detached run",
        "Ends a detached run: its program gets SIGTERM, closes its pool, and is killed if it takes longer than the "
        "pool's grace. Its machines end; its output stays until `sky runs drop`.",
        ["sky stop grid", "sky stop grid --json"],
        "exit status: 0 if the run is over, 1 if not, 2 for a wrong command line.",
        shape="one object: name, stage (stopped, or how it had ended before), code (its exit status, if known).",
    )
    parser.add_argument("name", metavar="NAME", help="the run's name; `sky runs` lists them")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from skyward.pool.run import Run

    run = Run(arguments.name)
    status = run.stop()
    if arguments.json:
        print_json({"name": arguments.name, "stage": status.stage, "code": status.code})
    else:
        print(f"{arguments.name} is over: {status.stage}.")
        if run.receipt is not None:
            print(run.receipt)
    return 0
