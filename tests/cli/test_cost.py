"""`sky cost`: what was spent on machines of the test cloud, while they run and after they were given back."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

from skyward import events
from skyward.api.spec import Spec
from skyward.cli import main
from skyward.cli.cost import Spending, rows, told, total
from skyward.history.recorder import Recorder
from skyward.machines.spent import Charge
from tests.support.cloud import Cloud
from tests.support.leases import returned


def _rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["cost", "--json", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_machines_are_counted_so_far_and_then_as_their_receipt_says(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    aws = cloud.aws()
    held = aws.acquire(Spec(accelerator="T4", nodes=2), "training")
    (row,) = _rows(capsys)
    assert (row["pool"], row["provider"], row["machines"], row["running"]) == ("training", "AWS", 2, True)
    assert row["unknown"] == 0
    receipt = returned(held)
    (row,) = _rows(capsys)
    assert row["running"] is False
    assert row["dollars"] == pytest.approx(receipt.total, abs=1e-6)
    assert row["spot"] == row["dollars"]
    returned(held)  # again, without its ledger
    (row,) = _rows(capsys, "--by", "pool")
    assert row["dollars"] == pytest.approx(receipt.total, abs=1e-6)
    assert row["day"] is None
    assert main(["cost"]) == 0
    printed = capsys.readouterr().out
    head, line, whole = printed.splitlines()[:3]
    assert head.split() == ["day", "pool", "provider", "cost", "spot"]
    assert line.split()[1:3] == ["training", "AWS"]
    assert whole.split()[0] == "total"
    assert "traffic is not counted" in printed


def test_a_price_that_is_not_known_is_said_and_is_not_nothing(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyward.providers.aws import prices

    prices.forget()
    monkeypatch.setattr(cloud, "prices", None)
    aws = cloud.aws()
    held = aws.acquire(Spec(nodes=1, allocation="on-demand"), "secret")
    assert returned(held).machines[0].charged.known is False
    prices.forget()
    (row,) = _rows(capsys)
    assert row["unknown"] == 1
    assert row["dollars"] > 0, "its disk and its address have prices"
    assert main(["cost"]) == 0
    printed = capsys.readouterr().out
    assert "+ 1 unknown" in printed
    assert "the price of 1 machine is not known" in printed


def test_without_costs_it_says_what_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    assert main(["cost", "--days", "7"]) == 0
    assert capsys.readouterr().out == "nothing was spent in the last 7 days, as far as this computer knows\n"
    assert _rows(capsys) == []
    assert main(["cost", "--days", "0"]) == 1
    assert "--days 0: give a number from 1 to 400" in capsys.readouterr().err


def test_the_example_of_the_guide_plans_within_its_budget(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "guides" / "29_costs.py")
    command = [sys.executable, example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "1. 2 x g4dn.xlarge (spot, us-east-1a) with 1 x T4 (16GB), $0.3656 an hour" in done.stdout, done.stderr
    assert "$2 are 5.5 hours. Nothing was launched." in done.stdout
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["plan", example, "--", "--yes", "--nodes", "3"]) == 0, "without --yes it opens no pool"
    assert "3 x g4dn.xlarge (spot, us-east-1a)" in capsys.readouterr().out
    assert not cloud.machines.all


def test_a_history_with_an_unknown_price_is_json_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    recorder = Recorder("p")
    recorder.record(events.PoolCost("p", math.inf, time=1e9))
    recorder.record(events.PoolClosed("p", 1.0, 1, time=1e9 + 5))
    recorder.close()
    assert main(["history", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"] is None
    assert main(["history"]) == 0
    assert "unknown" in capsys.readouterr().out


def test_the_guide_shows_what_is_printed() -> None:
    def part(day: int, pool: str, dollars: float, market: str, running: bool = False) -> Charge:
        began = datetime(2026, 11, day, 12).timestamp()
        return Charge(pool, "AWS", began, began + 3600, dollars, f"{pool}{market}{day}", market, running=running)

    charges = (
        part(16, "training", 1.12, "spot"),
        part(16, "training", 3.0, "on-demand", running=True),
        part(15, "training", 1.4, "spot"),
        part(15, "sweep", 0.3656, "spot"),
    )
    since = date(2026, 11, 10)
    found = rows(charges, "pool and day", since)
    printed = told(found, total(charges, since), Spending(charges, (("Local", 3),)), "in the last 7 days")
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "costs.md").read_text()
    assert "$ sky cost --days 7\n" + "\n".join(printed) + "\n```" in guide
