"""Pools on the test cloud: what a cloud adds to SSH, how many calls it gets, what more nodes cost; asserts nothing.

    sudo .venv/bin/python benchmarks/cloud.py               everything
    sudo .venv/bin/python benchmarks/cloud.py open calls    some of it: nodes open calls hosts

Behind the machines of `open`, `calls` and `hosts` stand network namespaces of this computer (tests/cloud), which share
its cores. Behind those of `nodes` stands nothing: they only take their time to start.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import contest
from contest import Row

import skyward as sky
from skyward.api.spec import Spec
from skyward.machines.ledger import pool_dir
from skyward.providers.aws.provider import AWS
from skyward.testing import Call
from tests.cloud.machines import CACHE, Hosts, specs
from tests.support.cloud import Cloud, Instance
from tests.support.hosts import Network

__all__ = ["main"]

IMAGE = sky.Image(pip=["numpy"])
NODES = 4
BOOTS = (2.0, 6.0)  # seconds that a simulated machine takes to start
STEPS = ("open", "use", "close")


@sky.compute
def nothing() -> None:
    """The least that a call can do."""


class Boots:
    """Hooks of a test cloud: machines behind which nothing stands, each of which takes its own time to start."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = iter(seconds)

    def machine_started(self, instance: Instance) -> None:
        """Says when it will run."""
        instance.running_at = instance.made + next(self._seconds)

    def machine_terminated(self, instance: Instance) -> None:
        """There is nothing to end."""


class RootsHosts(Hosts):
    """Hosts whose shared cache is root's, who logs in to them: root may replace the host key, as on real images."""

    def machine_started(self, instance: Instance) -> None:
        """Boots a host."""
        super().machine_started(instance)
        self.of[instance.id].run(["chown", "root:root", CACHE], user="root")


class Tally:
    """Calls by action, and by what was done meanwhile; a column for each number of nodes."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._seen: dict[str, Counter[str]] = {}

    def add(self, column: str, step: str, calls: list[Call]) -> None:
        """Counts calls, and takes them off the list."""
        counts = self._seen.setdefault(column, Counter())
        counts.update(call.action for call in calls)
        counts[f"= to {step}"] += len(calls)
        calls.clear()

    def total(self, column: str) -> int:
        """All calls of a column."""
        return sum(self._seen[column][f"= to {step}"] for step in STEPS)

    def __str__(self) -> str:
        actions = sorted({action for counts in self._seen.values() for action in counts if action[0] != "="})
        steps = [f"= to {step}" for step in STEPS if any(f"= to {step}" in counts for counts in self._seen.values())]
        columns = self._seen.values()
        head = f"{self._title:<40}" + "".join(f"{column:>8}" for column in self._seen)
        lines = [f"  {name:<38}" + "".join(f"{column[name]:>8}" for column in columns) for name in (*actions, *steps)]
        return "\n".join(["", head, *lines, ""])


class Bench:
    """A test cloud with real hosts behind it."""

    def __init__(self, cloud: Cloud, quick: bool) -> None:
        self.cloud, self.quick, self.rounds = cloud, quick, 1 if quick else 5
        self.running = 0.0
        cloud.on_done = self._note

    def _note(self, call: Call) -> None:
        """The call that launches hosts boots them before it is answered: from then on they count as running."""
        if call.action == "RunInstances":
            self.running = time.perf_counter()

    @property
    def aws(self) -> AWS:
        """The provider."""
        return self.cloud.aws(username="root")

    def pool(self, nodes: int) -> sky.ComputePool:
        """A pool of the cloud's machines."""
        return sky.ComputePool(provider=self.aws, nodes=nodes, image=IMAGE, console=False)

    def opened(self, nodes: int) -> float:
        """Seconds from machines that run to a pool that is open."""
        with self.pool(nodes):
            return time.perf_counter() - self.running

    def opened_with_ssh(self, nodes: int) -> float:
        """Seconds to an open pool when the same machines are given to `sky.SSH` as hosts."""
        held = self.aws.acquire(Spec(nodes=nodes), "hosts")
        try:
            keys, addresses = pool_dir(held.pool), [machine.private_ip for machine in held.machines]
            known = str(keys / "known_hosts")
            provider = sky.SSH(addresses, user="root", key=str(keys / "id_ed25519"), known_hosts=known)
            began = time.perf_counter()
            with sky.ComputePool(provider=provider, image=IMAGE, console=False):
                return time.perf_counter() - began
        finally:
            self.aws.give_back(held.pool)

    def open(self) -> Iterator[Row]:
        """From running machines to an open pool, against a pool of SSH on the same hosts, in turns."""
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(self.rounds):
            ours.append(self.opened(NODES))
            theirs.append(self.opened_with_ssh(NODES))
        middle = [statistics.median(times) for times in (ours, theirs)]
        yield Row(f"running to open, {NODES} machines", middle[0], "SSH on the same hosts", middle[1], "s", at_most=1.2)

    def calls(self) -> Iterator[Row]:
        """Calls to open, use and close a pool."""
        tally, numbers = Tally("calls for a pool, by nodes"), (1, 2, NODES)
        for nodes in numbers:
            self.cloud.calls.clear()
            with self.pool(nodes) as pool:
                tally.add(str(nodes), "open", self.cloud.calls)
                _ = nothing() @ pool
                tally.add(str(nodes), "use", self.cloud.calls)
            tally.add(str(nodes), "close", self.cloud.calls)
        print(tally, flush=True)
        for nodes in numbers:
            few = tally.total(str(numbers[0]))
            yield Row(f"calls for a pool of {nodes}", tally.total(str(nodes)), "for 1", few, "", at_most=1.1)

    def hosts(self) -> Iterator[Row]:
        """From running machines to an open pool, for more and more of them on the same few cores."""
        numbers = (1, 2) if self.quick else (1, 2, 4, 8)
        times = {nodes: statistics.median(self.opened(nodes) for _ in range(self.rounds)) for nodes in numbers}
        for nodes, took in times.items():
            yield Row(f"running to open, {nodes} machines", took, "1 machine", times[1], "s")


def simulated(quick: bool) -> Iterator[Row]:
    """Machines that start after 2 to 6 s: how long until all run, against one that takes 6 s; and the calls for it."""
    tally, times = Tally("calls to get and give back, by machines"), dict[int, float]()
    numbers = (1, 10) if quick else (1, 10, 100)
    with Cloud() as cloud, _environment(cloud.environ):
        cloud.aws().give_back(cloud.aws().acquire(Spec(), "first").pool)  # imports, and moto's own tables
    for nodes in numbers:
        spread = random.Random(nodes)
        boots = [BOOTS[1], *(spread.uniform(*BOOTS) for _ in range(nodes - 1))]
        with Cloud(Boots(boots)) as cloud, _environment(cloud.environ):
            aws = cloud.aws(pace=sky.AWS().pace)
            began = time.perf_counter()
            held = aws.acquire(Spec(nodes=nodes), f"simulated-{nodes}")
            times[nodes] = time.perf_counter() - began
            tally.add(str(nodes), "open", cloud.calls)
            aws.give_back(held.pool)
            tally.add(str(nodes), "close", cloud.calls)
    print(tally, flush=True)
    for nodes, took in times.items():
        yield Row(f"{nodes} simulated machines run", took, "1, as slow as the slowest", times[1], "s", at_most=1.2)
    for nodes in numbers:
        yield Row(f"calls for {nodes}", tally.total(str(nodes)), "for 1", tally.total("1"), "", at_most=1.1)


@contextmanager
def _served(quick: bool) -> Generator[Bench]:
    """A cloud with as many hosts as are ever used at a time, so that every pool gets the same ones."""
    cache = Path(tempfile.mkdtemp(prefix="skyward-bench-"))
    try:
        with Network(specs(cache, 8), internet=True, idle=True) as network:
            hosts = RootsHosts(network, Path(tempfile.mkdtemp(dir=cache)))
            with Cloud(hosts) as cloud, _environment(cloud.environ):
                hosts.end = cloud.end
                yield Bench(cloud, quick)
            hosts.close()
    finally:
        shutil.rmtree(cache, ignore_errors=True)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Generator[None]:
    """The login of a cloud, and a place of its own for ledgers and caches."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as directory:
        places = {"SKYWARD_STATE": f"{directory}/state", "SKYWARD_CACHE": f"{directory}/cache"}
        os.environ.update({**settings, **places})
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def main(argv: Sequence[str]) -> None:
    """Measures what is named, or everything."""
    quick = "--quick" in argv
    names = [name for name in argv if name != "--quick"] or ["nodes", "open", "calls", "hosts"]
    print(contest.HEADER, flush=True)
    if "nodes" in names:
        names.remove("nodes")
        _show(simulated(quick))
    if names:
        with _served(quick) as bench:
            bench.opened(NODES)  # makes the environment, so that the rest finds it
            for name in names:
                _show(getattr(bench, name)())


def _show(rows: Iterator[Row]) -> None:
    for row in rows:
        print(contest.line(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
