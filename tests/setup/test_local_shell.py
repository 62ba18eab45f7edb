"""Programs on this computer: which variables they get, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyward.setup.local_shell import Program, end_program, inherited

PROGRAM = """
import skyward as sky

@sky.compute
def ask():
    import beside
    return beside.WORD

with sky.ComputePool(console=False) as pool:
    print(ask() >> pool)
"""


@pytest.mark.parametrize(
    ("value", "passed"),
    [
        ("src", "/project/src"),
        ("src:/opt/lib:../other", "/project/src:/opt/lib:/other"),
        ("./src/", "/project/src"),
        ("/opt/lib", "/opt/lib"),
        ("~/lib", "~/lib"),
        ("", ""),
    ],
)
def test_relative_paths_become_absolute_since_nodes_run_elsewhere(value: str, passed: str) -> None:
    names = ("PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME")
    assert inherited(dict.fromkeys(names, value), "/project") == dict.fromkeys(names, passed)


def test_what_is_no_path_stays_as_it_is() -> None:
    assert inherited({"TZ": "Europe/Rome", "OMP_NUM_THREADS": "4"}, "/project") == {
        "TZ": "Europe/Rome",
        "OMP_NUM_THREADS": "4",
    }


def test_a_body_finds_a_module_by_a_relative_python_path(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "beside.py").write_text("WORD = 'found'\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("found\n", "")


@pytest.mark.parametrize(
    ("script", "seconds", "code"),
    [
        ("cat > /dev/null; exit 3", 60.0, 3),
        ("exec sleep 60", 0.1, -9),
        ("exec sleep 60", None, -9),
        ("exit 0", None, 0),
    ],
)
def test_a_program_ends_with_its_input_or_is_killed(script: str, seconds: float | None, code: int) -> None:
    program = Program(["sh", "-c", script], dict(os.environ), stderr=subprocess.DEVNULL)
    if code == 0:
        program.wait()
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(b"what nobody may read")
    end_program(program, seconds)
    assert program.returncode == code
    assert program.stdin.closed
    assert program.stdout.closed
