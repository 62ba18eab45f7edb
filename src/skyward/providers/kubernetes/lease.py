"""The Job of an open pool: waiting for its pods with the reason, others for those that are lost, and its end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from skyward.api import provider
from skyward.api.provider import Lease, Machine, Provider, Report
from skyward.api.shell import PodTarget
from skyward.api.spec import Spec
from skyward.errors import BootstrapError, NoPlace, NotGivenBack, SkywardError
from skyward.machines import asking
from skyward.machines.asking import pauses
from skyward.machines.ledger import Ledger, given_back
from skyward.providers.kubernetes.manifests import job_name, selector
from skyward.providers.kubernetes.states import JobState, PodState, last_event, parse
from skyward.setup.kubectl import Kubectl, KubernetesRefused

if TYPE_CHECKING:
    from skyward.setup.joined.arrivals import Arrivals

__all__ = ["PodLease", "PodMachine", "Receipt", "end", "listed"]

_T = TypeVar("_T")
_SILENCE = 90.0  # as long as the cluster may not answer
_ENDING = 180.0
_REPORTED = 10.0
_UNPULLED = 90.0  # an image that is not pulled for so long will not be
_CERTAIN = 2.0  # what a lost call may have made is there by then


@dataclass(frozen=True)
class PodMachine(Machine):
    reason: str = ""
    """Why it is not the pool's any more."""

    @property
    def preemptible(self) -> bool:
        """A cluster may take a pod away at any time, and starts another one in its place."""
        return True

    @property
    def gone(self) -> str:
        return self.reason

    @property
    def shell_command(self) -> str:
        pod = self.pod
        return "" if pod is None else Kubectl(pod.namespace, pod.context).shown("exec", "-it", pod.pod, "--", "sh")


@dataclass(frozen=True)
class Receipt(provider.Receipt):
    """Which Job a pool had: it is deleted, and all of its pods are gone."""

    job: str
    namespace: str
    where: str

    def __str__(self) -> str:
        place = f"in the namespace {self.namespace} of {self.where}"
        return f"the Job {self.job} of pool {self.pool} {place} is deleted, with its Secret and its pods."


def listed(kubectl: Kubectl, pool: str | None = None) -> tuple[list[JobState], list[PodState]]:
    """The Jobs and pods of a pool, or of all."""
    return parse(kubectl.read("listing Jobs and pods", "get", "jobs,pods", f"--selector={selector(pool)}"))


def _answered(ask: Callable[[], _T], report: Report, meanwhile: str) -> _T:
    return asking.answered(ask, _SILENCE, report, "the cluster", meanwhile, _passes)


def _passes(error: Exception) -> bool:
    return isinstance(error, KubernetesRefused) and error.unanswered


class PodLease(Lease):
    """The Job of an open pool."""

    def __init__(self, provider: Provider, pool: str, ledger: Ledger, kubectl: Kubectl) -> None:
        super().__init__(provider, pool, ledger=ledger)
        self._kubectl = kubectl
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

    def wait(self, count: int, timeout: float, report: Report, least: int | None = None) -> tuple[PodMachine, ...]:
        """`count` pods that run, or after `timeout` seconds `least`; an error says what they wait for."""
        deadline = time.monotonic() + timeout
        watch = _Watch(self._kubectl, self.pool, self._name, report)
        if self.arrivals is not None:
            return self._joined(self.arrivals, count, deadline, watch, least)
        for pause in pauses():
            pods, late = watch.look(), time.monotonic() > deadline
            with self._lock_pods:
                ours = [pod for pod in pods if pod.name not in self._given and not pod.leaves]
                fresh = [pod for pod in ours if pod.runs][:count]
                if len(fresh) == count or (late and least is not None and len(fresh) >= least):
                    self._given.update(pod.name for pod in fresh)
                    return tuple(map(self._machine, fresh))
            watch.check(ours, f"{len(fresh)} of {count} pods run", timeout if late else None)
            time.sleep(pause)
        raise AssertionError("pauses do not end")

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        jobs, pods = listed(self._kubectl, self.pool)
        known = {pod.name: pod for pod in pods}

        def reason(machine: PodMachine) -> str:
            if not jobs:
                return f"the Job {self._name} does not exist any more: somebody has deleted it"
            if machine.id not in known:
                return f"pod {machine.id} does not exist any more"
            arrivals, joined = self.arrivals, machine.joined
            return known[machine.id].ended or ("" if not arrivals or not joined else arrivals.gone(joined.place))

        return [replace(m, reason=reason(m)) if isinstance(m, PodMachine) and not m.reason else m for m in machines]

    def terminate(self, machines: Sequence[Machine]) -> None:
        """Ends single pods: that with the highest number by making the Job smaller, so that none takes its place."""
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

    def close(self, report: Report) -> object:
        """Tells the pods to end and deletes the Job, with all that is its."""
        if self.arrivals is not None:
            self.arrivals.close()
        self.let_go()
        with given_back(self.pool) as ledger:
            return end(self._kubectl, self.pool, ledger, report)

    def resume(self) -> None:
        """Lets the pods start."""
        self._change("starting the Job", suspend=False)

    def _change(self, action: str, **spec: object) -> None:
        patch = json.dumps({"spec": spec})
        self._kubectl.run(action, "patch", "job", self._name, "--type=merge", f"--patch={patch}")

    def _make_room(self, count: int) -> None:
        """Makes the Job larger if it will not start so many pods by itself, in place of those that are lost."""
        with self._lock_pods:
            jobs, pods = listed(self._kubectl, self.pool)
            if not jobs or jobs[0].over:
                raise _deleted(self._name, jobs)
            active = {pod.index for pod in pods if not pod.leaves and pod.name in self._given}
            coming = max(0, jobs[0].count - len(active) - jobs[0].succeeded - self._awaited)
            if coming < count:
                size = jobs[0].count + count - coming
                self._change("changing the size of the Job", completions=size, parallelism=size)

    def _machine(self, pod: PodState) -> PodMachine:
        target = PodTarget(pod.name, self._kubectl.namespace, self._kubectl.context)
        return PodMachine(pod.name, pod.address, pod=target)

    def _joined(
        self, arrivals: Arrivals, count: int, deadline: float, watch: _Watch, least: int | None
    ) -> tuple[PodMachine, ...]:
        """The same where pods connect to us: Kubernetes is asked now and then why they do not."""
        looks, next_look = pauses(), 0.0

        def failed() -> None:
            nonlocal next_look
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + next(looks)
                waiting = [pod for pod in watch.look() if not pod.runs and not pod.leaves]
                if waiting:
                    watch.check(waiting, f"{len(waiting)} pods do not run yet", None)

        machines = arrivals.wait(arrivals.vacant(count), deadline, watch.report, failed, least)
        pods = {pod.index: pod.name for pod in watch.look() if pod.runs}
        targets = [machine.joined for machine in machines if machine.joined is not None]
        made = tuple(PodMachine(pods.get(target.place, target.name), joined=target) for target in targets)
        with self._lock_pods:
            self._given.update(machine.id for machine in made)
        return made


class _Watch:
    """One wait for pods: what is asked, what was told, and since when there is no hope."""

    def __init__(self, kubectl: Kubectl, pool: str, name: str, report: Report) -> None:
        self._kubectl, self._pool, self._name, self.report = kubectl, pool, name, report
        self._unpulled: float | None = None

    def look(self) -> list[PodState]:
        jobs, pods = _answered(lambda: listed(self._kubectl, self._pool), self.report, "the Job stays as it is")
        if not jobs or jobs[0].over:
            raise _deleted(self._name, jobs)
        return pods

    def check(self, waiting: Sequence[PodState], progress: str, over: float | None) -> None:
        """Tells what pods wait for; an error if that is without effect, or after `over` seconds."""
        if why := next((pod.hopeless for pod in waiting if pod.hopeless), ""):
            raise BootstrapError("waiting for pods", f"a pod of the Job {self._name} will never run: {why}.")
        unpulled = next((pod.unpulled for pod in waiting if pod.unpulled), "")
        self._unpulled = (self._unpulled or time.monotonic()) if unpulled else None
        if self._unpulled is not None and time.monotonic() - self._unpulled > _UNPULLED:
            advice = (
                "Check sky.Kubernetes(image=...), and whether the cluster may pull it: imagePullSecrets in template="
            )
            raise BootstrapError("waiting for pods", f"{unpulled}. {advice}.")
        text = next((pod.waits for pod in waiting if pod.waits), "")
        if not waiting:
            text = self._refused()
        elif "volumes" in text and (more := last_event(self._events("Pod", waiting[0].name))):
            text = f"{text} ({more})"
        if over is not None:
            place = f"the namespace {self._kubectl.namespace} of {self._kubectl.where}"
            told = f"{progress}; {text or 'the cluster does not say what they wait for'}"
            advice = "Ask for less, or give provision_timeout= more seconds"
            raise NoPlace(f"{place} has not given them within {over:g} seconds", [f"{told}. {advice}"])
        self.report(f"{progress}, waiting: {text}" if text else progress)

    def _refused(self) -> str:
        """Why there are no pods at all: quota, admission, a queue."""
        text = last_event(self._events("Job", self._name), "FailedCreate", "Suspended", "Pending")
        if "violates PodSecurity" in text or "denied the request" in text:
            what = f"the cluster's rules do not allow the pods of the Job {self._name}: {text}"
            advice = "What they ask for goes into sky.Kubernetes(template=...)"
            raise BootstrapError("waiting for pods", f"{what}. {advice}.")
        return text

    def _events(self, kind: str, name: str) -> list[dict[str, object]]:
        fields = f"--field-selector=involvedObject.kind={kind},involvedObject.name={name}"
        try:
            return self._kubectl.read("reading events", "get", "events", fields)
        except KubernetesRefused:
            return []  # a right that helps, and is not needed


def _deleted(name: str, jobs: Sequence[JobState]) -> SkywardError:
    why = f"has ended: {jobs[0].over}" if jobs else "does not exist any more: somebody has deleted it"
    return SkywardError(f"the Job {name} {why}. The pool gets no other pods.")


def end(kubectl: Kubectl, pool: str, ledger: Ledger | None, report: Report) -> Receipt | None:
    """Deletes the Job of a pool and waits until nothing of it is left."""
    began, name, place = time.monotonic(), job_name(pool), f"the namespace {kubectl.namespace}"
    uncertain = ledger is not None and bool(ledger.history.unanswered)
    had = ledger is not None and bool(ledger.history.made("job"))
    delete = ("delete", "job", name, "--ignore-not-found", "--wait=false", "--cascade=background")
    try:
        for pause in pauses():
            jobs, pods = _answered(lambda: listed(kubectl, pool), report, "the Job has to be deleted")
            waited, had = time.monotonic() - began, had or bool(jobs or pods)
            if not jobs and not pods and not (uncertain and waited < _CERTAIN):
                return Receipt(pool, job=name, namespace=kubectl.namespace, where=kubectl.where) if had else None
            if jobs:
                _answered(lambda: kubectl.run(f"deleting the Job {name}", *delete), report, "it is deleted")
            if waited > _ENDING:
                left = [f"Job {job.name}" for job in jobs] + [f"pod {pod.name} on {pod.node or '-'}" for pod in pods]
                text = f"Kubernetes was told so {waited:.0f} s ago; a node that does not answer may hold them."
                raise NotGivenBack(pool, place, left, 0.0, text)
            if waited > _REPORTED:
                report(f"waiting for Kubernetes to end {', '.join(pod.name for pod in pods) or name}")
            time.sleep(pause)
    except KubernetesRefused as exc:
        raise NotGivenBack(pool, place, [f"Job {name}"], 0.0, f"Kubernetes was asked: {exc}") from exc
    raise AssertionError("pauses do not end")
