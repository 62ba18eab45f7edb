"""Optuna: a study in this process, whose trials are calls on nodes; a killed one is brought back from its run."""

from __future__ import annotations

import base64
import pickle
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from skyward.api.base_errors import InvalidArgument
from skyward.api.compute import PendingCompute, Target
from skyward.client.gather import error_of
from skyward.errors import PoolClosed
from skyward.events import Progress
from skyward.history.runs import open_run

if TYPE_CHECKING:
    from skyward.history.runs import Opened

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
    changed: Literal["keep"] | None = None,
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
            those that were running are started again with their settings. Default: nothing is kept.
        changed: "keep" takes trials that were kept of code that has changed since. Default: an error.

    A trial that the pruner gives up is cancelled on its node. One that fails has its error in `user_attrs["error"]`,
    and the others continue.
    """
    if isinstance(first, Mapping):
        raise InvalidArgument(f"first={first!r}: expected a list of settings, such as first=[{dict(first)!r}].")
    if resume is None:
        for settings in first:
            study.enqueue_trial(dict(settings))
        _Search(study, call, pool, metric).run(trials)
        return
    if study.trials:
        raise InvalidArgument(
            f"the study has {len(study.trials)} trials already. With resume= they are in the run: make the study "
            "without a storage, and give settings to try first as `first=`."
        )
    run = open_run(resume, KIND)
    try:
        _bring_back(study, run.facts, first)
        _Search(study, call, pool, metric, run, changed).run(trials)
    finally:
        run.journal.close()


class _Pool(Target, Protocol):
    """What is needed of a pool."""

    @property
    def slots(self) -> int: ...
    def on_event(self, listener: Callable[[Any], None]) -> Callable[[], None]: ...


def _bring_back(study: Any, facts: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> None:
    """Gives a study the trials of an earlier program, with their numbers; those that were running are asked again."""
    import optuna

    trials: dict[int, Any] = {
        fact["number"]: pickle.loads(base64.b64decode(fact["trial"])) for fact in facts if "trial" in fact
    }
    count, ended = max(trials, default=-1) + 1, 0
    for number in range(count):
        trial = trials.get(number)
        if trial is not None and trial.state.is_finished():
            study.add_trial(trial)
            ended += 1
        else:
            study.enqueue_trial({} if trial is None else trial.params)
    for settings in first[count:]:
        study.enqueue_trial(dict(settings))
    if count:
        study.sampler.reseed_rng()  # with a seed, it would propose once more what was tried
        logger: Any = optuna.logging.get_logger("optuna.study")
        logger.info(f"{ended:,} trials were there, {count - ended:,} are started again.")


class _Search:
    def __init__(
        self,
        study: Any,
        call: _Call,
        pool: _Pool,
        metric: str | None,
        run: Opened | None = None,
        changed: Literal["keep"] | None = None,
    ) -> None:
        import optuna

        self._states: Any = optuna.trial.TrialState
        self._study, self._call, self._pool, self._metric = study, call, pool, metric
        self._run, self._changed, self._checked = run, changed, run is None
        self._inbox: queue.SimpleQueue[tuple[str, Progress | None]] = queue.SimpleQueue()
        self._running: dict[str, tuple[Any, Any]] = {}  # by the id of their call: trial and future

    def run(self, trials: int) -> None:
        """Asks and tells until the study has so many trials that have ended."""
        ended = sum(trial.state.is_finished() for trial in self._study.get_trials(deepcopy=False))
        stop = self._pool.on_event(self._hear)
        try:
            while ended < trials:
                while len(self._running) < min(self._pool.slots, trials - ended):
                    self._start()
                call, report = self._inbox.get()
                if call in self._running:  # else it was pruned
                    ended += self._end(call) if report is None else self._report(call, report)
        finally:
            stop()
            for _, future in self._running.values():
                future.cancel()

    def _hear(self, event: object) -> None:
        if isinstance(event, Progress) and event.call is not None and event.metrics:
            self._inbox.put((event.call, event))

    def _start(self) -> None:
        trial = self._study.ask()
        made = self._call(trial)
        if not isinstance(made, PendingCompute):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise InvalidArgument(
                "`call` makes the call of a trial, such as `lambda trial: train(trial.suggest_int(...))`."
            )
        if not self._checked:
            self._check(made)
        self._keep("asked", trial)
        future: Any = self._pool.submit(made)
        self._running[future.call] = trial, future
        future.add_done_callback(self._ended)

    def _ended(self, future: Any) -> None:
        error_of(future)  # what it has reported was heard by then
        self._inbox.put((future.call, None))

    def _report(self, call: str, report: Progress) -> bool:
        """Tells the pruner; returns whether the trial has ended thereby."""
        trial, future = self._running[call]
        value = next(iter(report.metrics.values())) if self._metric is None else report.metrics.get(self._metric)
        if value is None or len(self._study.directions) > 1:
            return False
        trial.report(value, int(report.step))
        if not trial.should_prune():
            return False
        future.cancel()
        return self._tell(call, None, self._states.PRUNED)

    def _end(self, call: str) -> bool:
        trial, future = self._running[call]
        error = error_of(future)
        if error is None:
            return self._tell(call, future.result())
        if isinstance(error, PoolClosed | CancelledError):
            raise error
        trial.set_user_attr("error", f"{type(error).__name__}: {error}")
        return self._tell(call, None, self._states.FAIL)

    def _tell(self, call: str, value: Any, state: Any = None) -> bool:
        trial, _ = self._running.pop(call)
        self._study.tell(trial, value, state=state)
        self._keep("told", trial)
        return True

    def _check(self, call: PendingCompute[Any]) -> None:
        """Refuses trials that were kept of other code."""
        from skyward.transport.fingerprint import Fingerprints, changes

        run = cast("Opened", self._run)
        _, version = Fingerprints().item(PendingCompute[Any](call.fn), call.name)
        before = [fact for fact in run.facts if fact["fact"] == "version"]
        if before and before[-1]["id"] != version.id and self._changed is None:
            changed = changes(before[-1]["manifest"], version.manifest)
            raise InvalidArgument(
                f"resume={run.path.name!r}: the trials there are of another version of {call.name}. What has changed "
                f'since: {changed}. Give changed="keep" to continue with them all the same, or another name to begin '
                "again."
            )
        run.journal.append({"fact": "version", "id": version.id, "manifest": dict(version.manifest)})
        self._checked = True

    def _keep(self, fact: str, trial: Any) -> None:
        if self._run is not None:
            content = pickle.dumps(self._study.get_trials(deepcopy=False)[trial.number])
            told = {"fact": fact, "number": trial.number, "trial": base64.b64encode(content).decode()}
            self._run.journal.append(told, sync=False)
