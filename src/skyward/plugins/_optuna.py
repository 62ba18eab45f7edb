"""Optuna: a study in this process, whose trials are calls on nodes."""

from __future__ import annotations

import base64
import math
import pickle
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from skyward.api.brief import brief
from skyward.api.compute import PendingCompute, Target
from skyward.client.gather import error_of
from skyward.errors import InvalidArgument, PoolClosed
from skyward.events import Progress
from skyward.history.runs import open_run
from skyward.transport.exceptions import as_text

if TYPE_CHECKING:
    from skyward.history.runs import Opened

__all__ = ["optuna"]

KIND = "study"
_Call = Callable[[Any], PendingCompute[Any]]
_Heard = tuple[str, Progress | None]


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

    A trial that the pruner gives up is cancelled on its node. `optuna.TrialPruned` may come from `call` or a
    body. One that fails, or whose result is no number, has its error in `user_attrs["error"]`, and the
    others continue. A sampler that has tried everything, such as that of a grid, ends the search.
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
    @property
    def slots(self) -> int: ...
    def on_event(self, listener: Callable[[Any], None]) -> Callable[[], None]: ...


def _bring_back(study: Any, facts: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> None:
    """Keeps the trials' numbers; those that were running are started again."""
    import optuna
    from optuna.trial import TrialState, create_trial

    trials: dict[int, Any] = {
        fact["number"]: pickle.loads(base64.b64decode(fact["trial"])) for fact in facts if "trial" in fact
    }
    count, ended = max(trials, default=-1) + 1, 0
    for number in range(count):
        trial = trials.get(number)
        if trial is not None and trial.state.is_finished():
            study.add_trial(trial)
            ended += 1
        else:  # with what its sampler has noted
            noted = {} if trial is None else {**trial.system_attrs, "fixed_params": trial.params}
            study.add_trial(create_trial(state=TrialState.WAITING, system_attrs=noted))
    for settings in first[count:]:
        study.enqueue_trial(dict(settings))
    if count:
        study.sampler.reseed_rng()  # with a seed, it would propose once more what was tried
        logger: Any = optuna.logging.get_logger("optuna.study")
        logger.info(f"{ended:,} trials were there, {count - ended:,} are started again.")


@dataclass
class _Search:
    study: Any
    call: _Call
    pool: _Pool
    metric: str | None
    kept: Opened | None = None
    changed: Literal["keep"] | None = None
    inbox: queue.SimpleQueue[_Heard] = field(default_factory=queue.SimpleQueue[_Heard])
    running: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    """Trial and future by call id."""
    checked: bool = False
    exhausted: bool = False
    """Whether the sampler has nothing more to propose."""

    def run(self, trials: int) -> None:
        ended = sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))
        sampler: Any = self.study.sampler
        self.exhausted = hasattr(sampler, "is_exhausted") and sampler.is_exhausted(self.study)
        stop = self.pool.on_event(self._hear)
        try:
            while ended < trials:
                while not self.exhausted and len(self.running) < min(self.pool.slots, trials - ended):
                    ended += self._start()
                if not self.running:
                    break
                call, report = self.inbox.get()
                if call in self.running:  # else it was pruned
                    ended += self._end(call) if report is None else self._report(call, report)
        finally:
            stop()
            for _, future in self.running.values():
                future.cancel()

    def _hear(self, event: object) -> None:
        if isinstance(event, Progress) and event.call is not None and event.metrics:
            self.inbox.put((event.call, event))

    def _start(self) -> bool:
        """Returns whether the trial has ended already."""
        from optuna import TrialPruned

        trial = self.study.ask()
        try:
            made = self.call(trial)
        except TrialPruned:
            return self._tell(trial, None, "PRUNED")
        if not isinstance(made, PendingCompute):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise InvalidArgument(
                "`call` makes the call of a trial, such as `lambda trial: train(trial.suggest_int(...))`."
            )
        if self.kept is not None and not self.checked:
            self._check(made, self.kept)
        self._keep("asked", trial)
        future: Any = self.pool.submit(made)
        self.running[future.call] = trial, future
        future.add_done_callback(self._ended)
        return False

    def _ended(self, future: Any) -> None:
        error_of(future)  # what it has reported was heard by then
        self.inbox.put((future.call, None))

    def _report(self, call: str, report: Progress) -> bool:
        """Returns whether the pruner stopped the trial."""
        trial, future = self.running[call]
        value = next(iter(report.metrics.values())) if self.metric is None else report.metrics.get(self.metric)
        if value is None or len(self.study.directions) > 1:
            return False
        trial.report(value, int(report.step))
        if not trial.should_prune():
            return False
        future.cancel()
        del self.running[call]
        return self._tell(trial, None, "PRUNED")

    def _end(self, call: str) -> bool:
        from optuna import TrialPruned

        trial, future = self.running.pop(call)
        error = error_of(future)
        if isinstance(error, PoolClosed | CancelledError):
            raise error
        if isinstance(error, TrialPruned):
            return self._tell(trial, None, "PRUNED")
        result = future.result() if error is None else None
        problem = _problem(result, len(self.study.directions)) if error is None else as_text(error)
        if problem:
            trial.set_user_attr("error", problem)
            return self._tell(trial, None, "FAIL")
        return self._tell(trial, result)

    def _tell(self, trial: Any, value: Any, state: Literal["PRUNED", "FAIL"] | None = None) -> bool:
        from optuna.trial import TrialState

        try:
            self.study.tell(trial, value, state=state and TrialState[state])
        except RuntimeError as exc:  # the trial is told by then; Optuna lets samplers stop its own loop alone
            if "Study.stop" not in str(exc):
                raise
            self.exhausted = True
        self._keep("told", trial)
        return True

    def _check(self, call: PendingCompute[Any], run: Opened) -> None:
        from skyward.transport.fingerprint import Fingerprints, changes

        _, version = Fingerprints().item(PendingCompute[Any](call.fn), call.name)
        before = [fact for fact in run.facts if fact["fact"] == "version"]
        if before and before[-1]["id"] != version.id and self.changed is None:
            changed = changes(before[-1]["manifest"], version.manifest)
            raise InvalidArgument(
                f"resume={run.path.name!r}: the trials there are of another version of {call.name}. What has changed "
                f'since: {changed}. Give changed="keep" to continue with them anyway, or another name to begin '
                "again."
            )
        run.journal.append({"fact": "version", "id": version.id, "manifest": dict(version.manifest)})
        self.checked = True

    def _keep(self, fact: str, trial: Any) -> None:
        if self.kept is not None:
            content = pickle.dumps(self.study.get_trials(deepcopy=False)[trial.number])
            told = {"fact": fact, "number": trial.number, "trial": base64.b64encode(content).decode()}
            self.kept.journal.append(told, sync=False)


def _problem(result: Any, count: int) -> str:
    """Why Optuna would not take it as `count` values; empty if it would."""
    given = cast("Sequence[Any]", result) if isinstance(result, Sequence) else [result]
    try:
        values = list(map(float, given))
    except (TypeError, ValueError):
        values = []
    if len(values) == count and not any(map(math.isnan, values)):
        return ""
    return (
        f"the result is {brief(cast('object', result))}: expected {'a number' if count == 1 else f'{count} numbers'}."
    )
