"""Watching and ending jobs: until one runs, until none is left, and what became of one."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skyward.api.provider import Report
from skyward.errors import BootstrapError, NoCapacity, NotGivenBack
from skyward.providers.slurm.commands import Commands
from skyward.providers.slurm.errors import SlurmRefused
from skyward.providers.slurm.jobs import ENDING, FORMAT, Job, never, parse_jobs, waiting
from skyward.providers.slurm.script import CANNOT_JOIN, NO_PYTHON

__all__ = [
    "Receipt",
    "cancel",
    "end",
    "failed_nodes",
    "jobs_of",
    "kill_wait",
    "listed",
    "pauses",
    "when_started",
    "why_ended",
]

_ENDING = 120.0
_BY_ITSELF = 5.0  # as long as steps may take that were told to end; then they are cancelled
_CERTAIN = 3.0  # a reason is believed once it has stood for so long: Slurm says some of them before it has looked
_CODES = {
    NO_PYTHON: "no node has a Python from 3.8 on: python3 is neither on the path there nor in /usr/bin",
    CANNOT_JOIN: "no node could connect to this computer. Nodes must be able to reach it: run the program on a login "
    'node, or use sky.Slurm(login="user@login"), which meets them there',
}


@dataclass(frozen=True)
class Receipt:
    """Which jobs a pool had: all of them are over, or only Slurm's own clean-up is left of them."""

    pool: str
    jobs: tuple[str, ...]
    rest: tuple[str, ...] = ()
    """Where Slurm still has to clean up, and why it cannot yet."""

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
    """Jobs of this user's pools, or one of them; also those that are over, as long as Slurm knows them."""
    which = ["--me"] if id is None else ["-j", id]
    try:
        return parse_jobs(commands.run("squeue", "-h", "-t", "all", *which, "-o", FORMAT))
    except SlurmRefused as exc:
        if "Invalid job id" in str(exc):
            return []  # it has been over for so long that Slurm has forgotten it
        raise


def jobs_of(commands: Commands, pool: str) -> list[Job]:
    """The jobs of a pool."""
    return [job for job in listed(commands) if job.pool == pool]


def when_started(commands: Commands, id: str, patience: float | None, report: Report) -> Job:
    """The job once it runs; tells why it waits. An error ends the wait if it will never run, or not in time."""
    began, since, last = time.monotonic(), 0.0, ""
    for pause in pauses():
        job = next(iter(listed(commands, id)), None)
        now = time.monotonic()
        if job is None or job.over:
            raise BootstrapError("waiting for nodes", f"{why_ended(commands, id, job)} before it had nodes.")
        if job.runs:
            return job
        why = never(job)
        since = 0.0 if why != last or not why else since or now
        last = why
        if why and since and now - since >= _CERTAIN:
            raise NoCapacity("this pool on Slurm", [why])
        if patience is not None and now - began > patience:
            raise NoCapacity("this pool on Slurm", [f"job {id} was {waiting(job, time.time())} after {patience:.0f} s"])
        report(f"job {id} is {waiting(job, time.time())}")
        time.sleep(min(pause, 1.0) if why else pause)
    raise AssertionError("pauses do not end")


def pauses() -> Iterator[float]:
    """How long to wait between two looks at the queue: seldom, as all users of a cluster ask one controller."""
    began, pause = time.monotonic(), 0.1
    while True:
        yield pause
        waited = time.monotonic() - began
        pause = min(pause * 1.5, 1.0 if waited < 20 else 5.0 if waited < 300 else 15.0)


def cancel(commands: Commands, jobs: Sequence[Job]) -> None:
    """Has Slurm end jobs; those that are over already are no error."""
    for start in range(0, len(jobs), 50):
        commands.run("scancel", *[job.id for job in jobs[start : start + 50]], check=False)


def end(
    commands: Commands, pool: str, known: Sequence[str], told: bool, uncertain: bool, report: Report
) -> Receipt | None:
    """Ends all jobs of a pool, `known` and others, and waits until none is left.

    `told`: its nodes were just told to end, so a job may end by itself. `uncertain`: a job may have been submitted of
    which we know nothing yet.
    """
    began, cancelled, seen = time.monotonic(), set[str](), dict.fromkeys(known)
    for pause in pauses():
        jobs = [job for job in jobs_of(commands, pool) if not job.over]
        seen |= {job.id: None for job in jobs}
        waited = time.monotonic() - began
        if not jobs and not (uncertain and waited < _CERTAIN):
            return Receipt(pool, tuple(seen)) if seen else None
        due = [job for job in jobs if job.id not in cancelled and (job.waits or not told or waited > _BY_ITSELF)]
        if due:
            cancel(commands, due)
            cancelled |= {job.id for job in due}
        if waited > _BY_ITSELF and (rest := _only_clean_up(commands, jobs)):
            return Receipt(pool, tuple(seen), rest)
        if waited > _ENDING:
            states = [f"{job.id} is {job.state.lower()}" for job in jobs]
            states += failed_nodes(commands, [node for job in jobs for node in job.nodes]).values()
            text = f"Slurm was told to end its jobs {waited:.0f} s ago: {', '.join(states)}."
            raise NotGivenBack(pool, commands.where, [f"job {job.id}" for job in jobs], 0.0, text)
        if waited > _BY_ITSELF:
            report(f"waiting for Slurm to end {', '.join(f'job {job.id}' for job in jobs)}")
        time.sleep(pause)
    raise AssertionError("pauses do not end")


def _only_clean_up(commands: Commands, jobs: Sequence[Job]) -> tuple[str, ...]:
    """Which nodes Slurm cannot clean up, if that is all that is left of jobs: then none of them runs anything.

    A step counts until the node itself has told the controller that it has ended, also without its slurmd. Empty if
    anything else is left, or if that is not known.
    """
    if not jobs or any(job.state not in ENDING or not job.nodes for job in jobs):
        return ()
    try:
        if any(steps_of(commands, job.id, check=True) for job in jobs):
            return ()
    except SlurmRefused:
        return ()  # it ended just now, or Slurm does not answer
    nodes = [node for job in jobs for node in job.nodes]
    failed = failed_nodes(commands, nodes)
    return tuple(failed.values()) if set(nodes) <= set(failed) else ()


def why_ended(commands: Commands, id: str, job: Job | None) -> str:
    """What became of a job, with what its script says by its exit code."""
    if job is None:
        return f"job {id} is not known to Slurm any more: it ended, or was removed,"
    if job.state != "FAILED":
        return job.ended()
    said = commands.run("scontrol", "show", "job", "-o", id, check=False)
    code = re.search(r"\bExitCode=(\d+):", said)
    reason = job.reason if job.reason not in ("", "NonZeroExitCode", "RaisedSignal") else ""
    meaning = _CODES.get(int(code[1])) if code else None
    return f"{job.ended()}: {meaning}" if meaning else job.ended() + (f" ({reason})" if reason else "")


def steps_of(commands: Commands, id: str, check: bool = False) -> dict[int, tuple[str, str]]:
    """The steps of a job that run, by the places that they hold: the id of each, and its node."""
    rows = commands.run("squeue", "-h", "-s", "-j", id, "-o", "%i|%N|%j", check=check).splitlines()
    found = [(row.split("|", 2), re.fullmatch(r".*\|place-(\d+)", row)) for row in rows]
    return {int(place[1]): (parts[0], parts[1]) for parts, place in found if place is not None}


def kill_wait(commands: Commands) -> float:
    """How many seconds processes have between SIGTERM and SIGKILL."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", commands.run("scontrol", "show", "config", check=False), re.MULTILINE)
    return float(found[1]) if found else 30.0


def failed_nodes(commands: Commands, nodes: Sequence[str]) -> dict[str, str]:
    """Which of these nodes cannot run anything now, and why, as Slurm knows."""
    said = commands.run("sinfo", "-h", "-N", "-n", ",".join(sorted(set(nodes))), "-o", "%N|%T|%E", check=False)
    found: dict[str, str] = {}
    for row in said.splitlines():
        name, state, why = (*row.split("|", 2), "", "")[:3]
        reason = "" if why in ("", "none") else f" ({why})"
        if re.match(r"down|fail|not_responding|no_respond|unknown|error", state):
            found[name] = f"node {name} is {state.rstrip('*')}{reason}"
        elif state.endswith("*"):
            found[name] = f"node {name} does not answer Slurm{reason}"
    return found
