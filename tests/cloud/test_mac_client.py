"""Machines of a cloud from a client on macOS: it runs without what only Linux has (tests/support/mac)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyward.machines.ledger import histories
from tests.support.cloud import Cloud
from tests.support.waiting import read_until, until

MAC = Path(__file__).parents[1] / "support" / "mac"


@pytest.fixture(autouse=True)
def _mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(MAC), *(path for path in sys.path if path)]))


def test_machines_are_used_and_given_back(cloud: Cloud, client: Callable[..., subprocess.Popen[str]]) -> None:
    said, _ = client(seconds=0.2).communicate(timeout=240)
    assert "closed" in said
    assert "confirmed gone" in said


def test_a_client_that_is_killed_leaves_nothing(cloud: Cloud, client: Callable[..., subprocess.Popen[str]]) -> None:
    program = client()
    read_until(program, "tick 3")
    os.kill(program.pid, signal.SIGKILL)
    assert len(cloud.running()) == 2
    until(lambda: not cloud.leftovers() and not list(histories()), 120)
