"""`sky exec`: runs a program on every node of a pool that it opens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from skyward.cli.common import add_command, add_json, add_pool_options, make_pool, print_json

__all__ = ["add", "run"]

_MOST = 1 << 20
_CODES = (
    "exit status: the highest of all nodes; 127 if there is no such program, 2 for a wrong command line, 130 after "
    "Ctrl-C."
)


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "exec",
        "run a command on every node of a pool",
        "Opens a pool, runs a command on every node at once, prints its output with the node's name before each line, "
        "and closes the pool. A single word with spaces in it is run by the shell there.",
        [
            "sky exec -- nvidia-smi -L",
            "sky exec --host gpu1 --host gpu2 -- 'df -h ~ | tail -1'",
            "sky exec --pool gpu --json -- python3 --version",
        ],
        _CODES,
        shape="one list, an object per node: node, code (its exit status), out, err (up to a megabyte of each).",
    )
    parser.usage = "sky exec [OPTIONS] -- COMMAND"
    add_json(parser)
    add_pool_options(parser)
    parser.set_defaults(run=run, takes_rest=True)


def run(arguments: argparse.Namespace) -> int:
    from skyward.api.compute import Compute

    if not arguments.rest:
        arguments.error("no command: write it after --, as in `sky exec -- nvidia-smi -L`.")
    if arguments.json and arguments.console is None:
        arguments.console = "silent"
    with make_pool(arguments) as pool:
        found = pool.broadcast(Compute[..., Any](on_node)(arguments.rest, arguments.json))
    if arguments.json:
        print_json([{"node": node, **each} for node, each in enumerate(found)])
    return max(each["code"] for each in found)


def on_node(words: Sequence[str], keep: bool) -> dict[str, Any]:
    import subprocess
    import sys

    command = words[0] if len(words) == 1 and " " in words[0].strip() else list(words)
    pipe = subprocess.PIPE if keep else None
    try:
        done = subprocess.run(
            command, shell=isinstance(command, str), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except (FileNotFoundError, PermissionError) as exc:
        if not keep:
            print(f"{words[0]}: {exc.strerror}", file=sys.stderr)
        return {"code": 127, **({"out": "", "err": f"{words[0]}: {exc.strerror}"} if keep else {})}
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    if not keep:
        return {"code": code}
    out, err = (text[:_MOST].decode("utf-8", "replace") for text in (done.stdout, done.stderr))
    return {"code": code, "out": out, "err": err}
