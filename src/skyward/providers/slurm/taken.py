"""Which nodes the jobs of a pool have: no two nodes of a pool are on one machine, also if jobs start together."""

from __future__ import annotations

import threading

from skyward.providers.slurm.commands import Commands
from skyward.providers.slurm.jobs import Job
from skyward.providers.slurm.queue import jobs_of, steps_of

__all__ = ["Taken"]


class Taken:
    """The nodes of a pool's jobs; usable from many threads. A job is submitted while `submitting` is held."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._starting: dict[str, tuple[str, ...]] = {}  # by jobs: they run, and their steps may not do so yet
        self.submitting = threading.RLock()

    def nodes(self, commands: Commands, but: str = "") -> list[str]:
        """The nodes that are taken now, but by one job. A job that waits has none: where it will run is not known."""
        with self.submitting:
            jobs = [job.id for job in jobs_of(commands, self._pool) if job.runs and job.id != but]
            running = [node for job in jobs for _, node in steps_of(commands, job).values()]
            starting = [node for job, nodes in self._starting.items() if job != but for node in nodes]
            return list(dict.fromkeys([*running, *starting]))

    def claim(self, commands: Commands, job: Job) -> list[str]:
        """Takes the nodes of a job that has just started; those that another job was quicker to take, if there are."""
        with self.submitting:
            known = set(self.nodes(commands, but=job.id))
            lost = [node for node in job.nodes if node in known]
            if not lost:
                self._starting[job.id] = job.nodes
            return lost

    def settle(self, id: str) -> None:
        """The nodes of a job have joined, or will not: from now on its steps tell what it has."""
        with self.submitting:
            self._starting.pop(id, None)
