"""Runs benchmarks side by side with their peers and prints the ratios; asserts nothing.

python benchmarks/run.py                    everything
python benchmarks/run.py calls data         some groups
python benchmarks/run.py --quick --rounds 1 only to see whether it works
python benchmarks/run.py --against PATH     this checkout and another one, no peers
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from types import ModuleType

import against
import contest
import slices

_ALL = ("startup", "calls", "busy", "data", "kinds", "streams", "memory", "shared", "ddp")
GROUPS = tuple(name for name in _ALL if Path(__file__).with_name(f"{name}.py").exists())
_RATIO = "ratio = skyward / peer, medians of interleaved rounds"


def main() -> int:
    """Runs the groups that are named, or all; 1 if a side of a comparison of checkouts failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"groups: {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small counts: shows that it works, not how fast")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the median is taken (default: 3)")
    parser.add_argument(
        "--json",
        type=Path,
        help="also write every round's figures to this file; docs/comparison.md shows those of benchmarks/figures.json",
    )
    parser.add_argument("--against", type=Path, metavar="PATH", help="compare with the checkout of Skyward at PATH")
    parser.add_argument("--rows", help=f"with --against: some of {','.join(slices.MEASURES)} (default: all)")
    parser.add_argument("--slices", type=int, help="with --against: slices of each side (default: 12)")
    parser.add_argument("--seconds", type=float, help="with --against: how long a slice lasts (default: 0.5)")
    parser.add_argument("--contender", help=argparse.SUPPRESS)  # one round of one contender, in this process
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.contender:
        group, name = args.contender.split(":")
        args.into.write_text(json.dumps(_group(group).CONTENDERS[name](args.quick)))
        return 0
    if args.against:
        return _compare_checkouts(parser, args)
    if args.rows or args.slices or args.seconds:
        parser.error("--rows, --slices and --seconds belong to --against")

    unknown = set(args.names) - set(GROUPS)
    if unknown:
        parser.error(f"no group is named {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    _compare(args.names or GROUPS, args.rounds, args.quick, args.json)
    return 0


def _compare_checkouts(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    names = args.rows.split(",") if args.rows else list(slices.MEASURES)
    unknown = set(names) - set(slices.MEASURES)
    if unknown:
        parser.error(f"no rows are named {', '.join(sorted(unknown))}; there are {', '.join(slices.MEASURES)}")
    other = args.against.resolve()
    if not (other / "src" / "skyward" / "__init__.py").exists():
        parser.error(f"{other} is no checkout of Skyward: it has no src/skyward/__init__.py")
    if args.names:
        parser.error("groups compare Skyward with its peers; --against takes --rows")
    print(_surroundings())
    count, seconds = args.slices or (2 if args.quick else 12), args.seconds or (0.1 if args.quick else 0.5)
    return 0 if against.compare(other, names, count, seconds, args.json) else 1


def _compare(names: tuple[str, ...] | list[str], rounds: int, quick: bool, into: Path | None) -> None:
    began = time.perf_counter()
    kept: dict[str, contest.Rounds] = {}
    absent = contest.left_out()
    if absent:
        contest.tell(f"Left out, as they are not installed here: {', '.join(absent)}.")
    about = f"{time.strftime('%Y-%m-%d')}\n{_surroundings()}"
    print(about + "\n" + _RATIO, contest.HEADER, sep="\n\n", flush=True)
    for name in names:
        module = _group(name)
        kept[name] = contest.measured(name, list(module.CONTENDERS), rounds, quick)
        for row in module.rows(contest.Medians(kept[name])):
            if not row.peer.lower().startswith(absent):
                print(contest.line(row), flush=True)
        if into is not None:
            into.write_text(json.dumps({"about": about, "groups": kept}, indent=1) + "\n")
    print(f"\n{time.perf_counter() - began:.0f} s" + (", QUICK: these figures mean nothing" if quick else ""))


def _group(name: str) -> ModuleType:
    return importlib.import_module(name)


def _surroundings() -> str:
    versions = []
    for package in ("skyward", "distributed", "ray", "loky", "joblib", "torchmonarch"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    busy = "   NOT QUIET: something else runs here" if load > 0.3 * cores else ""
    return f"Python {platform.python_version()}, {cores} cores, load {load:.1f}{busy}\n{', '.join(versions)}"


if __name__ == "__main__":
    sys.exit(main())
