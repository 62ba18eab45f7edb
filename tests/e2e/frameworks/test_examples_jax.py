"""The examples of the guides on data, Keras and JAX run as a user would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GUIDES = ROOT / "examples" / "guides"


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GUIDES / name), *args]
    env = {**os.environ, "PYTHONWARNINGS": "default"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("04_data_sharding.py", "4 nodes looked at 92, 92, 91, 91 days"),
        ("05_keras_training.py", "the same on every node: True"),
        ("09_jax.py", "node 1: 10000 of 20000 points, 2 devices"),
        ("14_keras_on_torch.py", "the same on every node: True"),
    ],
)
def test_an_example_runs_without_an_argument(name: str, said: str) -> None:
    """S3-21, S1-23, S1-30: each under a minute, on data made in the file."""
    done = run(name)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "Traceback" not in done.stderr
    assert "Terminating process" not in done.stderr  # JAX's word when a group is left one by one


def test_an_example_runs_on_one_node() -> None:
    """S0-29: the same function on one node and on several."""
    done = run("09_jax.py", "--nodes", "1", "--provider", "local")
    assert done.returncode == 0, done.stderr
    assert "node 0: 20000 of 20000 points, 1 devices" in done.stdout


@pytest.mark.parametrize("name", ["04_data_sharding.py", "05_keras_training.py", "09_jax.py"])
def test_an_example_refuses_a_provider_that_is_not_there(name: str) -> None:
    done = run(name, "--provider", "nowhere")
    assert done.returncode == 2
    assert "local" in done.stderr
