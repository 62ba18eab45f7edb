"""`sky init`: writes a small, commented example project."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from skyward.cli.common import add_command, add_json, print_json

__all__ = ["PROGRAM", "SETTINGS", "add", "run"]

SETTINGS = """\
# Pools of this project, by name: the options of sky.ComputePool. `help(sky.ComputePool)` explains them all.
# A program says sky.ComputePool.from_config("lab") and is run with `python main.py`. One that opens no pool of its
# own gets it as `pool` from `sky run train.py --pool lab`.

default = "here"

[pools.here]            # processes of this computer: to try things out
nodes = 2

# [pools.lab]           # machines that you can log in to by ssh, named as you name them to ssh
# provider = {kind = "ssh", hosts = ["gpu1", "user@10.0.0.7:2222"]}
# plugins = ["torch"]
# [pools.lab.image]
# pip = ["torch", "numpy"]
# env = {HF_TOKEN = {secret = "HF_TOKEN"}}     # from a variable of your computer; shown nowhere

# [pools.cloud]         # machines from AWS, given back when the pool is closed
# provider = {kind = "aws", region = "eu-west-1"}
# nodes = 2
# accelerator = "A100"
# max_hourly_cost = 20  # dollars, for all nodes together
"""

PROGRAM = '''\
"""Counts primes on all nodes of a pool. Run it with: python main.py"""

import skyward as sky


@sky.compute
def count_primes(numbers: range) -> int:
    mine = sky.shard(numbers, shuffle=True)  # this node's part; unshuffled, one of two nodes gets the even numbers
    return sum(n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)) for n in mine)


with sky.ComputePool.from_config() as pool:
    parts = count_primes(range(20_000)) @ pool  # on every node; the same as pool.broadcast(count_primes(...))
    print(f"{sum(parts)} primes, by node: {parts}")
'''


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "init",
        "write an example project",
        "Writes sky.toml, with commented settings, and main.py, a program that runs with them. Files that exist "
        "already are left unchanged.",
        ["sky init", "sky init my-project && cd my-project && python main.py"],
        shape="one object: written, kept (lists of paths).",
    )
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="where (default: here)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    kept: list[str] = []
    for name, text in (("sky.toml", SETTINGS), ("main.py", PROGRAM)):
        try:
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
            written.append(str(folder / name))
        except FileExistsError:
            kept.append(str(folder / name))
    if arguments.json:
        print_json({"written": written, "kept": kept})
        return 0
    for path in written:
        print(f"written: {path}")
    for path in kept:
        print(f"{path} already exists; left unchanged")
    if written:
        print(f"try it: cd {folder} && python main.py" if arguments.folder != "." else "try it: python main.py")
    return 0
