"""`sky top`: the live view of a pool that another program has open."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from skyward.cli.common import add_command
from skyward.errors import InvalidArgument

__all__ = ["add", "run"]

_PAUSE = 0.3


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "top",
        "show the nodes of a pool that runs",
        "Shows, in this terminal, the live view of a pool that a program of yours has open on this "
        "computer: nodes, calls, progress, cost. Ctrl-C ends it, and not the pool.",
        [
            "sky top",
            "sky top sweep",
        ],
        "exit status: 0 when the pool was closed or after Ctrl-C, 1 if it does not run or its program was killed, 2 "
        "for a wrong command line.",
    )
    parser.add_argument("pool", nargs="?", metavar="POOL", help="its name, or the id that `sky history` shows")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from skyward.cli.pools import chosen
    from skyward.events import Output, PoolClosed
    from skyward.history.store import Tail
    from skyward.view.console import attach

    entry = chosen(arguments.pool)
    if not entry.running:
        raise InvalidArgument(f"{entry.pool} does not run any more. `sky view {entry.pool}` shows how it went.")
    console = attach("live" if sys.stdout.isatty() else "plain")
    tail = Tail(entry.path)
    try:
        while True:
            running = entry.running
            for event in tail.read():
                if not isinstance(event, Output):  # `sky logs` has it
                    console(event)
                if isinstance(event, PoolClosed):
                    return 0
            if not running:
                print(f"the program that opened {entry.pool} was killed", file=sys.stderr)
                return 1
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        return 0
    finally:
        console.close()
