"""The guide's program on the test cloud: it plans, and it trains with DDP on two machines and gives them back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cloud import Cloud

EXAMPLE = Path(__file__).parents[3] / "examples" / "guides" / "12_aws.py"
HERE = ["--ssh-from", "192.0.2.1", "--username", "sky"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *HERE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_the_program_plans_and_launches_nothing(cloud: Cloud) -> None:
    done = run("--accelerator", "T4")
    assert done.returncode == 0, done.stderr
    assert "1. 2 x g4dn.xlarge (spot, us-east-1a) with 1 x T4" in done.stdout
    assert "Nothing was launched" in done.stdout
    assert not cloud.machines.all


@pytest.mark.timeout(480)
def test_the_program_trains_on_two_machines_and_gives_them_back(cloud: Cloud) -> None:
    done = run("--yes", "--epochs", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 2 machines" in done.stdout
    assert "4 things created, 4 confirmed gone" in done.stdout
    assert len(cloud.machines.all) == 2
    assert cloud.leftovers() == []
