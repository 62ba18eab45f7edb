"""`sky stacks`: shows the stack of every running body on this computer's pools."""

from __future__ import annotations

import argparse
from typing import Any

from skyward.cli.common import add_command, add_json, print_json

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "stacks",
        "show the line every running body is at",
        "Shows the line every running body is at, on all nodes of every pool that you have open on this computer, or "
        "of detached runs, also elsewhere, whose names are given. Nothing is stopped. Other pools of other computers, "
        "and those of other users, cannot be seen.",
        ["sky stacks", "sky stacks sweep", "sky stacks 4711           the pools of that process", "sky stacks --json"],
        "exit status: 0 if there was something to show or nothing was named, 1 if no such pool is open, 2 for a wrong "
        "command line.",
        "one object per pool: pool, pid, text (what is printed without --json), stacks (a list: rank, node, state, "
        "call, name, seconds, cpu_seconds, frames with file, line and function, problem).",
    )
    parser.add_argument("pools", nargs="*", metavar="POOL", help="only these, by name or by the id of their process")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from skyward.history import runs
    from skyward.machines.ledger import shown
    from skyward.pool.inspect_socket import ask_all
    from skyward.pool.run import Run
    from skyward.pool.run_record import KIND

    wanted: list[str] = arguments.pools
    answers = [each for each in ask_all() if not wanted or each.pool in wanted or str(each.pid) in wanted]
    named = {each.name for each in runs.runs(KIND)} & {*wanted} - {each.pool for each in answers}
    answers += [answer for name in sorted(named) for answer in Run(name).stacks()]
    code = 0 if answers or not wanted else 1
    if arguments.json:
        for answer in answers:
            print_json(answer._asdict())
        return code
    for answer in answers:
        print(f"pool {answer.pool}, process {answer.pid}" if answer.pid else f"pool in {answer.pool}")
        print("\n".join(f"  {line}" for line in answer.text.splitlines()))
    if not answers:
        meant = f" {' or '.join(map(shown, wanted))}" if wanted else ""
        print(f"no pool{meant} of yours is open on this computer. `sky ps` lists those that are, or were left behind.")
    return code
