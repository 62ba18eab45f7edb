"""`sky doctor`: what it finds on this computer, and that it shows no secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyward.cli.common import print_findings
from skyward.cli.doctor import findings
from skyward.setup.checks.findings import Finding


def doctor(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "SKYWARD_STATE": str(folder / "state"), **variables}
    command = [sys.executable, "-m", "skyward", "doctor", "--json"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def test_it_says_what_there_is_and_shows_no_secret(tmp_path: Path) -> None:
    (tmp_path / "sky.toml").write_text("[pools.mine]\nnodes = 2\n")
    done = doctor(tmp_path, HF_TOKEN="hf_of_somebody", AWS_ACCESS_KEY_ID="AKIA_OF_SOMEBODY")
    assert done.returncode == 0, done.stderr
    found = {each["what"]: each for each in json.loads(done.stdout)}
    assert {"python", "system", "uv", "limits", "aws", "tokens", "settings", "leftovers"} <= set(found)
    assert "pools: mine" in found["settings"]["text"]
    assert "AWS_ACCESS_KEY_ID" in found["aws"]["text"]
    assert "HF_TOKEN" in found["tokens"]["text"]
    assert "SOMEBODY" not in done.stdout.upper()


def test_settings_that_are_wrong_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "sky.toml").write_text("nodes = = 3")
    done = doctor(tmp_path)
    assert done.returncode == 1
    assert "is not TOML" in done.stdout


def test_every_finding_that_is_not_right_says_what_to_do(tmp_path: Path) -> None:
    for finding in findings({"SKYWARD_CACHE": str(tmp_path)}):
        assert finding.state == "ok" or finding.do or finding.what in ("aws", "ssh keys")


def test_findings_have_the_states_and_columns_of_a_check_of_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([Finding("", "python", "ok", "3.12"), Finding("", "aws", "warning", "no login found", "Log in")])
    print_findings([Finding("gpu1", "python", "ok", "3.12"), Finding("a", "disk", "problem", "full")])
    assert capsys.readouterr().out.splitlines() == [
        "ok       python     3.12",
        "warning  aws        no login found. Log in",
        "ok       gpu1  python     3.12",
        "problem  a     disk       full",
    ]
    assert {finding.state for finding in findings({})} <= {"ok", "warning", "problem"}
