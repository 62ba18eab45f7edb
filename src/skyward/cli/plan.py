"""`sky plan`: what a program would open, where and at what price, without opening it."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command, add_json, add_pool_options, make_pool, print_json, show_error

if TYPE_CHECKING:
    from skyward.api.provider import Offer
    from skyward.pool.pool import ComputePool

__all__ = ["add", "run"]

_CODES = (
    "exit status: 0 if the plan can be carried out as far as is known, 1 if not, or if the program opens no pool, 2 "
    "for a wrong command line, 130 after Ctrl-C."
)
_OPTIONS = ("pool", "config", "provider", "host", "nodes", "accelerator", "pip", "plugin")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "plan",
        "show what a program would open, and its price",
        "Shows what a pool would launch, where, for how much per hour, and what was ruled out. With FILE, the program "
        "runs, your code included, up to the line that opens its first pool, and is stopped there; nothing is created. "
        "What follows -- are arguments of the program. Without FILE, or with options of a pool, no program runs: it is "
        "the plan of the pool that `sky run` and `sky exec` would open.",
        [
            "sky plan train.py -- --epochs 3     runs train.py up to its pool",
            "sky plan --pool gpu                 [pools.gpu] of sky.toml",
            "sky plan --provider aws --nodes 2 --accelerator A100 --json",
        ],
        _CODES,
        "one object: `possible`, `hourly_cost` (dollars for all nodes, null if not known) and `plans`, in the order "
        "in which they are tried, each with `offers`, `ruled_out` and `notes`.",
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="a Python program that opens a pool")
    add_json(parser)
    add_pool_options(parser)
    parser.usage = "sky plan [OPTIONS] [FILE] [-- ARGUMENTS]"
    parser.set_defaults(run=run, takes_rest=True)


@dataclass(frozen=True)
class Stopped:
    pool: ComputePool
    line: int | None = None


def run(arguments: argparse.Namespace) -> int:
    if arguments.file is None or any(getattr(arguments, name) for name in _OPTIONS):
        return _tell([Stopped(make_pool(arguments))], arguments)
    path = Path(arguments.file)
    if not path.is_file():
        from skyward.errors import InvalidArgument

        raise InvalidArgument(f"{path}: no such file. Give the path of a Python program.")
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        stopped = run_program(path, arguments)
    if stopped is None:
        return 1
    if not stopped:
        print(
            f"sky: {path} ended and opened no pool, so there is no plan. Its arguments may decide that: "
            f"`sky plan {path} -- ARGUMENTS`.",
            file=sys.stderr,
        )
        return 1
    return _tell(stopped, arguments)


def run_program(path: Path, arguments: argparse.Namespace) -> list[Stopped] | None:
    import runpy

    from skyward.errors import PoolClosed
    from skyward.pool.lifetime import stopping_pools

    found: list[Stopped] = []
    sys.argv = [str(path), *arguments.rest]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with stopping_pools(lambda pool: found.append(Stopped(pool, _line(str(path))))):  # type: ignore[arg-type]
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exc:
        if exc.code not in (None, 0) and not found:
            print(f"sky: {path} exited with {exc.code} before it opened a pool.", file=sys.stderr)
            return None
    except Exception as exc:  # shown as Python shows it
        if not found and (isinstance(exc, PoolClosed) or (isinstance(exc, NameError) and exc.name == "pool")):
            return [Stopped(make_pool(arguments))]  # a program for `sky run`, which gives it a pool
        if not found:
            show_error(exc, str(path))
            return None
    return found


def _line(path: str) -> int | None:
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage] - there is no other way without a traceback
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return None if frame is None else frame.f_lineno


def _tell(stopped: Iterable[Stopped], arguments: argparse.Namespace) -> int:
    possible = True
    for each in stopped:
        record, text = _planned(each.pool)
        where = f"{arguments.file}, line {each.line}: " if each.line else ""
        possible = possible and record["possible"]
        if arguments.json:
            print_json({"file": arguments.file, "line": each.line, **record})
            continue
        what = "1 node" if each.pool.nodes == 1 else f"{each.pool.nodes} nodes"
        print(f"{where}pool {each.pool.name}, {what}\n{text}")
        if each.pool.budget is not None:
            print(_of_budget(each.pool.budget, record["hourly_cost"]))
        if not arguments.file:
            print("nothing was created")
        elif each.line:
            print("nothing was created: the program was stopped there, so what it does after that is not included")
        else:
            print(f"nothing was created; this is the pool that `sky run {arguments.file}` opens")
    return 0 if possible else 1


def _of_budget(budget: float, hourly: float | None) -> str:
    from skyward.machines.offers import money

    if not hourly:
        return f"budget of {money(budget)}: refused, since there is no price"
    return f"budget of {money(budget)}: ends everything after {budget / hourly:.1f} hours at that price"


def _planned(pool: ComputePool) -> tuple[dict[str, Any], str]:
    from skyward.errors import SkywardError
    from skyward.machines.acquire import Plans

    try:
        plan = pool.plan()
    except SkywardError as exc:
        plans = [{**_record(pool.provider.name, pool.nodes, ()), "why_not": str(exc)}]
        text = f"  not possible: {exc}"
    else:
        if isinstance(plan, Plans):
            plans = [_prospect(prospect) for prospect in plan.prospects]
        else:
            plans = [_record(pool.provider.name, pool.nodes, plan)]
        text = str(plan)
    first = next((each for each in plans if each["possible"]), None)
    return {
        "pool": pool.name,
        "nodes": pool.nodes if first is None else first["nodes"],
        "possible": first is not None,
        "hourly_cost": None if first is None else first["hourly_cost"],
        "plans": plans,
    }, text


def _prospect(prospect: Any) -> dict[str, Any]:
    choice = prospect.candidate
    record = _record(choice.provider.name, choice.nodes, prospect.plan)
    return record if prospect.why_not is None else {**record, "why_not": str(prospect.why_not)}


def _record(provider: str, nodes: int, plan: Any) -> dict[str, Any]:
    from skyward.machines.offers import offer_record, price_record

    offers: list[Offer] = list(getattr(plan, "offers", plan))
    cost = nodes * offers[0].hourly_cost if offers else math.inf
    return {
        "provider": provider,
        "nodes": nodes,
        "possible": bool(offers),
        "hourly_cost": price_record(cost),
        "offers": [offer_record(offer) for offer in offers],
        "ruled_out": [{"what": item.what, "why": item.why} for item in getattr(plan, "ruled_out", ())],
        "notes": list(getattr(plan, "notes", ())),
        "why_not": None,
    }
