"""Pools of the cloud that are not closed by their program: the machines are given back before it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyward.machines.ledger import histories
from tests.support import late
from tests.support.cloud import Cloud


@pytest.mark.parametrize("what", ["ends with a call running", "drops it and ends"])  # more of them in tests/ssh
def test_a_pool_that_a_program_does_not_close_gives_its_machines_back(cloud: Cloud, tmp_path: Path, what: str) -> None:
    pace = "Pace(base=0.01, cap=0.1, budget=20.0, poll=0.1, settle=0.1, unanswered=1.0, boot=1.0)"
    provider = f"sky.AWS(endpoint_url={cloud.endpoint!r}, ssh_from='192.0.2.1', username='sky', pace={pace})"
    ended = late.finished(tmp_path / "program.py", what, provider, "from skyward.providers.aws.api import Pace")
    # at once: by the program itself, not by a watchdog after it
    assert (cloud.running(), cloud.leftovers(), list(histories())) == ([], [], [])
    late.check(what, *ended)
    assert "2 machines" in ended[2], ended[2]  # the receipt
