"""`sky view`: shows a running or finished pool in the browser."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from typing import Any

from skyward.cli.common import add_command, add_json, print_json

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "view",
        "show a pool in the browser",
        "Serves the page of a pool on loopback, until Ctrl-C, and prints its address, which works once: nodes, calls "
        "over time, output, metrics, cost. Without a name, it is the pool that was opened last. From "
        "another computer: ssh -L 8000:127.0.0.1:PORT, then the same address with port 8000.",
        [
            "sky view",
            "sky view sweep --open",
            "sky view sweep --json",
        ],
        "exit status: 0 after Ctrl-C, 1 if there is no such pool, 2 for a wrong command line.",
        shape="one object, at once: pool, id, address (it works once).",
    )
    parser.add_argument("pool", nargs="?", metavar="POOL", help="its name, or the id that `sky history` shows")
    parser.add_argument("--open", action="store_true", help="open the browser, too")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from skyward.cli.common import chosen, kept_up
    from skyward.view.page.server import PageServer

    entry = chosen(arguments.pool)
    server = PageServer(entry)
    try:
        address = server.address()
        if arguments.json:
            print_json({"pool": entry.pool, "id": entry.id, "address": address})
        else:
            gone = "" if entry.running else "\nThis pool is closed: the page shows its history."
            print(f"{entry.pool}: {address}{gone}\nCtrl-C ends it.")
        sys.stdout.flush()
        if arguments.open:
            _open(address)
        with kept_up(entry):
            threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


def _open(address: str) -> None:
    """Opens a redirecting file: a browser's command line is readable by all users."""
    import webbrowser

    from skyward.machines.ledger import state_dir
    from skyward.transport import private

    path = private.make(state_dir(), "view") / "open.html"
    path.unlink(missing_ok=True)
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">')
    webbrowser.open(path.as_uri())
