"""Jobs as squeue lists them: states, nodes, and why one waits, in words."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from skyward.machines.names import usable
from skyward.providers.slurm.options import seconds

__all__ = ["ENDING", "FORMAT", "Job", "comment", "expand", "job_name", "never", "parse_jobs", "waiting"]

FORMAT = "%i|%T|%r|%S|%e|%D|%N|%l|%j|%k"
"""What squeue is asked for: the order of `parse_jobs`. Times are seconds since 1970, by SLURM_TIME_FORMAT."""

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
    """A job as Slurm has it."""

    id: str
    state: str
    reason: str = ""
    start: float | None = None
    """When it started, or is expected to start (seconds since 1970)."""
    end: float | None = None
    """When its time is over."""
    count: int = 0
    nodes: tuple[str, ...] = ()
    limit: float = float("inf")
    """Its time limit in seconds."""
    pool: str = ""
    expires: float | None = None
    """When the pool's time is over."""

    @property
    def waits(self) -> bool:
        """Whether it has no nodes yet."""
        return self.state in _WAITING

    @property
    def runs(self) -> bool:
        """Whether its nodes are there."""
        return self.state in _RUNNING

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more."""
        return not self.waits and not self.runs and self.state not in ENDING

    def time_over(self, now: float) -> bool:
        """Whether its time limit is what ended it, or will within a minute."""
        return self.state == "TIMEOUT" or (self.runs and self.end is not None and self.end - now < 60)

    def ended(self) -> str:
        """What became of a job that does not run any more, for people."""
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
    """The name of a pool's jobs."""
    return _NAME + pool


def comment(pool: str, expires: float) -> str:
    """The comment of a pool's jobs: by this, and by their names, they are found without a ledger."""
    return f"skyward pool={pool} expires={expires:.0f}"


def parse_jobs(said: str) -> list[Job]:
    """The jobs of pools in what squeue said with FORMAT; those of somebody else's programs are left out."""
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
    """The names in a list of nodes as Slurm shortens it: "gpu[01-03,7],login" are gpu01, gpu02, gpu03, gpu7, login."""
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
    """Why a job has no nodes yet, in a few words: "waiting: Priority, estimated start 14:20"."""
    text = f"waiting: {_reason(job) or 'Slurm has not said why yet'}"
    if job.state == "CONFIGURING":
        text = "waiting: its nodes are being switched on"
    elif job.state.startswith("REQUEUE"):
        text = f"waiting: the job was put back into the queue ({_reason(job)})"
    if job.start is not None and job.start > now:
        text += f", estimated start {_moment(job.start, now)}"
    return text


def never(job: Job) -> str:
    """Why a job will never start, if that is so, and what to do; empty if it may."""
    reason = _reason(job)
    advice = _NEVER.get(reason) or (_ABOVE_LIMIT if _PER_JOB.fullmatch(reason) else None)
    return f"job {job.id} would never start: {reason}, which means that {advice}." if advice else ""


def _reason(job: Job) -> str:
    """The reason as one word, or as the sentence that it is."""
    text = job.reason.strip("()")
    return text if " " in text else text.split(",")[0]


def _moment(at: float, now: float) -> str:
    here, today = time.localtime(at), time.localtime(now)
    return time.strftime("%H:%M" if here[:3] == today[:3] else "%d %b %H:%M", here)
