"""`sky fetch`: copies the files of a detached run."""

from __future__ import annotations

import argparse
from typing import Any

from skyward.cli.common import add_command, add_json, in_bytes, print_json

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "fetch",
        "copy the files of a detached run",
        "Copies the output of a detached run, what its function returned (results/return.pkl) and what its program has "
        "written to $SKYWARD_RUN_FOLDER/results; from other machines also its history and kept results (state). The "
        "run may still be going. Run again, it copies only what is new or has changed, and continues an interrupted "
        "copy.",
        ["sky fetch grid                to the directory grid", "sky fetch grid /data/grid --json"],
        "exit status: 0 if everything was copied, 1 if not, 2 for a wrong command line, 130 after Ctrl-C.",
        shape="one object: name, path (the directory), files and size (new or changed; bytes), writing (files that "
        "the program may still be writing), left_out (links that lead elsewhere).",
    )
    parser.add_argument("name", metavar="NAME", help="the run's name; `sky runs` lists them")
    parser.add_argument("directory", nargs="?", metavar="DIR", help="where to (default: a directory NAME)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from skyward.pool.run import Run

    found = Run(arguments.name).fetch(arguments.directory)
    if arguments.json:
        told = {"path": str(found.path), "files": found.files, "size": found.size}
        print_json({"name": arguments.name, **told, "writing": found.writing, "left_out": found.left_out})
        return 0
    print(f"{arguments.name}: {found.files} new or changed files ({in_bytes(found.size)}) in {found.path}")
    if found.writing:
        print(f"still being written: {', '.join(found.writing)}. Fetch again when the run is over.")
    if found.left_out:
        print(f"left out, since they lead elsewhere: {', '.join(found.left_out)}")
    return 0
