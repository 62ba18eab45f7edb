"""Optuna's studies on a pool, and the lines by which trackers get what bodies report."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import skyward as sky

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "guides"


def module_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_search_stops_hopeless_trials_and_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    command = [sys.executable, str(EXAMPLES / "30_hyperparameter_search.py"), "--study", str(tmp_path / "study.log")]
    said = [
        subprocess.run([*command, "--trials", trials], capture_output=True, text=True, timeout=240, check=True).stdout
        for trials in ("6", "8", "8")
    ]
    left = [re.search(r"(\d) of \d trials are left", text) for text in said]
    assert [match and match[1] for match in left] == ["6", "2", "0"]
    assert [sum(map(int, re.findall(r"^(?:complete|pruned|fail): (\d+)", text, re.M))) for text in said] == [6, 8, 8]
    assert int(re.findall(r"pruned: (\d+)", said[0])[0]) >= 1
    assert "fail: 0" in said[2]


def test_a_trial_that_the_program_left_running_is_tried_again(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    example = module_of("30_hyperparameter_search.py")
    study = example.open_study(str(tmp_path / "study.log"))
    study.ask({"rate": optuna.distributions.FloatDistribution(1e-4, 10.0, log=True)})
    (running,) = study.trials
    again = example.open_study(str(tmp_path / "study.log"))
    assert [trial.state.name for trial in again.trials] == ["FAIL", "WAITING"]
    assert again.ask().suggest_float("rate", 1e-4, 10.0, log=True) == running.params["rate"]


def lines_of_trackers() -> dict[str, tuple[str, str]]:
    page = (ROOT / "docs" / "guides" / "history.md").read_text()
    rows = re.findall(r"^\| (TensorBoard|MLflow|Weights & Biases) \| `(.+)` \| `(.+)` \|$", page, re.M)
    return {name: (before, line) for name, before, line in rows}


def test_the_lines_of_the_guide_pass_metrics_to_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = pytest.importorskip("tensorboardX")
    monkeypatch.chdir(tmp_path)
    logged: list[Any] = []

    def log_metric(key: str, value: float, step: int | None = None, *, run_id: str | None = None) -> None:
        logged.append(("mlflow", run_id, key, value, step))

    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"), log=lambda data: logged.append(("wandb", data)))
    writer = writers.SummaryWriter("runs")
    given: dict[str, Any] = {
        "SummaryWriter": {"runs": writer}.__getitem__,
        "mlflow": SimpleNamespace(start_run=lambda: run, log_metric=log_metric),
        "wandb": SimpleNamespace(init=lambda: run),
        "passed_to": module_of("19_history.py").passed_to,  # type: ignore[attr-defined]
    }

    @sky.compute
    def train() -> None:
        sky.progress(1, 2, loss=0.5)
        sky.progress(2, 2, loss=0.25)

    with sky.ComputePool(console=False) as pool:
        for before, line in lines_of_trackers().values():
            exec(f"{before}\n{line}", given | {"pool": pool})
        train() >> pool
    writer.close()
    steps = [(0.5, 1), (0.25, 2)]
    assert [entry for entry in logged if entry[0] == "mlflow"] == [
        ("mlflow", "r1", "loss/rank0", *step) for step in steps
    ]
    assert [entry for entry in logged if entry[0] == "wandb"] == [
        ("wandb", {"loss/rank0": value, "step": step}) for value, step in steps
    ]
    (written,) = (tmp_path / "runs").glob("events.*")
    assert written.read_bytes().count(b"loss/rank0") == 2
