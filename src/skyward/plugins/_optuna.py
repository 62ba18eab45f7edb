"""Optuna: a study in this process, whose trials are calls on nodes; a killed one is brought back from its run."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Protocol

from skyward.api.base_errors import InvalidArgument
from skyward.api.compute import PendingCompute
from skyward.client.futures import when_done
from skyward.client.gather import error_of
from skyward.errors import PoolClosed
from skyward.events import Progress
from skyward.history.runs import open_run

if TYPE_CHECKING:
    from skyward.transport.journal import Journal

__all__ = ["optuna"]

KIND = "study"
_Call = Callable[[Any], PendingCompute[Any]]


def optuna(
    study: Any,
    call: _Call,
    pool: _Pool,
    *,
    trials: int,
    first: Sequence[Mapping[str, Any]] = (),
    metric: str | None = None,
    resume: str | None = None,
) -> None:
    """Runs trials of an Optuna `study` as calls on a `pool`, as many at a time as it has slots.

    Args:
        study: from `optuna.create_study`; it stays in this process.
        call: makes the call of a trial, `lambda trial: train(trial.suggest_float("rate", 0, 1))`, whose result is the
            trial's value.
        pool: an open pool.
        trials: how many trials the study has in the end, those that were there counted.
        first: settings that are tried first, as in `study.enqueue_trial`. Default: none.
        metric: which metric of `sky.progress` is reported to the study's pruner. Default: the first one in each report.
        resume: a name under which trials are kept. Given again, with a new study, those that had ended are there, and
            those that were running are started again with their settings. The code of trials is not compared, unlike
            that of maps: after a change, choose another name. Default: nothing is kept.

    A trial that the pruner gives up is cancelled on its node. One that fails has its error in `user_attrs["error"]`,
    and the others continue.
    """
    if isinstance(first, Mapping):
        raise InvalidArgument(f"first={first!r}: expected a list of settings, such as first=[{dict(first)!r}].")
    search = _Search(study, call, pool, metric)
    if resume is None:
        for settings in first:
            study.enqueue_trial(dict(settings))
        search.run(trials)
        return
    run = open_run(resume, KIND)
    try:
        search.bring_back(run.journal, run.facts, first)
        search.run(trials)
    finally:
        run.journal.close()


class _Pool(Protocol):
    """What is needed of a pool."""

    @property
    def slots(self) -> int: ...
    @property
    def submit(self) -> Any: ...
    def on_event(self, listener: Callable[[Any], None]) -> Callable[[], None]: ...


class _Search:
    def __init__(self, study: Any, call: _Call, pool: _Pool, metric: str | None) -> None:
        import optuna

        self._optuna: Any = optuna
        self._study, self._call, self._pool, self._metric = study, call, pool, metric
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._running: dict[str, tuple[int, Any, Any]] = {}  # by the id of their call: our number, trial, future
        self._journal: Journal | None = None
        self._asked = 0
        self._again: list[int] = []  # numbers of trials that ran when an earlier program ended

    def bring_back(
        self, journal: Journal, facts: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]
    ) -> None:
        """Gives the study the trials of an earlier program, and keeps those that come."""
        if self._study.trials:
            raise InvalidArgument(
                f"the study has {len(self._study.trials)} trials already. With resume= they are in the run: make the "
                "study without a storage, and give settings to try first as `first=`."
            )
        asked = {fact["number"]: fact for fact in facts if fact.get("fact") == "asked"}
        told = {fact["number"]: fact for fact in facts if fact.get("fact") == "told"}
        for fact in told.values():
            self._study.add_trial(self._made(fact))
        left = {number: self._params(fact) for number, fact in asked.items() if number not in told}
        self._asked = max(asked, default=-1) + 1
        for settings in [*left.values(), *first[self._asked :]]:  # they are asked for in this order, before others
            self._study.enqueue_trial(dict(settings))
        self._again = list(left)
        if asked:
            self._study.sampler.reseed_rng()  # with a seed, it would propose once more what was tried
        self._journal = journal
        if asked:
            text = f"{len(told):,} trials were there, {len(left):,} are started again."
            self._optuna.logging.get_logger("optuna.study").info(text)

    def run(self, trials: int) -> None:
        """Asks and tells until the study has so many trials that have ended."""
        ended = sum(trial.state.is_finished() for trial in self._study.get_trials(deepcopy=False))
        stop = self._pool.on_event(self._hear)
        try:
            while ended < trials:
                while len(self._running) < min(self._pool.slots, trials - ended):
                    self._start()
                call, report = self._inbox.get()
                if call not in self._running:
                    continue  # it was pruned
                ended += self._report(call, report) if report is not None else self._end(call)
        finally:
            stop()
            for _, _, future in self._running.values():
                future.cancel()

    def _hear(self, event: object) -> None:
        if isinstance(event, Progress) and event.call is not None and event.metrics:
            self._inbox.put((event.call, event))

    def _start(self) -> None:
        trial = self._study.ask()
        if self._again:
            number = self._again.pop(0)
        else:
            number, self._asked = self._asked, self._asked + 1
        made = self._call(trial)
        if not isinstance(made, PendingCompute):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise InvalidArgument(
                "`call` makes the call of a trial, such as `lambda trial: train(trial.suggest_int(...))`."
            )
        self._keep("asked", number, trial)
        future: Any = self._pool.submit(made)
        self._running[future.call] = number, trial, future
        when_done(future, lambda _: self._inbox.put((future.call, None)))

    def _report(self, call: str, report: Progress) -> bool:
        """Tells the pruner; returns whether the trial has ended thereby."""
        _, trial, future = self._running[call]
        value = next(iter(report.metrics.values())) if self._metric is None else report.metrics.get(self._metric)
        if value is None or len(self._study.directions) > 1:
            return False
        trial.report(value, int(report.step))
        if not trial.should_prune():
            return False
        future.cancel()
        self._tell(call, None, self._optuna.trial.TrialState.PRUNED)
        return True

    def _end(self, call: str) -> bool:
        _, trial, future = self._running[call]
        error = error_of(future)
        if error is None:
            self._tell(call, future.result(), None)
        elif isinstance(error, PoolClosed | CancelledError):
            raise error
        else:
            trial.set_user_attr("error", f"{type(error).__name__}: {error}")
            self._tell(call, None, self._optuna.trial.TrialState.FAIL)
        return True

    def _tell(self, call: str, value: Any, state: Any) -> None:
        number, trial, _ = self._running.pop(call)
        self._study.tell(trial, value, state=state)
        self._keep("told", number, trial)

    def _keep(self, fact: str, number: int, trial: Any) -> None:
        """Writes what there is of a trial now."""
        if self._journal is None:
            return
        found = self._study.get_trials(deepcopy=False)[trial.number]
        to_json = self._optuna.distributions.distribution_to_json
        self._journal.append(
            {
                "fact": fact,
                "number": number,
                "state": found.state.name,
                "values": found.values,
                "params": {name: found.distributions[name].to_internal_repr(v) for name, v in found.params.items()},
                "distributions": {name: to_json(each) for name, each in found.distributions.items()},
                "user_attrs": _plain(found.user_attrs),
                "system_attrs": _plain(found.system_attrs),
                "reports": [[step, value] for step, value in found.intermediate_values.items()],
            },
            sync=False,
        )

    def _made(self, fact: Mapping[str, Any]) -> Any:
        return self._optuna.trial.create_trial(
            state=self._optuna.trial.TrialState[fact["state"]],
            values=fact["values"],
            params=self._params(fact),
            distributions=self._distributions(fact),
            user_attrs=fact["user_attrs"],
            system_attrs=fact["system_attrs"],
            intermediate_values={int(step): value for step, value in fact["reports"]},
        )

    def _distributions(self, fact: Mapping[str, Any]) -> dict[str, Any]:
        from_json = self._optuna.distributions.json_to_distribution
        return {name: from_json(text) for name, text in fact["distributions"].items()}

    def _params(self, fact: Mapping[str, Any]) -> dict[str, Any]:
        found = self._distributions(fact)
        return {name: found[name].to_external_repr(value) for name, value in fact["params"].items()}


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those that JSON knows."""
    kept: dict[str, Any] = {}
    for name, value in attributes.items():
        try:
            kept[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue
    return kept
