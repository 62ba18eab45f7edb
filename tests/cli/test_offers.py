"""`sky offers`: what could be had, with prices, places and reasons; AWS is the test cloud."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.cli import main
from tests.support.cloud import Cloud


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of Slurm that this computer may have are not found."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def quotas(cloud: Cloud) -> Iterator[dict[str, float]]:
    usual = dict(cloud.quotas)
    yield cloud.quotas
    cloud.quotas.clear()
    cloud.quotas.update(usual)


def _listed(printed: str) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    rows = [json.loads(line) for line in printed.splitlines()]
    return [row for row in rows if "name" in row], [row for row in rows if "why" in row]


def test_prices_are_said_for_all_nodes_for_one_and_for_each_accelerator(
    cloud: Cloud, quotas: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    quotas["*"] = 1000.0
    assert main(["offers", "--provider", "aws", "--accelerator", "A100", "--nodes", "2", "--json"]) == 0
    offers, _ = _listed(capsys.readouterr().out)
    first = offers[0]
    assert (first["machine"], first["accelerators"], first["nodes"], first["market"]) == ("p4d.24xlarge", 8, 2, "spot")
    each = first["hourly_cost_per_node"]
    assert isinstance(each, float)
    assert first["hourly_cost"] == pytest.approx(2 * each)
    assert first["hourly_cost_per_accelerator"] == pytest.approx(each / 8)
    costs = [offer["hourly_cost"] for offer in offers]
    assert costs == sorted(costs)  # type: ignore[type-var]
    assert {offer["market"] for offer in offers} == {"spot", "on-demand"}
    assert not any(call.action == "RunInstances" for call in cloud.calls), "nothing is created"


def test_a_table_is_printed_with_one_line_for_each_type_and_price_class(
    quotas: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["offers", "--provider", "aws", "--region", "us-east-1", "--region", "eu-west-1", "--accelerator", "T4:4"]
    quotas["*"] = 1000.0
    assert main([*words, "--spot"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if "g4dn.12xlarge" in line]
    assert [row[2:4] for row in rows] == [["g4dn.12xlarge", "spot"]] * 2
    assert {row[-1] for row in rows} == {"known"}
    assert "us-east-1a" in printed
    assert "eu-west-1a" in printed
    assert "on-demand" not in printed
    assert "traffic is not counted" in printed


def test_a_quota_that_is_too_small_is_the_reason_and_the_status(
    quotas: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    quotas["*"] = 0.0
    assert main(["offers", "--provider", "aws", "--accelerator", "T4"]) == 1
    assert "no: quota 'All G and VT instances' (L-3819A6DF) allows 0 vCPUs, 4 asked" in capsys.readouterr().out


def test_a_quota_that_may_not_be_asked_for_hides_no_offer(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.fail("GetServiceQuota", "AccessDeniedException", status=400)
    assert main(["offers", "--provider", "aws", "--accelerator", "T4"]) == 0
    assert "quota not known" in capsys.readouterr().out


def test_everybody_is_asked_and_says_why_not(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offers", "--accelerator", "MI300X"]) == 1
    printed = capsys.readouterr().out
    assert "nothing is available" in printed
    assert "AWS us-east-1: MI300X: no machine in us-east-1 has it; there are " in printed
    assert "Local: this computer: has no" in printed


def test_without_a_login_this_computer_is_left(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert main(["offers", "--cpus", "1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ *no price +this computer ", printed, re.M)
    assert "no AWS login that works: no credentials were found\n" in printed
    assert main(["offers", "--cpus", "100000", "--provider", "local"]) == 1
    assert "vCPUs, 100000 asked" in capsys.readouterr().out


def test_a_limit_rules_out_what_costs_more(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["offers", "--provider", "aws", "--cpus", "16", "--memory", "64"]
    assert main([*words, "--max-price", "0.3", "--json"]) == 0
    offers, refused = _listed(capsys.readouterr().out)
    assert all(offer["hourly_cost"] <= 0.3 for offer in offers)  # type: ignore[operator]
    assert any("max_hourly_cost=0.3" in str(row["why"]) for row in refused)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--accelerator", "A1000"], "near ones: A100"),
        (["--provider", "azure"], "--provider azure: there are aws, dask, join, kubernetes, local"),
        (["--provider", "ssh"], "--host gpu1 --host gpu2"),
        (["--provider", "ray"], "--provider ray: say where it is, --address URL"),
        (["--address", "tcp://10.0.0.1"], "--provider ray or --provider dask"),
        (["--provider", "local", "--region", "eu-west-1"], "--region and --profile are for AWS"),
        (["--nodes", "0"], "nodes=0"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_write(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["offers", *words]) == 1
    assert said in capsys.readouterr().err


def test_hosts_are_named_and_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offers", "--host", "gpu1", "--host", "gpu2", "--nodes", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 hosts" in printed
    assert "not asked; `sky hosts check` looks at hosts" in printed


def test_the_guide_shows_what_is_printed(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "costs.md").read_text()
    shown = guide.partition("$ sky offers ")[2].partition("```")[0]
    command, *lines = shown.splitlines()
    assert main(["offers", *command.split()]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.strip() not in ("", "...") and line not in printed] == []
