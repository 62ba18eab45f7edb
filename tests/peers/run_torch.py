"""Runs training programs as they are written for torchrun on two nodes, and compares what they learn with torchrun."""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import Figures, tried
from torchrun import launched_file

import skyward as sky

__all__ = ["main"]

SCRIPTS = Path(__file__).parents[1] / "e2e" / "frameworks" / "ddp_scripts"
PROGRAMS = ("snapshot.py", "by_hand.py", "collectives.py")


def body(script: str, arguments: list[str]) -> Any:
    """Runs a file as `torchrun FILE` does."""
    before, sys.argv = sys.argv, [script, *arguments]
    try:
        return runpy.run_path(script, run_name="__main__")["result"]
    finally:
        sys.argv = before


def main() -> Figures:
    """Every program, in every way in which a body may find the other nodes, twice in the same processes."""
    with (
        sky.ComputePool(nodes=2, plugins=[sky.plugins.torch()], console=False) as grouped,
        sky.ComputePool(nodes=2, console=False) as plain,
    ):
        doors = {
            "plugin": (lambda fn: fn, grouped),
            "decorator": (sky.integrations.torch(), plain),
            "decorator, init=False": (sky.integrations.torch(init=False), plain),
        }
        expected = {name: launched_file(SCRIPTS / name, agent=name != "by_hand.py") for name in PROGRAMS}

        def run(name: str, door: str) -> None:
            decorate, pool = doors[door]
            for _ in range(2):
                with tempfile.TemporaryDirectory() as directory:
                    arguments = ["--snapshot", str(Path(directory, "snapshot.pt"))]
                    found = sky.compute(decorate(body))(str(SCRIPTS / name), arguments) @ pool
                assert _plain(found) == _plain(expected[name]), "other results than under torchrun"

        tests = [(f"{name}, {door}", lambda n=name, d=door: run(n, d)) for name in PROGRAMS for door in doors]
        return tried("programs for torchrun", tests)


def _plain(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each | {"weights": [w.tolist() for w in each.get("weights", [])]} for each in results]


if __name__ == "__main__":
    print(main())
