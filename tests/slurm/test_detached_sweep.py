"""Detached runs in jobs of Slurm, whose submitting process is killed at any moment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skyward.machines.ledger import histories
from tests.support.leftovers import watchdogs
from tests.support.slurm import Cluster
from tests.support.swept_runs import SEEDS, check, killed
from tests.support.waiting import until


@pytest.mark.parametrize("seed", range(SEEDS or 2))
@pytest.mark.timeout(400)
def test_a_submission_that_is_killed_at_any_moment_becomes_a_whole_run_or_nothing(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    path = f"/run/cache/in-job-{seed}-{os.getpid()}"

    def ran() -> str:
        return cluster.nodes[0].run(["sh", "-c", f"cat {path} 2>/dev/null || true"], user="root").stdout

    check(killed(seed, "sky.Slurm()", path, 5.0), ran)
    until(lambda: not cluster.jobs(), 120)
    until(lambda: not watchdogs() and not list(histories()), 60)
