"""`sky replay`: runs a call that failed again, on this computer."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
import traceback
from typing import Any

from skyward.cli.common import add_command, add_json, print_json, table

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "replay",
        "run a failed call again, here",
        "Runs a call that failed again on this computer: the same function, arguments, `instance_info`, variables and "
        "packages. The error's note names its id, and the beginning is enough. Without an id, lists the calls that "
        "are kept. Ranks of a broadcast run as processes of this computer.",
        [
            "sky replay                       which calls can be run again",
            "sky replay 8c1f0000002a",
            "sky replay 8c1f --pdb            in the debugger, where it fails",
            "sky replay 8c1f --rank 3         as this rank of a broadcast",
        ],
        "exit status: 0 if the call returns now, on all ranks; 1 if it fails, on whichever rank, or cannot be run; "
        "2 for a wrong command line.",
        shape="one object per line, without CALL: call, name, arguments, pool (id of its history), time (seconds since "
        "1970), outcome, node, rank (null if it is the node), size (bytes), refused (why it cannot be run again, or "
        "empty).",
    )
    parser.add_argument("call", nargs="?", metavar="CALL", help="the id of a failed call, or its beginning")
    parser.add_argument("--pdb", action="store_true", help="open the debugger at the line that fails")
    parser.add_argument("--rank", type=int, metavar="N", help="of a broadcast, the rank (default: the first to fail)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    add_json(parser)
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    if arguments.call is None:
        if arguments.pdb or arguments.rank is not None:
            arguments.error("--pdb and --rank need a CALL; `sky replay` lists them.")
        return _list(arguments.json)
    if arguments.json:
        arguments.error("--json is for the list, without a CALL.")
    from skyward.errors import TaskCrashed, TaskTimeout
    from skyward.history.failed_calls import PoolOfCalls, find, load
    from skyward.pool.replay import Replay

    pool: PoolOfCalls = pickle.loads(load(*find(arguments.call))[-1])
    if not arguments.here and pool.interpreter != sys.executable and os.access(pool.interpreter, os.X_OK):
        options = [
            *(["--pdb"] if arguments.pdb else []),
            *([] if arguments.rank is None else [f"--rank={arguments.rank}"]),
        ]
        argv = [pool.interpreter, "-P", "-m", "skyward", "replay", arguments.call, *options, "--here"]
        sys.stdout.flush()
        os.execv(pool.interpreter, argv)
    replay = Replay(arguments.call, arguments.rank)
    call = replay.call
    print(f"{call.name}({call.arguments}), rank {replay.rank}, of pool {pool.name}", file=sys.stderr)
    for text in replay.differences():
        print(f"- {text}", file=sys.stderr)
    ended = replay.run(pdb=arguments.pdb)
    if isinstance(ended.error, TaskCrashed | TaskTimeout):
        print("".join(traceback.format_exception_only(ended.error)), end="", file=sys.stderr)  # with its stack
    elif ended.error is not None:
        print(ended.text, file=sys.stderr)
    for text in replay.compared(ended):
        print(text, file=sys.stderr)
    return int(ended.error is not None)


def _list(json: bool) -> int:
    from skyward.history.failed_calls import kept
    from skyward.history.store import entries

    found = [(entry, call) for entry in entries() for call, _ in kept(entry)]
    if json:
        names = ("name", "arguments", "time", "outcome", "node", "rank", "size", "refused")
        for entry, call in found:
            print_json({"call": call.id, "pool": entry.id, **{name: vars(call)[name] for name in names}})
        return 0
    if not found:
        print("no failed call is kept on this computer")
        return 0
    rows = [("call", "failed at", "pool", "function", "how", "")]
    for entry, call in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(call.time))
        why = f"cannot be run again: {call.refused}" if call.refused else ""
        rows.append((call.id, when, entry.pool[:28], f"{call.name}({call.arguments})"[:40], call.outcome, why))
    print("\n".join(table(rows)))
    return 0
