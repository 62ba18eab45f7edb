"""A study whose trials are calls: reports, pruning, failures, and a killed program that is started again."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.history import runs
from tests.support.waiting import until

optuna = pytest.importorskip("optuna")
PROGRAM = Path(__file__).parents[1] / "support" / "resumed_study.py"


def run_study(folder: Path, ended: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SKYWARD_STATE": str(folder / "state")}
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(ended)], env=environment, capture_output=True, text=True, timeout=400
    )


def test_a_study_that_is_killed_twice_has_every_trial_once(tmp_path: Path) -> None:
    for ended in (37, 120):
        assert run_study(tmp_path, ended).returncode == -9
    done = run_study(tmp_path, 200)
    assert done.returncode == 0, done.stderr
    trials = done.stdout.splitlines()
    assert len(trials) == 200
    states = Counter(trial.split("|")[0] for trial in trials)
    assert set(states) == {"COMPLETE", "PRUNED", "FAIL"}
    (run,) = runs.runs("study", tmp_path / "state")
    facts, damaged = run.facts()
    told = [fact["number"] for fact in facts if fact["fact"] == "told"]
    assert damaged == 0
    assert len(told) == len(set(told)) == 200
    settings = [trial.split("|")[2] for trial in trials]
    assert len(set(settings)) == 200  # none is tried twice, also those that ran when it was killed
    kept = {word: {_kept(fact) for fact in facts if fact["fact"] == word} for word in ("asked", "told")}
    assert kept["asked"] == kept["told"]
    assert [settings for _, settings in sorted(kept["told"])] == settings
    failed = [trial for trial in trials if trial.startswith("FAIL")]
    assert failed
    assert all(trial.endswith("|ValueError: seven layers fail") for trial in failed)


def _kept(fact: dict[str, Any]) -> tuple[int, str]:
    trial = pickle.loads(base64.b64decode(fact["trial"]))
    return fact["number"], str(sorted(trial.params.items()))


def test_the_example_brings_a_study_back(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "guides" / "30_hyperparameter_search.py"
    environment = {**os.environ, "SKYWARD_STATE": str(tmp_path / "state")}
    for trials in ("4", "6"):
        command = [sys.executable, str(example), "--resume", "rates", "--trials", trials]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert f"best of {trials}: rate" in done.stdout


@sky.compute
def train(rate: float) -> float:
    import time

    for step in range(200 if rate > 1 else 2):
        sky.progress(step, loss=rate, other=99.0)
        time.sleep(0.01)
    return rate


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, console=False) as opened:
        yield opened


@pytest.fixture
def quiet_study() -> Any:
    optuna.logging.disable_default_handler()
    return optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1.0))


def rate_of(trial: Any) -> Any:
    return train(trial.suggest_float("rate", 0.0, 5.0))


def test_progress_reaches_the_pruner_and_a_pruned_trial_is_stopped_on_its_node(
    quiet_study: Any, pool: sky.ComputePool
) -> None:
    ended: list[Any] = []
    stop = pool.on_event(lambda e: ended.append(e.outcome) if isinstance(e, sky.events.CallEnded) else None)
    first = [{"rate": 0.5}, {"rate": 4.0}]
    sky.integrations.optuna(quiet_study, rate_of, pool, trials=2, first=first, metric="loss")
    until(lambda: len(ended) == 2)
    stop()
    kept, pruned = quiet_study.trials
    assert (kept.state.name, kept.value, kept.intermediate_values) == ("COMPLETE", 0.5, {0: 0.5, 1: 0.5})
    assert (pruned.state.name, pruned.value) == ("PRUNED", 4.0)
    assert len(pruned.intermediate_values) < 200
    assert Counter(ended) == {"ok": 1, "cancelled": 1}


def test_a_study_with_trials_of_its_own_cannot_be_brought_back(quiet_study: Any, pool: sky.ComputePool) -> None:
    quiet_study.enqueue_trial({"rate": 1})
    with pytest.raises(sky.SkywardError, match=r"the study has 1 trials already.*first="):
        sky.integrations.optuna(quiet_study, rate_of, pool, trials=1, resume="used")


def test_trials_of_other_code_are_taken_only_if_that_is_said(
    pool: sky.ComputePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))

    def search(factor: int, trials: int, **options: Any) -> list[float]:
        def objective(rate: float) -> float:
            return rate * factor

        def call(trial: Any) -> Any:
            return sky.compute(objective)(trial.suggest_float("rate", 1.0, 2.0))

        study: Any = optuna.create_study()
        sky.integrations.optuna(study, call, pool, trials=trials, resume="changed", **options)
        return [round(trial.value / trial.params["rate"]) for trial in study.trials]

    optuna.logging.disable_default_handler()
    assert search(1, 2) == [1, 1]
    assert search(1, 3) == [1, 1, 1]
    with pytest.raises(sky.SkywardError, match=r"another version of .*objective > closure 1\. Give changed="):
        search(10, 4)
    assert search(10, 4, changed="keep") == [1, 1, 1, 10]
    assert search(10, 5) == [1, 1, 1, 10, 10]


@sky.compute
def result_of(kind: str) -> Any:
    if kind == "pruned":
        raise optuna.TrialPruned
    return {"none": None, "text": "abc", "two": (1.0, 2.0), "nan": float("nan"), "number": 3}[kind]


def test_a_result_that_is_no_number_is_a_failure_with_its_text(quiet_study: Any, pool: sky.ComputePool) -> None:
    kinds = ["none", "text", "two", "nan", "pruned", "number"]

    def call(trial: Any) -> Any:
        if trial.number == len(kinds):
            raise optuna.TrialPruned  # such as one whose settings were tried before
        return result_of(trial.suggest_categorical("kind", kinds))

    first = [{"kind": kind} for kind in kinds]
    sky.integrations.optuna(quiet_study, call, pool, trials=7, first=first)
    found = [(trial.state.name, trial.value, trial.user_attrs.get("error")) for trial in quiet_study.trials]
    assert found == [
        ("FAIL", None, "the result is None: expected a number."),
        ("FAIL", None, "the result is 'abc': expected a number."),
        ("FAIL", None, "the result is (1.0, 2.0): expected a number."),
        ("FAIL", None, "the result is nan: expected a number."),
        ("PRUNED", None, None),
        ("COMPLETE", 3.0, None),
        ("PRUNED", None, None),
    ]


def test_a_grid_ends_the_search_when_all_of_it_was_tried_also_after_a_crash(
    pool: sky.ComputePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    optuna.logging.disable_default_handler()

    def search(last: int) -> list[Any]:
        def call(trial: Any) -> Any:
            if trial.number == last:
                raise KeyboardInterrupt
            return train(trial.suggest_float("rate", 0.0, 1.0))

        study: Any = optuna.create_study(sampler=optuna.samplers.GridSampler({"rate": [0.1, 0.2, 0.3, 0.4]}))
        sky.integrations.optuna(study, call, pool, trials=50, resume="grid")
        return [(trial.state.name, trial.value) for trial in study.trials]

    with pytest.raises(KeyboardInterrupt):
        search(2)
    found = search(50)
    assert set(found) == {("COMPLETE", value) for value in (0.1, 0.2, 0.3, 0.4)}
    assert len(found) < 4 + pool.slots  # what was started before the last one had ended
    assert search(50) == found


def test_what_makes_no_call_is_refused(quiet_study: Any, pool: sky.ComputePool) -> None:
    with pytest.raises(sky.SkywardError, match="makes the call of a trial"):
        sky.integrations.optuna(quiet_study, lambda trial: 3.0, pool, trials=1)  # type: ignore[arg-type,return-value]
