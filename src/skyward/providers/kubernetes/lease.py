"""The Job of an open pool: waiting for its pods with the reason, others for those that are lost, and its end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from skyward.api import provider
from skyward.api.provider import Lease, Machine, Provider, Report
from skyward.api.shell import PodTarget
from skyward.api.spec import Spec
from skyward.errors import BootstrapError, NoPlace, NotGivenBack, SkywardError
from skyward.machines.ledger import Ledger, given_back
from skyward.providers.kubernetes.manifests import job_name, selector
from skyward.providers.kubernetes.states import JobState, PodState, parse, refused_pods, story
from skyward.setup.kubectl import Kubectl, KubernetesRefused

if TYPE_CHECKING:
    from skyward.setup.joined.arrivals import Arrivals

__all__ = ["PodLease", "PodMachine", "Receipt", "end", "listed"]

_T = TypeVar("_T")
_SILENCE = 90.0  # as long as the cluster may not answer when a pool is closed
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
        return (
            f"the Job {self.job} of pool {self.pool} in the namespace {self.namespace} of {self.where} is deleted, "
            "with its Secret and its pods."
        )


def pauses() -> Iterator[float]:
    """How long to wait between two looks at a Job."""
    began, pause = time.monotonic(), 0.3
    while True:
        yield pause
        waited = time.monotonic() - began
        pause = min(pause * 1.5, 1.0 if waited < 30 else 3.0 if waited < 300 else 10.0)


def answered(ask: Callable[[], _T], seconds: float, report: Report, meanwhile: str) -> _T:
    """What the cluster answers. It is asked again while it does not, for so many seconds."""
    began = time.monotonic()
    for pause in pauses():
        try:
            return ask()
        except KubernetesRefused as exc:
            if exc.kind != "server" or time.monotonic() - began > seconds:
                raise
            report(f"the cluster does not answer; {meanwhile}. It is asked again. ({exc})")
        time.sleep(pause)
    raise AssertionError("pauses do not end")


def listed(kubectl: Kubectl, pool: str | None = None) -> tuple[list[JobState], list[PodState]]:
    """The Jobs and pods of a pool, or of all."""
    return parse(kubectl.read("listing Jobs and pods", "get", "jobs,pods", f"--selector={selector(pool)}"))


class PodLease(Lease):
    """The Job of an open pool."""

    def __init__(
        self, provider: Provider, pool: str, ledger: Ledger, kubectl: Kubectl, arrivals: Arrivals | None
    ) -> None:
        super().__init__(provider, pool, ledger=ledger)
        self._kubectl, self._arrivals = kubectl, arrivals
        self._name = job_name(pool)
        self._lock_pods = threading.Lock()
        self._given: dict[str, int] = {}
        """Pods that are machines of the pool, with their numbers."""
        self._awaited = 0
        """How many pods others wait for just now."""

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
        if self._arrivals is not None:
            return self._joined(self._arrivals, count, deadline, watch, least)
        for pause in pauses():
            pods = watch.look()
            with self._lock_pods:
                fresh = [pod for pod in pods if pod.runs and pod.name not in self._given]
                late = time.monotonic() > deadline
                if len(fresh) >= count or (late and least is not None and len(fresh) >= least):
                    self._given.update((pod.name, pod.index) for pod in fresh[:count])
                    return tuple(map(self._machine, fresh[:count]))
                waiting = [pod for pod in pods if pod.name not in self._given and not pod.over and not pod.ending]
            watch.check(waiting, f"{len(fresh)} of {count} pods run", late, timeout)
            time.sleep(pause)
        raise AssertionError("pauses do not end")

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        jobs, pods = listed(self._kubectl, self.pool)
        known = {pod.name: pod for pod in pods}

        def reason(machine: PodMachine) -> str:
            name = _pod_name(machine)
            if machine.joined is not None and self._arrivals is not None:
                left = self._arrivals.gone(machine.joined.place)
            else:
                left = ""
            if not jobs:
                return f"the Job {self._name} does not exist any more: somebody has deleted it"
            if name not in known:
                return f"pod {name} does not exist any more"
            return known[name].ended or left

        return [replace(m, reason=reason(m)) if isinstance(m, PodMachine) and not m.reason else m for m in machines]

    def terminate(self, machines: Sequence[Machine]) -> None:
        """Ends single pods: that with the highest number by making the Job smaller, so that none takes its place."""
        names = {_pod_name(machine) for machine in machines}
        for machine in machines:
            if machine.joined is not None and self._arrivals is not None:
                self._arrivals.dismiss(machine.joined.place)
        jobs, pods = listed(self._kubectl, self.pool)
        ending = sorted((pod for pod in pods if pod.name in names), key=lambda pod: -pod.index)
        for pod in ending:
            if pod.over or pod.ending:
                continue
            if jobs and pod.index == jobs[0].count - 1 > 0:
                self._resize(jobs[0].count - 1)
                jobs = [replace(jobs[0], count=jobs[0].count - 1)]
            else:
                delete = ("delete", "pod", pod.name, "--wait=false", "--ignore-not-found")
                self._kubectl.run(f"ending pod {pod.name}", *delete)

    def close(self, report: Report) -> object:
        """Tells the pods to end and deletes the Job, with all that is its."""
        if self._arrivals is not None:
            self._arrivals.close()
        self.let_go()
        with given_back(self.pool) as ledger:
            return end(self._kubectl, self.pool, ledger, report)

    def resume(self) -> None:
        """Lets the pods start."""
        patch = json.dumps({"spec": {"suspend": False}})
        self._kubectl.run("starting the Job", "patch", "job", self._name, "--type=merge", f"--patch={patch}")

    def _make_room(self, count: int) -> None:
        """Makes the Job larger if it will not start so many pods by itself, in place of those that are lost."""
        with self._lock_pods:
            jobs, pods = listed(self._kubectl, self.pool)
            if not jobs or jobs[0].over:
                raise _deleted(self._name, jobs)
            active = {pod.index for pod in pods if not pod.over and not pod.ending and pod.name in self._given}
            coming = jobs[0].count - len(active) - jobs[0].succeeded - self._awaited
            if coming < count:
                self._resize(jobs[0].count + count - max(0, coming))

    def _resize(self, count: int) -> None:
        patch = json.dumps({"spec": {"completions": count, "parallelism": count}})
        self._kubectl.run(
            "changing the size of the Job", "patch", "job", self._name, "--type=merge", f"--patch={patch}"
        )

    def _machine(self, pod: PodState) -> PodMachine:
        target = PodTarget(pod.name, self._kubectl.namespace, self._kubectl.context)
        return PodMachine(pod.name, pod.address, pod=target)

    def _joined(
        self, arrivals: Arrivals, count: int, deadline: float, watch: _Watch, least: int | None
    ) -> tuple[PodMachine, ...]:
        """The same where pods connect to us: Kubernetes is asked now and then why they do not."""
        looks, next_look = pauses(), 0.0

        def failed() -> str | None:
            nonlocal next_look
            if time.monotonic() < next_look:
                return None
            next_look = time.monotonic() + next(looks)
            waiting = [pod for pod in watch.look() if not pod.runs and not pod.over and not pod.ending]
            if waiting:
                watch.check(waiting, f"{len(waiting)} pods do not run yet", False, 0.0)
            return None

        machines = arrivals.wait(arrivals.vacant(count), deadline, watch.report, failed, least)
        pods = {pod.index: pod for pod in watch.look() if pod.runs}
        found: list[PodMachine] = []
        with self._lock_pods:
            for machine in machines:
                assert machine.joined is not None
                pod = pods.get(machine.joined.place)
                name = machine.joined.name if pod is None else pod.name
                self._given[name] = machine.joined.place
                found.append(PodMachine(name, joined=machine.joined))
        return tuple(found)


class _Watch:
    """One wait for pods: what is asked, what was told, and since when there is no hope."""

    def __init__(self, kubectl: Kubectl, pool: str, name: str, report: Report) -> None:
        self._kubectl, self._pool, self._name = kubectl, pool, name
        self.report = report
        self._unpulled: float | None = None

    def look(self) -> list[PodState]:
        jobs, pods = answered(
            lambda: listed(self._kubectl, self._pool), _SILENCE, self.report, "the Job stays as it is"
        )
        if not jobs or jobs[0].over:
            raise _deleted(self._name, jobs)
        return pods

    def check(self, waiting: Sequence[PodState], progress: str, late: bool, timeout: float) -> None:
        """Tells what pods wait for; an error if that is in vain, or took too long."""
        why = next((pod.hopeless for pod in waiting if pod.hopeless), "")
        if why:
            raise BootstrapError("waiting for pods", f"a pod of the Job {self._name} will never run: {why}.")
        unpulled = next((pod.unpulled for pod in waiting if pod.unpulled), "")
        self._unpulled = (self._unpulled or time.monotonic()) if unpulled else None
        if self._unpulled is not None and time.monotonic() - self._unpulled > _UNPULLED:
            raise BootstrapError(
                "waiting for pods",
                f"{unpulled}. Check the name in sky.Kubernetes(image=...), and whether the cluster may pull it "
                "(imagePullSecrets go into template=).",
            )
        text = next((pod.waits for pod in waiting if pod.waits), "") or self._refused()
        if "volumes" in text and (more := self._story(waiting)):
            text = f"{text} ({more})"
        if late:
            told = f"{progress}; {text or 'the cluster does not say what they wait for'}"
            raise NoPlace(
                f"the namespace {self._kubectl.namespace} of {self._kubectl.where} has not given {timeout:g} seconds "
                "after they were asked for",
                [f"{told}. Ask for less, or give provision_timeout= more seconds"],
            )
        self.report(f"{progress}, waiting: {text}" if text else progress)

    def _refused(self) -> str:
        """Why there are no pods at all: quota, admission, a queue."""
        text = refused_pods(self._events("Job", self._name))
        if "violates PodSecurity" in text or "denied the request" in text:
            raise BootstrapError(
                "waiting for pods",
                f"the cluster's rules do not allow the pods of the Job {self._name}: {text}. What they ask for goes "
                "into sky.Kubernetes(template=...).",
            )
        return text

    def _story(self, waiting: Sequence[PodState]) -> str:
        return story(self._events("Pod", waiting[0].name)) if waiting else ""

    def _events(self, kind: str, name: str) -> list[dict[str, object]]:
        fields = f"--field-selector=involvedObject.kind={kind},involvedObject.name={name}"
        try:
            return self._kubectl.read("reading events", "get", "events", fields)
        except KubernetesRefused:
            return []  # a right that helps, and is not needed


def _deleted(name: str, jobs: Sequence[JobState]) -> SkywardError:
    if not jobs:
        return SkywardError(
            f"the Job {name} does not exist any more: somebody has deleted it, so the pool gets no other pods."
        )
    return SkywardError(f"the Job {name} has ended: {jobs[0].over}. The pool gets no other pods.")


def _pod_name(machine: Machine) -> str:
    return machine.id


def end(kubectl: Kubectl, pool: str, ledger: Ledger | None, report: Report) -> Receipt | None:
    """Deletes the Job of a pool and waits until nothing of it is left."""
    uncertain = ledger is not None and bool(ledger.history.unanswered)
    began, name = time.monotonic(), job_name(pool)
    delete = ("delete", "job", name, "--ignore-not-found", "--wait=false", "--cascade=background")
    had = ledger is not None and bool(ledger.history.made("job"))
    try:
        for pause in pauses():
            jobs, pods = answered(lambda: listed(kubectl, pool), _SILENCE, report, "the Job has to be deleted")
            waited = time.monotonic() - began
            had = had or bool(jobs or pods)
            if not jobs and not pods and not (uncertain and waited < _CERTAIN):
                return Receipt(pool, job=name, namespace=kubectl.namespace, where=kubectl.where) if had else None
            if jobs:
                answered(lambda: kubectl.run(f"deleting the Job {name}", *delete), _SILENCE, report, "it is deleted")
            if waited > _ENDING:
                left = [f"pod {pod.name} on node {pod.node or '-'}" for pod in pods]
                raise NotGivenBack(
                    pool,
                    f"the namespace {kubectl.namespace}",
                    [*(f"Job {job.name}" for job in jobs), *left],
                    0.0,
                    f"Kubernetes was told to end them {waited:.0f} s ago; a node that does not answer may hold them.",
                )
            if waited > _REPORTED:
                report(f"waiting for Kubernetes to end {', '.join(pod.name for pod in pods) or name}")
            time.sleep(pause)
    except KubernetesRefused as exc:
        raise NotGivenBack(
            pool, f"the namespace {kubectl.namespace}", [f"Job {name}"], 0.0, f"Kubernetes was asked: {exc}"
        ) from exc
    raise AssertionError("pauses do not end")
