"""A search for hyperparameters with Optuna: ask and tell, trials that are stopped early, a study that is resumed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import skyward as sky


@sky.compute
def train(rate: float, steps: int = 20) -> Iterator[float]:
    """Stands for a training run: minimizes x * x, and yields the loss after each step."""
    x = 1.0
    for step in range(steps):
        time.sleep(0.01)
        x -= rate * 2 * x
        sky.progress(step + 1, steps, loss=x * x)
        yield x * x


@sky.compute
def final_loss(rate: float) -> float:
    """The same run, of which only the end counts."""
    return list(train.local(rate))[-1]


def open_study(path: str) -> optuna.Study:
    study = optuna.create_study(
        study_name="rates",
        storage=JournalStorage(JournalFileBackend(path)),
        load_if_exists=True,
        pruner=optuna.pruners.ThresholdPruner(upper=10.0),
    )
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)
    return study


def in_one_call(pool: sky.ComputePool, trials: int, name: str) -> optuna.Study:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=10.0))

    def call(trial: optuna.Trial) -> sky.PendingCompute[float]:
        return final_loss(trial.suggest_float("rate", 1e-4, 10.0, log=True))

    sky.integrations.optuna(study, call, pool, trials=trials, resume=name)
    return study


def ask_and_tell(pool: sky.ComputePool, study: optuna.Study, trials: int) -> None:
    running: dict[Future[float], optuna.Trial] = {}
    while trials or running:
        while trials and len(running) < pool.slots:
            trial = study.ask()
            rate = trial.suggest_float("rate", 1e-4, 10.0, log=True)
            running[final_loss(rate) > pool] = trial
            trials -= 1
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            if future.exception() is None:
                study.tell(running.pop(future), future.result())
            else:
                study.tell(running.pop(future), state=TrialState.FAIL)


def stop_early(pool: sky.ComputePool, study: optuna.Study, trials: int) -> None:
    def objective(trial: optuna.Trial) -> float:
        loss = float("inf")
        losses = train(trial.suggest_float("rate", 1e-4, 10.0, log=True)) >> pool
        for step, loss in enumerate(losses):
            trial.report(loss, step)
            if trial.should_prune():
                losses.close()
                raise optuna.TrialPruned
        return loss

    study.optimize(objective, n_trials=trials, n_jobs=pool.slots)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--study", default="study.log")
    parser.add_argument("--resume", metavar="NAME", help="all in one call, with trials that are kept under a name")
    args = parser.parse_args()
    if args.resume:
        with sky.ComputePool(nodes=args.nodes) as pool:
            found = in_one_call(pool, args.trials, args.resume)
        print(f"best of {len(found.trials)}: rate {found.best_params['rate']:.3g}")
        raise SystemExit
    study = open_study(args.study)
    left = args.trials - len([trial for trial in study.trials if trial.state.is_finished()])
    print(f"{left} of {args.trials} trials are left")
    if left > 0:
        study.enqueue_trial({"rate": 3.0})
        with sky.ComputePool(nodes=args.nodes) as pool:
            stop_early(pool, study, (left + 1) // 2)
            ask_and_tell(pool, study, left // 2)
    for state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL):
        print(f"{state.name.lower()}: {len(study.get_trials(states=[state]))}")
    print(f"best: rate {study.best_params['rate']:.3g} with a loss of {study.best_value:.3g}")
