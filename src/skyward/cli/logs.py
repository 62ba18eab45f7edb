"""`sky logs`: prints the output of a pool's bodies, while it runs and afterwards."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command, add_json, print_pieces
from skyward.events import CallEnded, Event, Log, NodeDown, Notice, Output, PoolClosed, Warned

if TYPE_CHECKING:
    from skyward.history.store import Entry

__all__ = ["add", "run"]

_PAUSE = 0.3


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "logs",
        "print a pool's output, warnings and failures",
        "Prints the output, log records, warnings and failures of a pool of this computer, or what the program of a "
        "detached run printed (with --node or --json, what its pool printed); without a name, of the pool that was "
        "opened last.",
        [
            "sky logs",
            "sky logs sweep --node 2",
            "sky logs sweep -f          until the pool is closed",
            "sky logs sweep --json",
        ],
        "exit status: 0 if the pool and the node are known, 1 if not, 2 for a wrong command line, 130 after Ctrl-C.",
        shape="one object per line: event (Output, Log, Warned, Notice, NodeDown, CallEnded) and the fields that this "
        "event has in skyward.events: pool, time (seconds since 1970), node, text, ...",
    )
    parser.add_argument("pool", nargs="?", metavar="POOL", help="its name, or the id that `sky history` shows")
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the pool is closed")
    parser.add_argument("--node", type=int, metavar="N", help="only this node")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from skyward.cli.common import chosen, kept_up
    from skyward.errors import InvalidArgument
    from skyward.history import runs
    from skyward.history.history import read
    from skyward.history.store import Tail
    from skyward.pool.run_record import KIND

    of_pool = arguments.json or arguments.node is not None  # a run's pool has its name, if it was given no other
    if not of_pool and arguments.pool is not None and any(run.name == arguments.pool for run in runs.runs(KIND)):
        return _print_run(arguments)
    entry = chosen(arguments.pool)
    if arguments.node is not None and not 0 <= arguments.node < (nodes := read(entry).nodes or sys.maxsize):
        known = "only node 0" if nodes == 1 else f"nodes 0 to {nodes - 1}"
        raise InvalidArgument(f"pool {entry.pool} has no node {arguments.node}: it has {known}.")
    tail = Tail(entry.path)
    with kept_up(entry), suppress(KeyboardInterrupt):
        while True:
            running = entry.running
            over = _print(tail.read(), arguments, entry)
            if over or not arguments.follow or not running:
                return 0
            time.sleep(_PAUSE)
    return 130


def _print_run(arguments: argparse.Namespace) -> int:
    from skyward.pool.run import Run

    try:
        found = Run(arguments.pool)
        print_pieces(found, found.follow() if arguments.follow else found.output())  # `sky attach` stays where it was
    except KeyboardInterrupt:
        return 130
    return 0


def _print(found: Iterable[Event], arguments: argparse.Namespace, entry: Entry) -> bool:
    from skyward.history.failed_calls import replayable
    from skyward.history.lines import line
    from skyward.view.terminal import clean, coloured

    over = False
    for event in found:
        over = over or isinstance(event, PoolClosed)
        told = _told(event)
        if told is None or (arguments.node is not None and getattr(event, "node", None) != arguments.node):
            continue
        if arguments.json:
            print(line(event).decode(), end="")
            continue
        when = time.strftime("%H:%M:%S", time.localtime(event.time))
        node = getattr(event, "node", None)
        text = clean(told, colours=coloured(sys.stdout))
        begin = f"{when} {'pool' if node is None else f'node {node}':7} "
        print(_printable(begin + text))
        if isinstance(event, CallEnded) and replayable(entry, event.call):
            print(f"{begin}to run it again on this computer: sky replay {event.call}")
    sys.stdout.flush()
    return over


def _printable(text: str) -> str:
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _told(event: Event) -> str | None:
    match event:
        case Output(text=text):
            return text
        case Log(logger=logger, text=text):
            return f"{logger}: {text}"
        case Warned(path=path, line=at, text=text):
            return f"{path}:{at}: {event.category}: {text}"
        case Notice(level="warning", text=text):
            return text
        case NodeDown(reason=reason):
            return f"down: {reason}"
        case CallEnded(outcome="error" | "crashed" | "timeout" | "lost"):
            from skyward.history.lines import failure

            return failure(event)
        case _:
            return None
