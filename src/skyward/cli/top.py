"""`sky top`: the live view of a pool that another program has open."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command
from skyward.errors import InvalidArgument

if TYPE_CHECKING:
    from skyward.events import Event
    from skyward.history.store import Entry

__all__ = ["add", "concerns_view", "run"]

_PAUSE = 0.3


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "top",
        "show the live view of an open pool",
        "Shows the live view of a pool that is open on this computer: nodes, calls, progress, cost. Ctrl-C ends "
        "the view, not the pool. Without a terminal, as in a pipe, it prints the current view once; `sky logs -f` "
        "continues.",
        [
            "sky top",
            "sky top sweep",
            "sky top sweep | cat        once, as it is now",
        ],
        "exit status: 0 when the pool was closed, after Ctrl-C and without a terminal, 1 if it does not run or its "
        "program was killed, 2 for a wrong command line.",
    )
    parser.add_argument("pool", nargs="?", metavar="POOL", help="its name, or the id that `sky history` shows")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from skyward.cli.common import chosen, kept_up

    entry = chosen(arguments.pool)
    if not entry.running:
        raise InvalidArgument(f"{entry.pool} is no longer running. `sky view {entry.pool}` shows how it went.")
    if sys.stdout.isatty():
        with kept_up(entry):
            return _follow(entry)
    _print_once(entry)
    return 0


def _follow(entry: Entry) -> int:
    from skyward.events import PoolClosed
    from skyward.history.store import Tail
    from skyward.view.console import attach

    console = attach("live", recorded=True)
    take = console.catch_up  # the view shows what came of it
    tail = Tail(entry.path)
    try:
        while True:
            running = entry.running
            for event in tail.read():
                if concerns_view(event):
                    (console if isinstance(event, PoolClosed) else take)(event)
                if isinstance(event, PoolClosed):
                    return 0
            if not running:
                print(f"the program that opened {entry.pool} was killed", file=sys.stderr)
                return 1
            take = console
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        return 0
    finally:
        console.close()


def _print_once(entry: Entry) -> None:
    from skyward.history.store import Tail
    from skyward.view.overview import Overview

    overview = Overview(live=True)
    for event in Tail(entry.path).read():
        if concerns_view(event):
            overview.recall(event, event.time)
    encoding = sys.stdout.encoding or "utf-8"
    for row in overview.rows(time.time()) or [[(f"{entry.pool} has just started, or has just ended", "")]]:
        line = "  ".join(text for text, _ in row if text)
        print(line.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def concerns_view(event: Event) -> bool:
    """Excludes output, which is for `sky logs`, and the page's address, which is for the opener."""
    from skyward.events import Notice, Output
    from skyward.pool.lifetime import PAGE_NOTICE

    return not (isinstance(event, Output) or (isinstance(event, Notice) and event.text.startswith(PAGE_NOTICE)))
