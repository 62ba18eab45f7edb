"""Jobs as squeue lists them: states, nodes, and why one waits."""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from skyward.api import provider
from skyward.api.provider import Leftover, Report
from skyward.api.spec import Spec
from skyward.errors import BootstrapError, NoPlace, SkywardError
from skyward.machines import asking
from skyward.machines.asking import Waiting, ended, pauses
from skyward.machines.ledger import usable
from skyward.providers.slurm.commands import Commands, SlurmRefused
from skyward.providers.slurm.notices import WARNING
from skyward.providers.slurm.options import meaning, seconds
from skyward.setup.joined.members import JoinedMachine

if TYPE_CHECKING:
    from skyward.setup.joined.arrivals import Arrivals

__all__ = [
    "UNANSWERED",
    "Job",
    "Receipt",
    "SlurmMachine",
    "Taken",
    "answered",
    "cancel",
    "check_wanted",
    "comment",
    "end",
    "end_machines",
    "expand",
    "granted",
    "job_name",
    "kill_wait",
    "leftovers",
    "listed",
    "never",
    "parse_jobs",
    "waiting",
    "when_started",
    "why_ended",
    "why_gone",
]


FORMAT = "%i|%T|%r|%S|%e|%D|%N|%l|%j|%k"
"""What squeue is asked for; times as seconds since 1970."""

_NAME = "skyward-"
_COMMENT = re.compile(r"skyward pool=(?P<pool>\S+) expires=(?P<expires>\d+)")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
ENDING = ("COMPLETING",)

# What will not change by waiting, and what can be done.
_NEVER = {
    "PartitionNodeLimit": "the partition has fewer nodes than the pool asks for, or allows fewer for one job. Ask for "
    "fewer nodes, or another partition; `sinfo -s` lists them",
    "PartitionTimeLimit": "the time limit is longer than the partition allows. Give sky.Slurm(time=...) within it; "
    "`sinfo -o '%P %l'` lists them",
    "PartitionConfig": "the partition has or allows less than the pool asks for: nodes, CPUs, memory or time. Ask for "
    "less, or another partition; `sinfo -o '%P %D %c %m %l'` lists them",
    "PartitionInactive": "the partition takes jobs and starts none. Choose another; `sinfo -s` lists them",
    "BadConstraints": "no node has what is asked for. Look at constraint=, gres= and memory; `sinfo -o '%N %f %G %m'` "
    "lists what nodes have",
    "InvalidAccount": "the account does not exist. Give sky.Slurm(account=...) one of yours",
    "InvalidQOS": "the QOS does not exist, or the account may not use it. Give another sky.Slurm(qos=...)",
    "AccountNotAllowed": "the account may not use the partition. Give another account= or partition=",
    "QOSNotAllowed": "the QOS may not be used in the partition. Give another qos= or partition=",
    "DependencyNeverSatisfied": "a job that it waits for has failed. Leave the dependency out",
    "JobHeldUser": "it is held. Leave the option that holds it out, or release it with `scontrol release`",
}
_PER_JOB = re.compile(r"(?:QOS|Assoc)\w*(?:PerJob|PerNode|MaxWall|TimeLimit)\w*|(?:QOS|Assoc)Min\w+")
_ABOVE_LIMIT = (
    "it asks for more than the QOS or the account allows for one job. Ask for fewer nodes, CPUs or GPUs, or less time"
)


@dataclass(frozen=True)
class Job:
    id: str
    state: str
    reason: str = ""
    start: float | None = None
    end: float | None = None
    count: int = 0
    nodes: tuple[str, ...] = ()
    limit: float = float("inf")
    pool: str = ""
    expires: float | None = None

    @property
    def waits(self) -> bool:
        return self.state in _WAITING

    @property
    def runs(self) -> bool:
        return self.state in _RUNNING

    @property
    def over(self) -> bool:
        return not self.waits and not self.runs and self.state not in ENDING

    def time_over(self, now: float) -> bool:
        """Slurm also sets the end of a job that it preempts."""
        return self.state == "TIMEOUT" or (
            self.runs and self.start is not None and self.start + self.limit - now < WARNING + 60
        )

    def ended(self) -> str:
        text = {
            "CANCELLED": "was cancelled, by its user or an administrator",
            "PREEMPTED": "was preempted: its nodes went to a job of higher priority",
            "TIMEOUT": "has reached its time limit; give sky.Slurm(time=...) a longer one",
            "DEADLINE": "has reached its deadline",
            "NODE_FAIL": "ended because a node of it failed",
            "BOOT_FAIL": "ended because a node of it did not boot",
            "OUT_OF_MEMORY": "ran out of memory; ask for more with memory_gb=",
            "COMPLETED": "is over",
            "COMPLETING": "is being ended",
            "FAILED": "has failed",
        }.get(self.state, f"is {self.state.lower().replace('_', ' ')}")
        if self.waits:
            text = "was put back into the queue, although the pool had asked Slurm not to do that"
        return f"job {self.id} {text}"


def job_name(pool: str) -> str:
    return _NAME + pool


def comment(pool: str, expires: float) -> str:
    return f"skyward pool={pool} expires={expires:.0f}"


def parse_jobs(said: str) -> list[Job]:
    found: list[Job] = []
    for line in said.splitlines():
        fields = line.split("|", 9)
        if len(fields) < 10:
            continue
        id, state, reason, start, end, count, nodes, limit, name, note = (field.strip() for field in fields)
        told = _COMMENT.search(note)
        pool = told["pool"] if told else name.removeprefix(_NAME) if name.startswith(_NAME) else ""
        if not usable(pool):
            continue
        found.append(
            Job(
                id,
                state,
                "" if reason in ("None", "(null)") else reason,
                float(start) if start.isdigit() else None,
                float(end) if end.isdigit() else None,
                int(count) if count.isdigit() else 0,
                tuple(expand(nodes)),
                seconds(limit),
                pool,
                float(told["expires"]) if told else None,
            )
        )
    return found


def expand(nodes: str) -> list[str]:
    """ "gpu[01-03,7],login" are gpu01, gpu02, gpu03, gpu7, login."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        names += _expanded(item)
    return [name for name in names if name and name not in ("(null)", "None")]


def _expanded(item: str) -> list[str]:
    found = re.match(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if found is None:
        return [item.strip()]
    numbers: list[str] = []
    for part in found[2].split(","):
        first, _, last = part.partition("-")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return [f"{found[1]}{number}{rest}" for number in numbers for rest in _expanded(found[3])]


def waiting(job: Job, now: float) -> str:
    text = f"waiting: {_reason(job) or 'Slurm has not said why yet'}"
    if job.state == "CONFIGURING":
        text = "waiting: its nodes are being switched on"
    elif job.state.startswith("REQUEUE"):
        text = f"waiting: the job was put back into the queue ({_reason(job)})"
    if job.start is not None and job.start > now:
        text += f", estimated start {_moment(job.start, now)}"
    return text


def never(job: Job) -> str:
    reason = _reason(job)
    advice = _NEVER.get(reason) or (_ABOVE_LIMIT if _PER_JOB.fullmatch(reason) else None)
    return f"job {job.id} would never start: {reason}, which means that {advice}." if advice else ""


def _reason(job: Job) -> str:
    text = job.reason.strip("()")
    return text if " " in text else text.split(",")[0]


def _moment(at: float, now: float) -> str:
    here, today = time.localtime(at), time.localtime(now)
    return time.strftime("%H:%M" if here[:3] == today[:3] else "%d %b %H:%M", here)


_T = TypeVar("_T")
UNANSWERED = (SlurmRefused, BootstrapError)

_ENDING = 120.0
_SILENCE = 90.0  # as long as Slurm may not answer when a pool is closed; each try may take a minute
_AGAIN = 10.0  # a scancel may have been lost with a controller that was just restarting
_BY_ITSELF = 5.0  # as long as steps may take that were told to end; then they are cancelled
_CERTAIN = 3.0  # a reason is believed once it has stood for so long: Slurm says some of them before it has looked


@dataclass(frozen=True)
class Receipt(provider.Receipt):
    jobs: tuple[str, ...]
    rest: tuple[str, ...] = ()

    def __str__(self) -> str:
        ended = ", ".join(self.jobs)
        text = f"Slurm has ended {'job' if len(self.jobs) == 1 else 'jobs'} {ended} of pool {self.pool}."
        if self.rest:
            text += (
                f" All of its steps have ended; Slurm shows it as completing until its own clean-up is done, and that "
                f"waits: {', '.join(self.rest)}."
            )
        return text


def listed(commands: Commands, id: str | None = None) -> list[Job]:
    """Jobs of this user's pools, or of one; also ended ones that Slurm still knows."""
    which = ["-u", commands.user] if id is None else ["-j", id]  # --me came with Slurm 20.02
    try:
        return parse_jobs(commands.run("squeue", "-h", "-t", "all", *which, "-o", FORMAT))
    except SlurmRefused as exc:
        if "Invalid job id" in str(exc):
            return []  # it has been over for so long that Slurm has forgotten it
        raise


def jobs_of(commands: Commands, pool: str) -> list[Job]:
    return [job for job in listed(commands) if job.pool == pool]


def answered(ask: Callable[[], _T], seconds: float | None, report: Report, meanwhile: str) -> _T:
    """Retried for `seconds`."""
    return asking.answered(ask, seconds, report, "Slurm", meanwhile, _passes)


def _passes(error: Exception) -> bool:
    absent = isinstance(error, SlurmRefused) and error.code == "127"  # nor will it be there later
    return isinstance(error, UNANSWERED) and not absent


def when_started(commands: Commands, id: str, patience: float | None, report: Report) -> Job:
    began, since, last, waits = time.monotonic(), 0.0, "", Waiting(patience, report)
    for pause in pauses():
        left = None if patience is None else max(0.0, began + patience - time.monotonic())
        kept = f"job {id} keeps its place in the queue"
        job = next(iter(answered(lambda: listed(commands, id), left, report, kept)), None)
        now = time.monotonic()
        if job is not None and job.state == "CANCELLED" and not _failed_prologs(commands, job):
            commands.final = f"job {id} was cancelled"
            raise SkywardError(f"{job.ended()}, before it had nodes.")
        if job is None or job.over:
            when = " before it had nodes" if job is None or not job.nodes else ""
            raise BootstrapError("waiting for nodes", f"{why_ended(commands, id, job)}{when}.")
        if job.runs:
            return job
        why = never(job)
        since = 0.0 if why != last or not why else since or now
        last = why
        if why and since and now - since >= _CERTAIN:
            raise NoPlace("Slurm has no nodes for this pool", [why.rstrip(".")])
        text = waiting(job, time.time())
        told = f"job {id} was still {text} after wait={patience or 0:g} seconds"
        told += ". Give sky.Slurm(wait=...) more, or ask for less"
        waits.tell(f"job {id} is {text}", lambda told=told: NoPlace("Slurm had no nodes for this pool", [told]))
        time.sleep(min(pause, 1.0) if why else pause)
    raise AssertionError("pauses do not end")


def check_wanted(commands: Commands, pool: str, known: Collection[str], report: Report) -> None:
    """Refuses more nodes for a pool whose time is over, or whose job was cancelled; waits while a job is ending."""
    began = time.monotonic()
    for pause in pauses():
        jobs = [job for job in jobs_of(commands, pool) if job.id in known and job.id not in commands.cancelled]
        for job in jobs:
            if job.state == "CANCELLED":
                commands.final = f"job {job.id} was cancelled"
            if job.time_over(time.time()):
                raise SkywardError(
                    f"the time limit of job {job.id} is reached, so the pool gets no other nodes. Give "
                    "sky.Slurm(time=...) a longer one, or open the pool again."
                )
        if commands.final:
            raise SkywardError(f"{commands.final}, so the pool gets no other nodes.")
        ending = [job.id for job in jobs if job.state in ENDING and not _preempted(commands, job.id)]
        if not ending or time.monotonic() - began > _ENDING:
            return
        report(f"waiting until Slurm says why it has ended job {', '.join(ending)}")
        time.sleep(pause)


def _preempted(commands: Commands, id: str) -> bool:
    return re.search(r"\bPreemptTime=\d", commands.run("scontrol", "show", "job", "-o", id, check=False)) is not None


def granted(commands: Commands, id: str, spec: Spec) -> str:
    said = ""
    with suppress(*UNANSWERED):
        said = commands.run("scontrol", "show", "job", "-o", id, check=False)
    found = re.search(r"\b(?:Alloc)?TRES=(\S+)", said)
    got: dict[str, str] = dict(re.findall(r"([^=,]+)=([^,]+)", found[1] if found else ""))
    nodes, cpus = int(got.get("node", "1")), got.get("cpu", "")
    if not cpus.isdigit():
        return ""
    each = int(cpus) // nodes
    memory = re.fullmatch(r"([\d.]+)([KMGT]?)", got.get("mem", ""))
    room = f" and {float(memory[1]) / nodes:g}{memory[2]}B of memory" if memory else ""
    more = "; vcpus= and memory_gb= ask for more" if spec.vcpus is None and each == 1 else ""
    return f" with {each} CPU{'' if each == 1 else 's'}{room} each{more}"


def cancel(commands: Commands, jobs: Sequence[Job]) -> None:
    """Ignores jobs that are over."""
    commands.cancelled.update(job.id for job in jobs)
    for start in range(0, len(jobs), 50):
        with suppress(*UNANSWERED):
            commands.run("scancel", *[job.id for job in jobs[start : start + 50]], check=False)


def end(
    commands: Commands, pool: str, known: Sequence[str], told: bool, uncertain: bool, report: Report
) -> Receipt | None:
    """Waits until no job is left.

    `told`: the nodes were told to end, so a job may end by itself. `uncertain`: a job may exist that we do not know.
    """
    cancelled, seen, rest = dict[str, float](), dict.fromkeys(known), ()
    told_to = "its nodes were asked to end" if told else "it has to end the jobs of the pool"

    def left(waited: float) -> list[str]:
        nonlocal seen, rest
        listing = answered(lambda: jobs_of(commands, pool), _SILENCE, report, told_to)
        jobs = [job for job in listing if not job.over]
        seen |= {job.id: None for job in jobs}
        if not jobs:
            return ["a job that may have been submitted"] if uncertain and waited < _CERTAIN else []
        due = [job for job in jobs if job.waits or not told or waited > _BY_ITSELF]
        due = [job for job in due if job.state not in ENDING and waited - cancelled.get(job.id, -_AGAIN) >= _AGAIN]
        if due:
            cancel(commands, due)
            cancelled.update({job.id: waited for job in due})
        if waited > _BY_ITSELF and (rest := _only_clean_up(commands, jobs)):
            return []
        names = [f"job {job.id} ({job.state.lower()})" for job in jobs]
        failed = failed_nodes(commands, [node for job in jobs for node in job.nodes]) if waited > _ENDING else {}
        return [*names, *failed.values()]

    ended(pool, "Slurm's queue", left, _ENDING, _BY_ITSELF, report)
    return Receipt(pool, tuple(seen), rest) if seen else None


def _only_clean_up(commands: Commands, jobs: Sequence[Job]) -> tuple[str, ...]:
    """The nodes that Slurm cannot clean up, if nothing else is left; empty if unknown.

    A step counts until the node has told the controller that it ended.
    """
    if not jobs or any(job.state not in ENDING or not job.nodes for job in jobs):
        return ()
    try:
        if any(steps_of(commands, job.id, check=True) for job in jobs):
            return ()
        nodes = [node for job in jobs for node in job.nodes]
        failed = failed_nodes(commands, nodes)
    except UNANSWERED:
        return ()  # it ended just now, or Slurm does not answer
    return tuple(failed.values()) if set(nodes) <= set(failed) else ()


def why_ended(commands: Commands, id: str, job: Job | None, tried: str = "") -> str:
    if job is None:
        return f"job {id} is not known to Slurm any more: it ended, or was removed,"
    if job.state == "CANCELLED" and (nodes := _failed_prologs(commands, job)):
        return f"Slurm has ended job {id}, because the site's prolog failed on {', '.join(nodes)}"
    if job.state != "FAILED":
        return job.ended()
    said = commands.run("scontrol", "show", "job", "-o", id, check=False)
    code = re.search(r"\bExitCode=(\d+):", said)
    reason = job.reason if job.reason not in ("", "NonZeroExitCode", "RaisedSignal") else ""
    why = meaning(int(code[1]), tried) if code else None
    return f"{job.ended()}: {why}" if why else job.ended() + (f" ({reason})" if reason else "")


def steps_of(commands: Commands, id: str, check: bool = False) -> dict[int, tuple[str, str]]:
    rows = commands.run("squeue", "-h", "-s", "-j", id, "-o", "%i|%N|%j", check=check).splitlines()
    found = [(row.split("|", 2), re.fullmatch(r".*\|place-(\d+)", row)) for row in rows]
    return {int(place[1]): (parts[0], parts[1]) for parts, place in found if place is not None}


def kill_wait(commands: Commands) -> float:
    found = re.search(r"^KillWait\s*=\s*(\d+)", commands.run("scontrol", "show", "config", check=False), re.MULTILINE)
    return float(found[1]) if found else 30.0


def failed_nodes(commands: Commands, nodes: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, state, why in _states(commands, nodes):
        reason = "" if why in ("", "none") else f" ({why})"
        if re.match(r"down|fail|not_responding|no_respond|unknown|error", state):
            found[name] = f"node {name} is {state.rstrip('*')}{reason}"
        elif state.endswith("*"):
            found[name] = f"node {name} does not answer Slurm{reason}"
    return found


def _failed_prologs(commands: Commands, job: Job) -> list[str]:
    return sorted({name for name, _, why in _states(commands, job.nodes) if "prolog" in why.lower()})


def _states(commands: Commands, nodes: Sequence[str]) -> list[tuple[str, str, str]]:
    if not nodes:
        return []
    said = commands.run("sinfo", "-h", "-N", "-n", ",".join(sorted(set(nodes))), "-o", "%N|%T|%E", check=False)
    return [
        (name, state, why)
        for name, _, rest in (row.partition("|") for row in said.splitlines())
        for state, _, why in [rest.partition("|")]
    ]


@dataclass(frozen=True)
class SlurmMachine(JoinedMachine):
    job: str = ""
    node: str = ""

    @property
    def shell_command(self) -> str:
        return shlex.join(["srun", f"--jobid={self.job}", f"--nodelist={self.node}", "--overlap", "--pty", "bash"])


def why_gone(commands: Commands, arrivals: Arrivals, machines: Sequence[SlurmMachine]) -> dict[str, str]:
    jobs = {job.id: job for job in jobs_of(commands, arrivals.pool)}
    steps = {id: steps_of(commands, id) for id in {machine.job for machine in machines}}
    down = failed_nodes(commands, [machine.node for machine in machines])
    found: dict[str, str] = {}
    for machine in machines:
        job, place = jobs.get(machine.job), _place(machine)
        if job is not None and job.state in ENDING:  # why it ends is known when it is over
            found[machine.id] = down.get(machine.node) or arrivals.gone(place)
        elif job is None or not job.runs:
            found[machine.id] = why_ended(commands, machine.job, job)
            arrivals.dismiss(place, found[machine.id])  # nothing runs there: nobody waits for it at closing
        elif machine.node in down:
            found[machine.id] = down[machine.node]
        elif place not in steps[machine.job]:
            found[machine.id] = f"its step of job {job.id} has ended on node {machine.node}"
        else:
            found[machine.id] = arrivals.gone(place)
    return found


def end_machines(commands: Commands, arrivals: Arrivals, machines: Sequence[SlurmMachine]) -> None:
    """Cancels the job of a single node, or a step of a larger one. A requeued job would start for nothing."""
    known = {job.id: job for job in jobs_of(commands, arrivals.pool) if not job.over}
    for machine in machines:
        job, place = known.get(machine.job), _place(machine)
        arrivals.dismiss(place)
        if job is not None and (job.count == 1 or job.waits):
            cancel(commands, [job])
        elif job is not None and (step := steps_of(commands, job.id).get(place)):
            commands.run("scancel", step[0], check=False)


def leftovers(job: Job) -> list[Leftover]:
    detail = f"job {job.id}, {job.state.lower()}"
    if not job.nodes:
        return [Leftover(job.pool, job.id, "job", job.state.lower(), expires=job.expires)]
    return [Leftover(job.pool, f"{job.id}/{node}", "machine", detail, expires=job.expires) for node in job.nodes]


def _place(machine: SlurmMachine) -> int:
    assert machine.joined is not None
    return machine.joined.place


class Taken:
    """Nodes of a pool's jobs; thread-safe. Hold `submitting` while submitting."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._starting: dict[str, tuple[str, ...]] = {}  # by jobs: they run, and their steps may not do so yet
        self.submitting = threading.RLock()

    def nodes(self, commands: Commands, but: str = "") -> list[str]:
        """Except those of one job. A waiting job has none."""
        with self.submitting:
            jobs = [job.id for job in jobs_of(commands, self._pool) if job.runs and job.id != but]
            running = [node for job in jobs for _, node in steps_of(commands, job).values()]
            starting = [node for job, nodes in self._starting.items() if job != but for node in nodes]
            return list(dict.fromkeys([*running, *starting]))

    def claim(self, commands: Commands, job: Job) -> list[str]:
        """Returns those that another job already took."""
        with self.submitting:
            known = set(self.nodes(commands, but=job.id))
            lost = [node for node in job.nodes if node in known]
            if not lost:
                self._starting[job.id] = job.nodes
            return lost

    def settle(self, id: str) -> None:
        with self.submitting:
            self._starting.pop(id, None)
