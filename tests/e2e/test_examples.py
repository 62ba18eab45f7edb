"""The examples that need no framework run as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
GUIDES = EXAMPLES / "guides"


def output_of(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ten_lines.py", r"25,997 primes below 300,000"),
        ("guides/19_history.py", r"127\.0\.0\.1.*train.*0\.001.*\d s on node \d\n"),
        ("guides/23_join.py", r"pi is about 3\.1"),
        (
            "guides/26_errors_and_retries.py",
            r"raised on node \d in parse.*failed: \['three'\]\nagain, mended: \[3\].*exit status 3, last lines: the "
            r"driver gives up.*finally blocks run.*stopped after 0\.5 s\nthe pool goes on: 7.*at try 3\n"
            r"4: made at attempt 0\n4: was there",
        ),
        ("guides/27_batch_inference.py", r"1000 batches in .*\n0 batches in .*16000 texts, of which 10667 are good"),
    ],
)
def test_the_example_runs_as_it_is(name: str, said: str, tmp_path: Path) -> None:
    assert re.search(said, output_of(str(EXAMPLES / name), cwd=tmp_path), re.DOTALL)


def test_the_model_of_the_example_is_loaded_once_in_each_process() -> None:
    assert output_of(str(GUIDES / "27_batch_inference.py"), "--nodes", "1").count("loading small") == 1


def test_training_goes_on_from_its_checkpoint_also_in_the_next_program(tmp_path: Path) -> None:
    command = str(GUIDES / "28_checkpoints.py"), "--checkpoints", str(tmp_path)
    said = output_of(*command)
    assert re.search(r"from step 0\n.*stopped: step 35.*from step 30\n.*0\.005154, as it is .*: 0\.005154", said, re.S)
    assert "from step 50\n" in output_of(*command)
