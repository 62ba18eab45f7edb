"""The Job of an open pool: waits for its pods and says why, replaces lost ones, and ends it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from skyward.api.provider import Lease, Machine, Provider, Receipt, Report
from skyward.api.shell import PodTarget
from skyward.api.spec import Spec
from skyward.errors import BootstrapError, InvalidArgument, NoPlace, NotGivenBack, SkywardError
from skyward.machines.asking import Waiting, answered, ended, pauses
from skyward.machines.ledger import Ledger, given_back
from skyward.providers.kubernetes.manifests import job_name, role, selector
from skyward.providers.kubernetes.states import JobState, PodState, last_event, parse
from skyward.setup.joined.members import JoinedMachine
from skyward.setup.kubectl import Kubectl, KubernetesRefused

if TYPE_CHECKING:
    from skyward.setup.joined.arrivals import Arrivals

__all__ = ["PodLease", "end", "listed"]

log = logging.getLogger("skyward.kubernetes")

_T = TypeVar("_T")
_SILENCE = 90.0  # as long as the cluster may not answer
_ENDING, _REPORTED = 180.0, 10.0
_UNPULLED = 90.0  # an image that is not pulled for so long will not be
_PULLING = "Check sky.Kubernetes(image=...), and whether the cluster may pull it: imagePullSecrets in template=."
_CERTAIN = 2.0  # what a lost call may have made is there by then


def listed(kubectl: Kubectl, pool: str | None = None) -> tuple[list[JobState], list[PodState]]:
    return parse(kubectl.read("listing Jobs and pods", "get", "jobs,pods", f"--selector={selector(pool)}"))


def _answered(ask: Callable[[], _T], report: Report, meanwhile: str) -> _T:
    return answered(ask, _SILENCE, report, "the cluster", meanwhile)


class PodLease(Lease):
    def __init__(self, provider: Provider, pool: str, ledger: Ledger, kubectl: Kubectl, executes: bool) -> None:
        super().__init__(provider, pool, ledger=ledger)
        self._kubectl, self._executes = kubectl, executes
        self.arrivals: Arrivals | None = None  # where pods connect to us
        self._name = job_name(pool)
        self._lock_pods = threading.Lock()
        self._given: set[str] = set()  # pods that are machines of the pool
        self._awaited = 0  # how many pods others wait for just now

    def more(self, spec: Spec, count: int, timeout: float, report: Report) -> Sequence[Machine]:
        self._make_room(count)
        with self._lock_pods:
            self._awaited += count
        try:
            return self.wait(count, timeout, report)
        finally:
            with self._lock_pods:
                self._awaited -= count

    def wait(self, count: int, timeout: float, report: Report, least: int | None = None) -> Sequence[JoinedMachine]:
        """`count` running pods, or after `timeout` seconds `least`; an error says what they wait for."""
        deadline, waiting, unpulled = time.monotonic() + timeout, Waiting(timeout, report), 0.0
        for pause in pauses():
            pods, late = self._pods(report), waiting.over
            with self._lock_pods:
                ours = [pod for pod in pods if pod.name not in self._given and not pod.leaves]
                fresh = [pod for pod in ours if pod.runs][:count]
                if enough := len(fresh) == count or (late and least is not None and len(fresh) >= least):
                    self._given.update(pod.name for pod in fresh)
            if enough:
                return (
                    self._joined(len(fresh), deadline, report, least) if self.arrivals else [*map(self._machine, fresh)]
                )
            text = self._reason(ours)
            unpulled = (unpulled or time.monotonic()) if any(pod.unpulled for pod in ours) else 0.0
            if unpulled and time.monotonic() - unpulled > _UNPULLED:
                raise BootstrapError("waiting for pods", f"{text}. {_PULLING}")
            progress = f"{len(fresh)} of {count} pods run" + (f", waiting: {text}" if text else "")
            place = f"the namespace {self._kubectl.namespace} of {self._kubectl.where} did not provide them"
            told = f"{progress.rstrip('.')}. Ask for less, or give provision_timeout= more seconds"
            waiting.tell(progress, partial(NoPlace, f"{place} within {timeout:g} seconds", [told]))
            time.sleep(pause)
        raise AssertionError("pauses do not end")

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        jobs, pods = listed(self._kubectl, self.pool)
        no_job = "" if jobs else f"the Job {self._name} does not exist any more: somebody has deleted it"
        ended = {pod.name: pod.ended for pod in pods}

        def reason(machine: JoinedMachine) -> str:
            left = self.arrivals.gone(machine.joined.place) if self.arrivals and machine.joined else ""
            return no_job or ended.get(machine.id, f"pod {machine.id} does not exist any more") or left

        return [replace(m, left=reason(m)) if isinstance(m, JoinedMachine) and not m.left else m for m in machines]

    def terminate(self, machines: Sequence[Machine]) -> None:
        """Ends single pods: the one with the highest number by shrinking the Job, so that none replaces it."""
        for machine in machines:
            if machine.joined is not None and self.arrivals is not None:
                self.arrivals.dismiss(machine.joined.place)
        jobs, pods = listed(self._kubectl, self.pool)
        names, size = {machine.id for machine in machines}, jobs[0].count if jobs else 0
        for pod in [pod for pod in reversed(pods) if pod.name in names and not pod.leaves]:
            if pod.index == size - 1 > 0:
                size -= 1
                self._change("changing the size of the Job", completions=size, parallelism=size)
            else:
                delete = ("delete", "pod", pod.name, "--wait=false", "--ignore-not-found")
                self._kubectl.run(f"ending pod {pod.name}", *delete)

    def way_back(self) -> Mapping[str, Any]:
        if not self._executes:
            raise InvalidArgument(
                "a detached run needs the right to `create pods/exec`: nothing else reaches the pod in which its "
                f"program runs. Whoever runs the cluster can allow it with:\n{role(self._kubectl.namespace)}"
            )
        return {"pod": asdict(PodTarget(self.machines[0].id, self._kubectl.namespace, self._kubectl.context))}

    def hand_over(self, run: str, until: float) -> None:
        if self.arrivals is not None:
            self.arrivals.detach(until - time.time() + _ENDING)
        super().hand_over(run, until)

    def leave(self) -> None:
        if self.arrivals is not None:
            self.arrivals.close(end=False)

    def close(self, report: Report) -> object:
        """Tells the pods to end and deletes the Job, with all that is its."""
        if self.arrivals is not None:
            self.arrivals.close()
        self.let_go()
        with given_back(self.pool) as ledger:
            return end(self._kubectl, self.pool, ledger, report)

    def resume(self) -> None:
        self._change("starting the Job", suspend=False)

    def _change(self, action: str, **spec: object) -> None:
        patch = json.dumps({"spec": spec})
        words = ("patch", "job", self._name, "--type=merge", f"--patch={patch}")
        _answered(lambda: self._kubectl.run(action, *words), log.info, "the Job stays as it is")

    def _make_room(self, count: int) -> None:
        """Enlarges the Job if it will not replace so many lost pods by itself."""
        with self._lock_pods:
            jobs, pods = listed(self._kubectl, self.pool)
            self._check(jobs)
            active = {pod.index for pod in pods if not pod.leaves and pod.name in self._given}
            coming = max(0, jobs[0].count - len(active) - jobs[0].succeeded - self._awaited)
            if coming < count:
                size = jobs[0].count + count - coming
                self._change("changing the size of the Job", completions=size, parallelism=size)

    def _machine(self, pod: PodState) -> JoinedMachine:
        target = PodTarget(pod.name, self._kubectl.namespace, self._kubectl.context)
        return JoinedMachine(pod.name, pod.address, pod=target)

    def _joined(self, count: int, deadline: float, report: Report, least: int | None) -> list[JoinedMachine]:
        """Running pods that have connected to us, under their own name."""
        assert self.arrivals is not None

        def failed() -> None:
            self._pods(report)  # raises if no others will come

        machines = self.arrivals.wait(self.arrivals.vacant(count), deadline, report, failed, least)
        made = [JoinedMachine(m.joined.name, joined=m.joined) for m in machines if m.joined is not None]
        with self._lock_pods:
            self._given.update(machine.id for machine in made)
        return made

    def _pods(self, report: Report) -> list[PodState]:
        jobs, pods = _answered(lambda: listed(self._kubectl, self.pool), report, "the Job stays as it is")
        self._check(jobs)
        return pods

    def _check(self, jobs: Sequence[JobState]) -> None:
        if not jobs or jobs[0].over:
            why = f"has ended: {jobs[0].over}" if jobs else "does not exist any more: somebody has deleted it"
            raise SkywardError(f"the Job {self._name} {why}. The pool gets no other pods.")

    def _reason(self, pods: Sequence[PodState]) -> str:
        """What pods wait for; without pods, why there are none: quota, admission, a queue."""
        if why := next((pod.waits for pod in pods if pod.hopeless), ""):
            raise BootstrapError("waiting for pods", f"a pod of the Job {self._name} will never run: {why}.")
        if not pods:
            text = last_event(self._events("Job", self._name), "FailedCreate", "Suspended", "Pending")
            if "violates PodSecurity" in text or "denied the request" in text:
                raise BootstrapError(
                    "waiting for pods", str(self._kubectl.refused(f"pods of the Job {self._name}", text))
                )
            return text
        text = next((pod.waits for pod in pods if pod.waits), "")
        more = last_event(self._events("Pod", pods[0].name)) if "volumes" in text else ""
        return f"{text} ({more})" if more else text

    def _events(self, kind: str, name: str) -> list[dict[str, object]]:
        fields = f"--field-selector=involvedObject.kind={kind},involvedObject.name={name}"
        try:
            return self._kubectl.read("reading events", "get", "events", fields)
        except KubernetesRefused:
            return []  # a right that helps, and is not needed


def end(kubectl: Kubectl, pool: str, ledger: Ledger | None, report: Report) -> Receipt | None:
    """Deletes a pool's Job and waits until it is gone."""
    name, place = job_name(pool), f"the namespace {kubectl.namespace}"
    uncertain = ledger is not None and bool(ledger.history.unanswered)
    had = ledger is not None and bool(ledger.history.made("job"))
    delete = ("delete", "job", name, "--ignore-not-found", "--wait=false", "--cascade=background")

    def left(waited: float) -> list[str]:
        nonlocal had
        jobs, pods = _answered(lambda: listed(kubectl, pool), report, "the Job has to be deleted")
        had = had or bool(jobs or pods)
        if jobs:
            _answered(lambda: kubectl.run(f"deleting the Job {name}", *delete), report, "it is deleted")
        found = [f"Job {job.name}" for job in jobs] + [f"pod {pod.name} on {pod.node or '-'}" for pod in pods]
        return found or ([f"Job {name}, which may have been made"] if uncertain and waited < _CERTAIN else [])

    try:
        ended(pool, place, left, _ENDING, _REPORTED, report)
    except KubernetesRefused as exc:
        raise NotGivenBack(pool, place, [f"Job {name}"], 0.0, f"Kubernetes was asked: {exc}") from exc
    text = f"the Job {name} of pool {pool} in {place} of {kubectl.where} is deleted, with its Secret and its pods."
    return Receipt(pool, text=text) if had else None
