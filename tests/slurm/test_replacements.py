"""Replacements of Slurm's nodes that are asked for at the same moment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from skyward.api.provider import Machine
from skyward.api.spec import Spec
from skyward.providers.slurm.jobs import SlurmMachine
from skyward.providers.slurm.provider import Slurm
from tests.support.slurm import Cluster
from tests.support.waiting import until


def test_two_jobs_that_start_at_the_same_moment_do_not_stay_on_one_node(cluster: Cluster) -> None:
    provider, spec, said = Slurm(), Spec(), list[str]()
    held = provider.acquire(spec, "replacements", 1, 60, said.append)

    def another() -> Machine:
        (machine,) = held.more(spec, 1, 120, said.append)
        return machine

    try:
        with ThreadPoolExecutor() as threads, ExitStack() as away:
            away.enter_context(cluster.down(cluster.nodes[2]))
            with cluster.down(cluster.nodes[1]):
                asked = [threads.submit(another) for _ in range(2)]
                until(lambda: sum(job.endswith("PENDING") for job in cluster.jobs()) == 2, 60, "two jobs that wait")
            # both have room on h2, and no other node
            until(lambda: any("started on h2, where the pool has a node already" in text for text in said), 60, said)
            away.close()
            machines = [*held.machines, *(one.result(120) for one in asked)]
        places = [machine.joined.place for machine in machines if machine.joined is not None]
        assert sorted(machine.node for machine in machines if isinstance(machine, SlurmMachine)) == ["h1", "h2", "h3"]
        assert len(set(places)) == 3
        assert not any(machine.gone for machine in held.refresh(machines))
    finally:
        held.close(said.append)
    assert cluster.jobs() == []
