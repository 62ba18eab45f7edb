"""`sky run`: runs a program with an open pool."""

from __future__ import annotations

import argparse
import ast
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from skyward.cli.common import add_command, add_pool_options, make_pool, show_error
from skyward.node.processes import die_with_parent
from skyward.node.run_folder import RUN

__all__ = ["add", "own_pool_line", "run"]

_POOLS = {"ComputePool", "JoblibPool", "ScikitLearnPool"}
_OPTIONS = ("pool", "config", "provider", "host", "nodes", "accelerator", "pip", "plugin", "budget", "console")
_DETACHED = ("name", "restarts", "results", "hold")
_REPEATED = ("host", "pip", "plugin")
_CODES = (
    "exit status: that of the program; 1 if it raised or the pool could not be opened, 2 for a wrong command line, 130 "
    "after Ctrl-C."
)


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "run",
        "run a program with a pool",
        "Opens a pool, runs a Python file in which `pool` is that pool (and `>> sky` means it), and closes the pool, "
        "however the program ends. What follows -- are arguments of the program. A program that opens a pool of its "
        "own (`sky.ComputePool`) gets no second one.",
        [
            "sky run train.py -- --epochs 3     the default pool of sky.toml, else this computer",
            "sky run train.py --pool gpu        [pools.gpu] of sky.toml",
            "sky run train.py --host gpu1 --host gpu2 --pip torch",
            "sky run train.py --provider aws --nodes 2 --accelerator A100",
            "sky run train.py --detach --name grid      returns when the program runs; see `sky attach`",
        ],
        _CODES,
    )
    parser.add_argument("file", metavar="FILE", help="the program, a Python file")
    add_pool_options(parser)
    group = parser.add_argument_group("a run that continues without this terminal")
    group.add_argument("--detach", action="store_true", help="start the program, and return")
    group.add_argument("--name", metavar="NAME", help="what the run is called (default: the program's name)")
    group.add_argument("--restarts", type=int, default=0, metavar="K", help="start it again if it fails, K times")
    group.add_argument(
        "--results", metavar="DIR", help="a directory of node 0: copy its files to NAME in it at its end"
    )
    group.add_argument(
        "--hold", type=float, metavar="SECONDS", help="how long a rented node 0 stays then, for `sky fetch` (an hour)"
    )
    parser.usage = "sky run [OPTIONS] FILE [-- ARGUMENTS]"
    parser.set_defaults(run=run, takes_rest=True)


def run(arguments: argparse.Namespace) -> int:
    import runpy

    from skyward.errors import InvalidArgument
    from skyward.pool.lifetime import watching_pools

    path = Path(arguments.file)
    if not path.is_file():
        raise InvalidArgument(f"{path}: no such file. Give the path of a Python program.")
    line = own_pool_line(path.read_bytes())
    if arguments.detach:
        return _detach(path, line, arguments)
    if given := [f"--{name}" for name in _DETACHED if getattr(arguments, name)]:
        arguments.error(f"{given[0]} is for runs with --detach.")
    inside = RUN in os.environ
    if inside:
        die_with_parent(os.getppid())  # the steward, which keeps the run's output
    pool = make_pool(arguments) if line is None else None
    if line is not None and not inside:
        _check_own(path, line, arguments)
    sys.argv = [str(path), *arguments.rest]
    sys.path.insert(0, str(path.resolve().parent))
    with pool or nullcontext(), watching_pools(_warn_second) if pool else nullcontext():
        try:
            runpy.run_path(str(path), init_globals={"pool": pool} if pool else None, run_name="__main__")
        except SystemExit as exc:
            return _status(exc.code)
        except Exception as exc:  # shown as Python shows it, less the frames that started the program
            show_error(exc, str(path))
            return 1
    return 0


def _detach(path: Path, line: int | None, arguments: argparse.Namespace) -> int:
    from skyward.cli.plan import run_program
    from skyward.errors import InvalidArgument
    from skyward.pool.detached import AtEnd, Program, submit
    from skyward.pool.program_files import imported
    from skyward.pool.program_imports import of_program
    from skyward.pool.run_record import check_free, free_name
    from skyward.pool.settings import find_settings

    if arguments.restarts < 0:
        arguments.error(f"--restarts {arguments.restarts}: expected 0 or more.")
    name = arguments.name or free_name(path.stem)
    check_free(name)
    imports = of_program(path)
    if line is None:
        pool = make_pool(arguments)
    else:
        if given := [f"--{name}" for name in _OPTIONS if getattr(arguments, name)]:
            raise InvalidArgument(
                f"{path} opens a pool of its own in line {line}, so {', '.join(given)} would have no effect."
            )
        os.environ.setdefault("SKYWARD_RESTART", "0")  # as in the run: the program may ask for it before its pool
        stopped = run_program(path, arguments)
        if not stopped:
            return 1
        pool = stopped[0].pool
    files = [path, *imported([path], [path.parent])]
    settings = Path(arguments.config) if arguments.config else (found.path if (found := find_settings()) else None)
    named = line is None and not (arguments.provider or arguments.host)
    if settings is not None and (named or settings.resolve().is_relative_to(Path.cwd())):
        files.append(settings)
        arguments.config = arguments.config and os.path.relpath(arguments.config)
    words = [word for name in _OPTIONS for word in _option(name, getattr(arguments, name))]
    title = " ".join([path.name, *arguments.rest])
    argv = ["run", os.path.relpath(path), *words, "--", *arguments.rest]
    there = [os.path.relpath(file) for file in files]
    program = Program("skyward", argv, os.getcwd(), title, imports=imports, files=there)
    began = time.monotonic()
    record = submit(pool, name, program, AtEnd(arguments.restarts, arguments.results, arguments.hold))
    handed = record.facts["handed"]
    until = time.strftime("%a %b %d, %H:%M", time.localtime(handed["time"] + handed["left"]))
    until += f" ({handed['limit']})" if handed["limit"] else ""
    print(
        f"{record.name} runs (submitted in {time.monotonic() - began:.1f} s). It ends with its program, with `sky stop "
        f"{record.name}`, at the latest on {until}.\nsky attach {record.name}: its output, from where you left off."
    )
    if handed["results"]:
        print(f"At its end its files are copied to {handed['results']} on node 0.")
    if handed["hold"]:
        print(f"Node 0 then stays for up to {handed['hold'] / 60:.3g} min, until `sky attach` or `sky stop` gets them.")
    return 0


def _option(name: str, given: Any) -> list[str]:
    values: list[Any] = given if name in _REPEATED else [given] if given else []
    return [word for value in values for word in (f"--{name}", str(value))]


def own_pool_line(source: bytes) -> int | None:
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return None  # Python says it better, when it runs
    made = [node.lineno for node in nodes if isinstance(node, ast.Call) and _POOLS & {*_names(node.func)}]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == "pool"]
    bound = any(isinstance(node.ctx, ast.Store) for node in uses)
    bound = bound or any(isinstance(node, ast.arg) and node.arg == "pool" for node in nodes)
    # `try: pool`, `globals().get("pool")`: a program for both ways
    asks = any(isinstance(node, ast.Constant) and node.value == "pool" for node in nodes)
    asks = asks or any(isinstance(node, ast.Name) and node.id == "NameError" for node in nodes)
    return None if not made or asks or (uses and not bound) else min(made)


def _names(called: ast.expr) -> list[str]:
    if isinstance(called, ast.Attribute):
        return [*_names(called.value), called.attr]
    return [called.id] if isinstance(called, ast.Name) else []


def _check_own(path: Path, line: int, arguments: argparse.Namespace) -> None:
    from skyward.errors import InvalidArgument

    given = [f"--{name}" for name in _OPTIONS if getattr(arguments, name)]
    if given:
        raise InvalidArgument(
            f"{path} opens a pool of its own in line {line}, so {', '.join(given)} would have no effect. Run it "
            f"with `python {path}`, or let it open none and use `pool`, which `sky run` opens."
        )
    print(
        f"sky: {path} opens a pool of its own in line {line}, so `sky run` opens none: the same as `python {path}`.",
        file=sys.stderr,
    )


def _warn_second(pool: object) -> None:
    print(
        f"sky: warning: this program opens a pool of its own ({getattr(pool, 'name', '')}) beside the one of `sky "
        "run`, and both cost: run it with `python`, or use `pool`, which `sky run` has opened.",
        file=sys.stderr,
    )


def _status(code: object) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return 1
