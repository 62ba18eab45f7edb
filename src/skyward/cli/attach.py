"""`sky attach`: follows a detached run from where one left."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command, print_pieces
from skyward.cli.top import concerns_view

if TYPE_CHECKING:
    from skyward.pool.run import Run

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "attach",
        "follow a detached run",
        "Prints the output of a detached run from where you left off, until the run is over; on a terminal, with the "
        "live view of its pool. Ctrl-C detaches; the run continues. Any number of terminals can attach.",
        [
            "sky attach grid",
            "sky attach grid --all           from the beginning",
            "sky attach grid --host gpu1     from another computer",
        ],
        "exit status: that of the run's program, 128 + N if signal N ended it; 1 if the run ended otherwise or its "
        "files could not be copied to --results, 2 for a wrong command line, 130 after Ctrl-C.",
    )
    parser.add_argument("name", metavar="NAME", help="the run's name; `sky runs` lists them")
    parser.add_argument("--all", action="store_true", help="print its output from the beginning")
    parser.add_argument(
        "--host",
        metavar="HOST",
        help="the run's first host, [USER@]HOST[:PORT] or pod/NAME, if another computer submitted the run; this one "
        "then knows it",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from skyward.pool.run import Run, take_note

    if arguments.host:
        take_note(arguments.name, arguments.host)
    found = Run(arguments.name)
    try:
        seen = 0 if arguments.all else found.seen
        with _live_view(found):
            print_pieces(found, found.follow(seen), seen)
    except KeyboardInterrupt:
        print(f"\nsky: {found.name} continues. `sky stop {found.name}` ends it.", file=sys.stderr)
        return 130
    status = found.status
    told = f", by {found.limit}" if status.stage == "expired" and found.limit else ""
    told += ", since its machine or its steward is gone" if status.stage == "lost" else ""
    told += "" if status.code is None else f", exit status {status.code}"
    print(f"sky: {found.name} is over: {status.stage}{told}.", file=sys.stderr)
    if found.receipt is not None:
        print(f"sky: {found.receipt}", file=sys.stderr)
    if status.not_copied:
        print(f"sky: its files are not in {found.results}: {status.not_copied}", file=sys.stderr)
    if status.stage == "finished":
        return 1 if status.not_copied else 0
    code = status.code or 1
    return code if code > 0 else 128 - code


@contextmanager
def _live_view(found: Run) -> Generator[None]:
    """What the program prints already says what happens: only the view is shown."""
    from skyward.history.store import Entry, Tail
    from skyward.pool.run_history import repeated
    from skyward.view import console as consoles

    console = consoles.attach(recorded=True)
    if not console.live:
        console.close()
        yield
        return
    shown: list[tuple[Entry, Tail]] = []

    def look() -> None:
        found.copy_histories()
        if (newest := next(iter(found.histories()), None)) is None:
            return
        if not shown or shown[0][0].id != newest.id:
            shown[:] = [(newest, Tail(newest.path))]
        for event in shown[0][1].read():
            if concerns_view(event):
                console.catch_up(event)

    try:
        with repeated(look):
            yield
    finally:
        console.close()
