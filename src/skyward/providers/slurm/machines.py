"""Nodes of jobs as machines of a pool: which there are, which are gone and why, and how single ones are ended."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyward.api.provider import Leftover, Machine
from skyward.providers.slurm.commands import Commands
from skyward.providers.slurm.jobs import Job
from skyward.providers.slurm.queue import cancel, failed_nodes, jobs_of, steps_of, why_ended

if TYPE_CHECKING:  # imported when a pool is opened
    from skyward.setup.joined.arrivals import Arrivals

__all__ = ["SlurmMachine", "by_pool", "end_machines", "leftovers", "why_gone"]


@dataclass(frozen=True)
class SlurmMachine(Machine):
    """A node of a job."""

    job: str = ""
    node: str = ""
    reason: str = ""
    """Why it is not the pool's any more."""

    @property
    def preemptible(self) -> bool:
        """Slurm may take a node away at any time; where it can, the pool gets another."""
        return True

    @property
    def gone(self) -> str:
        return self.reason

    @property
    def shell_command(self) -> str:
        return shlex.join(["srun", f"--jobid={self.job}", f"--nodelist={self.node}", "--overlap", "--pty", "bash"])


def by_pool(machines: Sequence[Machine]) -> dict[str, list[SlurmMachine]]:
    """Machines of Slurm, by the pools that they belong to."""
    found: dict[str, list[SlurmMachine]] = {}
    for machine in machines:
        if isinstance(machine, SlurmMachine) and machine.joined is not None:
            found.setdefault(machine.joined.pool, []).append(machine)
    return found


def why_gone(commands: Commands, arrivals: Arrivals, machines: Sequence[SlurmMachine]) -> dict[str, str]:
    """Why machines of a pool are gone, by their ids; empty for those that are there."""
    jobs = {job.id: job for job in jobs_of(commands, arrivals.pool)}
    steps = {id: steps_of(commands, id) for id in {machine.job for machine in machines}}
    down = failed_nodes(commands, [machine.node for machine in machines])
    found: dict[str, str] = {}
    for machine in machines:
        job, place = jobs.get(machine.job), _place(machine)
        if job is None or not job.runs:
            found[machine.id] = why_ended(commands, machine.job, job)
        elif machine.node in down:
            found[machine.id] = down[machine.node]
        elif place not in steps[machine.job]:
            found[machine.id] = f"its step of job {job.id} has ended on node {machine.node}"
        else:
            found[machine.id] = arrivals.gone(place)
    return found


def end_machines(commands: Commands, arrivals: Arrivals, machines: Sequence[SlurmMachine]) -> None:
    """Ends some machines of a pool that stays open: the job of a single node, or a step of a larger one."""
    known = {job.id: job for job in jobs_of(commands, arrivals.pool) if not job.over}
    for machine in machines:
        job, place = known.get(machine.job), _place(machine)
        arrivals.dismiss(place)
        if job is not None and job.count == 1:
            cancel(commands, [job])
        elif job is not None and (step := steps_of(commands, job.id).get(place)):
            commands.run("scancel", step[0], check=False)


def leftovers(job: Job) -> list[Leftover]:
    """What a job has: its nodes, or itself while it has none."""
    detail = f"job {job.id}, {job.state.lower()}"
    if not job.nodes:
        return [Leftover(job.pool, job.id, "job", job.state.lower(), expires=job.expires)]
    return [Leftover(job.pool, f"{job.id}/{node}", "machine", detail, expires=job.expires) for node in job.nodes]


def _place(machine: SlurmMachine) -> int:
    assert machine.joined is not None
    return machine.joined.place
