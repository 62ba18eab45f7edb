"""Submits detached runs from a directory of the test's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from skyward.pool.run import Run
from tests.support.leftovers import leftover_processes
from tests.support.waiting import until

__all__ = ["PROGRAM", "elsewhere", "program", "submit", "text_of"]

PROGRAM = """
import os, sys, time
import skyward as sky

@sky.compute
def square(x):
    print("body", x, flush=True)
    return x * x

if __name__ == "__main__":
    with sky.ComputePool(nodes=2, console=False, history=False) as pool:
{body}
    print("the end", flush=True)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A state of its own for each test, and nothing that is left running."""
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield
    until(lambda: not leftover_processes(), 120)


def program(body: str) -> str:
    text = "\n".join(f"        {line}" for line in dedent(body).strip().splitlines())
    Path("train.py").write_text(PROGRAM.format(body=text))
    return "train.py"


def submit(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """`sky run --detach` in a process of its own; `before` is run in it first."""
    code = f"import sys\n{before}\nfrom skyward.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "run", "--detach", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def text_of(run: Run) -> str:
    return b"".join(run.output()).decode()
