"""A search that is resumed: it kills itself when so many trials have ended."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import optuna

import skyward as sky

TRIALS = 200


@sky.compute
def train(rate: float, kind: str, layers: int) -> float:
    for step in range(3):
        sky.progress(step, 3, loss=rate + step)
        time.sleep(0.005)
    if layers == 7:
        raise ValueError("seven layers fail")
    return rate * layers + (kind == "sgd")


def call(trial: optuna.Trial) -> Any:
    rate = trial.suggest_float("rate", 1e-4, 10.0, log=True)
    return train(rate, trial.suggest_categorical("kind", ["adam", "sgd"]), trial.suggest_int("layers", 1, 8))


def kill_self(journal: Path, ended: int) -> None:
    while not journal.exists() or journal.read_bytes().count(b'"fact":"told"') < ended:
        time.sleep(0.001)
    os.kill(os.getpid(), 9)


def main(ended: int) -> None:
    optuna.logging.disable_default_handler()
    study = optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=3), pruner=optuna.pruners.ThresholdPruner(upper=11.0)
    )
    journal = Path(os.environ["SKYWARD_STATE"]) / "runs" / "study" / "journal"
    if ended < TRIALS:
        threading.Thread(target=kill_self, args=(journal, ended), daemon=True).start()
    first = [{"rate": 9.5, "kind": "adam", "layers": 1}, {"rate": 0.5, "kind": "adam", "layers": 7}]
    with sky.ComputePool(nodes=8, console=False) as pool:
        sky.integrations.optuna(study, call, pool, trials=TRIALS, first=first, resume="study")
    for trial in study.trials:
        print(trial.state.name, trial.values, sorted(trial.params.items()), trial.user_attrs.get("error"), sep="|")


if __name__ == "__main__":
    main(int(sys.argv[1]))
