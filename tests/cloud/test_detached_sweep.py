"""Detached runs on rented machines, whose submitting process is killed at any moment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skyward.cli.main import main
from skyward.machines.ledger import histories
from tests.cloud.machines import CACHE, Hosts
from tests.support.cloud import Cloud
from tests.support.swept_runs import SEEDS, check, killed
from tests.support.waiting import until


@pytest.mark.parametrize("seed", range(SEEDS or 2))
@pytest.mark.timeout(400)
def test_a_submission_that_is_killed_at_any_moment_becomes_a_whole_run_or_nothing(
    cloud: Cloud, hosts: Hosts, hosts_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"rented-{seed}-{os.getpid()}"
    pace = "Pace(base=0.01, cap=0.1, budget=20.0, poll=0.1, settle=0.1, unanswered=1.0, boot=1.0)"
    settings = f"endpoint_url={cloud.endpoint!r}, ssh_from='192.0.2.1', username='sky', pace={pace}"
    submitted = killed(seed, f"sky.AWS({settings})", f"{CACHE}/{name}", 6.0)

    def ran() -> str:
        return (hosts_cache / name).read_text() if (hosts_cache / name).exists() else ""

    check(submitted, ran)
    until(lambda: not cloud.running(), 180)
    if list(histories()):
        main(["down", *(left.pool for left in histories()), "--yes", "--endpoint-url", cloud.endpoint])
    until(lambda: not cloud.leftovers() and not list(histories()), 120)
