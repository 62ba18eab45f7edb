"""Static types hold through the whole programming model: tests/typing is checked, not run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# beside this interpreter, or wherever the user has it
PYRIGHT = shutil.which("pyright", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed")
def test_types_hold_through_all_of_it() -> None:
    assert PYRIGHT is not None
    command = [PYRIGHT, "--outputjson", "--project", str(HERE), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] >= 1
    found = [f"line {d['range']['start']['line'] + 1}: {d['message']}" for d in report["generalDiagnostics"]]
    assert found == []


def test_mypy_agrees_on_every_line() -> None:
    pytest.importorskip("mypy")
    lines = (HERE / "check_types.py").read_text().splitlines()
    refused = {number for number, line in enumerate(lines, 1) if "pyright: ignore" in line}
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-incremental",
        "--cache-dir",
        os.devnull,
        "check_types.py",
    ]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=500, check=False)
    found = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error: " in line}
    assert [line for number, line in found.items() if number not in refused] == [], done.stderr
    assert refused == set(found)
