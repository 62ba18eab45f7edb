"""Every step of the tutorial runs on this computer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STEPS = sorted((Path(__file__).parents[2] / "examples" / "tutorial").glob("*.py"))

SAID = {
    "01": "hello you, from node 3 of 4",
    "02": "180180 360360",
    "03": "1000 areas",
    "04": "failed: a rate of 2.0 does not converge",
    "05": "9000 words",
    "06": "(2.5, 4.5, 6.5)",
    "07": "points of the curves were kept",
    "08": "TaskCrashed",
    "09": "steps done by all nodes: 30",
    "10": "node 1 is ",
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.stem)
def test_a_step_of_the_tutorial_says_what_it_should(step: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(step)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert SAID[step.name[:2]] in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_there_are_ten_steps() -> None:
    assert [step.name[:2] for step in STEPS] == sorted(SAID)
