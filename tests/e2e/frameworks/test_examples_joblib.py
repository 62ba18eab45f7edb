"""The examples about joblib, scikit-learn and plugins run as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[3] / "examples" / "guides"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("02_joblib_concurrency.py", r"80 tasks of 0\.1 s on 2 x 4 slots: .*efficiency \d+%"),
        ("03_scikit_grid_search.py", r"105 fits on 2 x 2 processes.*the same candidate fitted here"),
        ("10_custom_plugin.py", r"\[1000000, 1000000\]"),
        ("13_who_is_heard.py", r"node 2 of 3, with \d+ GPUs.*6 lines were heard from 3 nodes"),
        ("15_borrowed_pool.py", r"best: .* found by 2 nodes"),
        (
            "21_files.py",
            r"3 files sent, 558 bytes.*node-1/2025.txt 2025: 450.00.*1 file sent, 2 unchanged; 2025 is 100",
        ),
        (
            "18_sweeps.py",
            r"\(1.0, 2\) ValueError\('the loss is not a number with rate=1.0'\).*rate=0.01, depth=4; 9 runs finished, "
            r"3 failed.*a smaller rate: 3 finished.*stopped by.*400 texts in.*awaited: \[0.5, 1.0, 0.5\]",
        ),
    ],
)
def test_the_example_runs_as_it_is(name: str, said: str) -> None:
    """S0-43, S0-48, D6."""
    done = subprocess.run([sys.executable, str(GUIDES / name)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.search(said, done.stdout, re.DOTALL), done.stdout


@pytest.mark.parametrize("name", ["02_joblib_concurrency.py", "03_scikit_grid_search.py", "10_custom_plugin.py"])
def test_an_unknown_provider_is_refused_in_words(name: str) -> None:
    done = subprocess.run([sys.executable, str(GUIDES / name), "--provider", "moon"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice: 'moon'" in done.stderr
