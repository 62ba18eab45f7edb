"""Nodes beside the workers of an existing dask cluster.

    workers that the scheduler knows -> places -> an actor on each -> its program joins the pool -> machines

The actor has the program's standard input: when it is dropped, or its worker ends, everything ends. A waiting task
beside it keeps adaptive clusters from taking the worker away.
"""

from __future__ import annotations

import itertools
import math
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from skyward.api.image import check_number, check_one_of
from skyward.api.provider import Availability, Machine, Offer, Provider, Report
from skyward.api.shell import Access
from skyward.api.spec import Spec
from skyward.api.usage_errors import corrects
from skyward.errors import HostUnreachable, InvalidArgument, MissingPackage, NoPlace, PythonMismatch
from skyward.setup.joined.arrivals import Arrivals, JoinedLease, join_program, open_arrivals

__all__ = [
    "Dask",
    "Guest",
    "Per",
    "Place",
    "Worker",
    "connect",
    "free_places",
    "more_tasks",
    "no_more_will_come",
    "release",
]


Per = Literal["machine", "worker"]

_LETTERS = str.maketrans("0123456789", "ghijklmnop")
_MOST_TASKS = 1000
_ENDING = 10.0
_ANSWER = 30.0
_BOOT = """\
import os, sys
program, size = b"", int(sys.argv.pop(1))
while len(program) < size:
    piece = os.read(0, size - len(program)) or sys.exit("the place was given up")
    program += piece
exec(compile(program, "join.py", "exec"), {"__name__": "__main__"})
"""
"""Reads the program from standard input, and the secret after it."""


@dataclass(frozen=True)
class Worker:
    address: str
    host: str
    name: str
    threads: int


@dataclass(frozen=True)
class Place:
    number: int
    worker: Worker
    actor: Any
    task: Any


def free_places(workers: Sequence[Worker], per: Per, taken: Collection[Worker]) -> list[Worker]:
    if per == "worker":
        addresses = {worker.address for worker in taken}
        return [worker for worker in workers if worker.address not in addresses]
    hosts = {worker.host for worker in taken}
    first: dict[str, Worker] = {}
    for worker in workers:
        if worker.host not in hosts:
            first.setdefault(worker.host, worker)
    return list(first.values())


def more_tasks(workers: Sequence[Worker], missing: int, submitted: int) -> int:
    """How many more tasks must wait for an adaptive cluster, which wants a worker per average threads, to start the
    missing workers.
    """
    threads = sum(worker.threads for worker in workers) / len(workers) if workers else 1.0
    return max(0, min(_MOST_TASKS, math.ceil(threads * (len(workers) + missing))) - submitted)


def connect(cluster: Any, security: Any, timeout: float) -> tuple[Any, bool]:
    try:
        from distributed import Client
    except ImportError as exc:
        raise MissingPackage(
            "sky.Dask() needs the package distributed, which is not installed. Run: pip install distributed"
        ) from exc
    if getattr(cluster, "asynchronous", False):
        raise InvalidArgument(
            f"{cluster!r} is asynchronous; sky.Dask() needs one that is not. Give the scheduler's address instead."
        )
    if isinstance(cluster, Client):
        return cluster, False
    options = {"security": security} if security is not None else {}
    try:
        with warnings.catch_warnings():  # what has to be the same is checked
            warnings.filterwarnings("ignore", "Mismatched versions found")
            return Client(cluster, set_as_default=False, timeout=min(timeout, _ANSWER), **options), True
    except (OSError, TypeError, ValueError, RuntimeError) as exc:
        raise HostUnreachable(
            "dask",
            f"the scheduler of {cluster!r} does not accept the connection: {exc}. Check that it runs, that this "
            "computer reaches it, and, if it uses TLS, that security= has the certificates.",
        ) from exc


def no_more_will_come(cluster: Any, per: Per) -> str:
    from distributed import LocalCluster, SpecCluster

    cluster = getattr(cluster, "cluster", None) or cluster  # of a client that was made with it
    if isinstance(cluster, LocalCluster) and per == "machine":
        return 'all workers of a LocalCluster are on one machine: give per="worker" for a node beside each'
    if not isinstance(cluster, SpecCluster) or cluster._adaptive is not None:  # pyright: ignore[reportPrivateUsage] - nothing else says it
        return ""
    if cluster.plan - cluster.observed:  # some that were asked for are on their way
        return ""
    return "the cluster will not start more by itself: call its scale() or adapt(), or ask for fewer nodes"


class Guest:
    def __init__(self, client: Any, own: bool, pool: str) -> None:
        self.client, self._own = client, own
        self.places: dict[int, Place] = {}
        self._ended: dict[int, str] = {}
        self._changed = threading.Condition()
        self.lock = threading.Lock()
        self._tasks = itertools.count()
        self._next = 0
        self._topic = f"skyward-{pool}-{secrets.token_hex(4)}"
        self._actor, self._wait = _actor_class(), _waiting_function()
        client.subscribe_topic(self._topic, self._heard)

    def workers(self) -> list[Worker]:
        found = self.client.scheduler_info(n_workers=-1)["workers"]
        return [
            Worker(address, worker["host"], str(worker["name"]), worker["nthreads"])
            for address, worker in found.items()
            if worker.get("status", "running") == "running"
        ]

    def check_versions(self) -> None:
        seen: dict[str, Any] = self.client.get_versions()
        ours = _minor(seen["client"]["host"]["python"])
        workers: dict[str, Any] = seen["workers"] or {}
        for address, found in workers.items():
            theirs = (
                _minor(found["host"]["python"]) if "host" in found else ours
            )  # one that has just ended says nothing
            if theirs != ours:
                raise PythonMismatch(
                    "dask",
                    f"the worker {address} runs Python {theirs} and this computer {ours}: dask cannot send "
                    "functions from one to the other. Start the workers with the same minor version.",
                )

    def next_number(self) -> int:
        self._next += 1
        return self._next - 1

    def taken(self) -> list[Worker]:
        return [place.worker for place in list(self.places.values()) if not self.lost(place)]

    def start(self, number: int, worker: Worker, program: str, text: str) -> Place:
        pinned = {"workers": [worker.address], "allow_other_workers": False, "pure": False, "priority": 10}
        name = f"{self._topic}-place-{number}"
        arguments = (_BOOT, program.encode(), f"{text}\n".encode(), number, self._topic)
        actor = self.client.submit(self._actor, *arguments, key=name, actor=True, **pinned)
        task = self.client.submit(self._wait, f"{name}-task", True, key=f"{name}-task", **pinned)
        place = self.places[number] = Place(number, worker, actor, task)
        return place

    def wait_for(self, tasks: int) -> list[Any]:
        # dask knows kinds of tasks by the letters of their names, and has seen none of this kind that were short
        kind = "skywardwaits" + "".join(letter for letter in self._topic.translate(_LETTERS) if letter.isalpha())
        keys = [f"{kind}-{next(self._tasks)}" for _ in range(tasks)]
        return [self.client.submit(self._wait, key, False, key=key, pure=False, priority=-1) for key in keys]

    def lost(self, place: Place) -> str:
        worker = f"the dask worker {place.worker.address}"
        if self.places.get(place.number) is not place:
            return f"its place on {worker} was released"
        status = place.actor.status
        if status not in ("finished", "pending"):
            place.task.release()  # else it would wait for a worker that does not come back
        if status == "error":
            text = str(place.actor.exception(timeout=10)).partition("\n")[0]
            return f"{worker} has ended, or was taken away" if "Actor was lost" in text else f"{worker}: {text}"
        if status in ("lost", "cancelled"):
            return f"{worker} was taken away, or the connection to dask's scheduler broke"
        return self._ended.get(place.number, "")

    def drop(self, places: Sequence[Place]) -> None:
        mine = [place for place in places if self.places.pop(place.number, None) is not None]
        started = {place.number for place in mine if place.actor.status == "finished"}
        release([future for place in mine for future in (place.actor, place.task)])
        with self._changed:
            self._changed.wait_for(lambda: started <= self._ended.keys(), _ENDING)

    def close(self) -> None:
        """Gives all places up; may be repeated."""
        self.drop(list(self.places.values()))
        if self._own:
            self.client.close()
        elif self.client.status == "running":
            self.client.unsubscribe_topic(self._topic)

    def _heard(self, event: tuple[float, dict[str, Any]]) -> None:
        message = event[1]
        with self._changed:
            text = f"the joining program ended there (exit status {message['code']})"
            self._ended[message["place"]] = text + (f": {message['said']}" if message["said"] else "")
            self._changed.notify_all()


def release(futures: Sequence[Any]) -> None:
    for future in futures:
        future.release()


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _actor_class() -> type:
    """Made in a function, so that it is sent by value."""

    class SkywardPlace:
        def __init__(self, boot: str, program: bytes, text: bytes, number: int, topic: str) -> None:
            import os
            import subprocess
            import sys
            import tempfile
            import threading

            from dask import config
            from distributed import get_worker

            worker = get_worker()
            # variables that are meant for dask's own Python
            env = {name: value for name, value in os.environ.items() if not name.startswith(("DASK_", "PYTHON"))}
            for setting in ("pre-spawn-environ", "environ"):  # such as OMP_NUM_THREADS=1, meant for dask's tasks
                meant: dict[str, object] = config.get(f"distributed.nanny.{setting}", None) or {}
                for name in [name for name, value in meant.items() if env.get(name) == str(value)]:
                    del env[name]
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the program has ended
            process = subprocess.Popen(
                [sys.executable, "-c", boot, str(len(program)), "--place", str(number), "--stdin"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=env,
                cwd=os.sep,
                start_new_session=True,
            )
            pipe, process.stdin = process.stdin, None
            assert pipe is not None
            self._pipe = pipe
            self._pipe.write(program + text)
            self._pipe.flush()

            def wait() -> None:  # must not know self, which would live as long as the program
                code = process.wait()
                errors.seek(max(0, os.fstat(errors.fileno()).st_size - 2000))
                said = errors.read().decode("utf-8", "replace").strip()
                errors.close()
                worker.log_event(topic, {"place": number, "code": code, "said": said})

            threading.Thread(target=wait, name="skyward-place", daemon=True).start()

    return SkywardPlace


def _waiting_function() -> Callable[[str, bool], None]:
    """A task that waits until nobody needs it. One that `stays` leaves dask's threads to others; adaptive clusters
    never take a worker with such a task, unlike one with an actor alone.
    """

    def wait(key: str, stays: bool) -> None:
        import time

        from distributed import get_worker, secede

        worker = get_worker()
        tasks = worker.state.tasks
        if stays:
            secede()
        while key in tasks and tasks[key].state in ("executing", "long-running"):
            if worker.status.name in ("closing", "closing_gracefully", "closed", "failed"):
                return
            time.sleep(0.1)

    return wait


_POLL = 0.2


@dataclass(frozen=True)
class DaskMachine(Machine):
    place: int = 0
    reason: str = ""

    @property
    def preemptible(self) -> bool:
        return True

    @property
    def gone(self) -> str:
        return self.reason


@corrects(
    {"address": 'the address first: `sky.Dask("tcp://...:8786")`'}, 'sky.Dask(cluster), or sky.Dask("tcp://...:8786")'
)
@dataclass(frozen=True, repr=False)
class Dask(Provider):
    """A dask cluster that you have: nodes run beside its workers, in an environment of their own.

    A pool is a guest there: it shares the machines with everything that dask runs on them.

    Args:
        cluster: a dask cluster, a `Client` (which stays open), or the address of a scheduler.
        per: "machine": one node for each machine that has workers; "worker": one for each worker. Default: "machine".
        security: dask's `Security` for an address with TLS; a cluster or a client has its own. Default: none.
        lease: seconds for which nodes continue without hearing from you; then they end everything. Default: 900.
    """

    cluster: Any
    per: Per = "machine"
    security: Any = field(default=None, repr=False)
    lease: float = 900.0

    def __post_init__(self) -> None:
        check_one_of("per", self.per, get_args(Per))
        check_number("lease", self.lease, whole=False)
        if not self.cluster or isinstance(self.cluster, int | float | list | tuple | dict):
            raise InvalidArgument(
                f"cluster={self.cluster!r}: give a dask cluster, a Client, or the scheduler's address."
            )
        if self.security is not None and not isinstance(self.cluster, str):
            raise InvalidArgument("security= goes with an address; a cluster or a Client brings its own.")

    def __repr__(self) -> str:
        shown = repr(self.cluster) if isinstance(self.cluster, str) else f"<{type(self.cluster).__name__}>"
        settings = [(item.name, getattr(self, item.name), item.default) for item in fields(self) if item.repr][1:]
        return (
            f"Dask({', '.join([shown, *(f'{name}={value!r}' for name, value, usual in settings if value != usual)])})"
        )

    @property
    def access(self) -> Access:
        return Access(self.lease)

    @property
    def elastic(self) -> bool:
        return True

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        place = "a machine with dask workers" if self.per == "machine" else "beside a dask worker"
        return [Offer(f"{place} ({self!r})")]

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        return [Availability("not asked; dask says so when a pool opens") for _ in offers]

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> DaskLease:
        guest = Guest(*connect(self.cluster, self.security, timeout), pool)
        try:
            lease = DaskLease(self, guest, open_arrivals(pool, ttl=spec.ttl, lease=self.lease))
        except BaseException:
            guest.close()
            raise
        try:
            guest.check_versions()
            lease.machines = lease.more(spec, count, timeout, report)
            return lease
        except BaseException:
            lease.close(report)
            raise


class DaskLease(JoinedLease):
    def __init__(self, provider: Dask, guest: Guest, arrivals: Arrivals) -> None:
        super().__init__(provider, arrivals)
        self._dask = provider
        self._guest = guest

    def more(self, spec: Spec, count: int, timeout: float, report: Report) -> tuple[DaskMachine, ...]:
        guest, arrivals, per = self._guest, self.arrivals, self._dask.per
        deadline = time.monotonic() + timeout
        taken: list[Place] = []
        tasks: list[Any] = []
        try:
            while len(taken) < count:
                if why := _first_lost(guest, taken):
                    raise NoPlace(why, ["open the pool again"])
                with guest.lock:  # others may look for places at the same time
                    workers = guest.workers()
                    for worker in free_places(workers, per, guest.taken())[: count - len(taken)]:
                        arrivals.expect([number := guest.next_number()])
                        taken.append(guest.start(number, worker, join_program(), arrivals.text))
                if len(taken) < count:
                    self._wait_for_workers(workers, tasks, len(taken), count, deadline, report)
            release(tasks)  # actors need a thread to start on
            tasks.clear()
            numbers = [place.number for place in taken]
            machines = arrivals.wait(numbers, deadline, report, lambda: _first_lost(guest, taken))
        except BaseException:
            guest.drop(taken)
            raise
        finally:
            release(tasks)
        return tuple(
            DaskMachine(p.worker.address, m.private_ip, m.public_ip, joined=m.joined, place=p.number)
            for m, p in zip(machines, taken, strict=True)
        )

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        return [replace(item, reason=self._gone(item)) if isinstance(item, DaskMachine) else item for item in machines]

    def terminate(self, machines: Sequence[Machine]) -> None:
        numbers = [machine.place for machine in machines if isinstance(machine, DaskMachine)]
        self._guest.drop([place for place in list(self._guest.places.values()) if place.number in numbers])

    def close(self, report: Report) -> object:
        self._guest.close()
        return super().close(report)

    def _wait_for_workers(
        self, workers: Sequence[Worker], tasks: list[Any], found: int, count: int, deadline: float, report: Report
    ) -> None:
        have = f"{found} of {count} nodes have a place on dask's {len(workers)} workers"
        why = no_more_will_come(self._dask.cluster, self._dask.per)
        if why or time.monotonic() > deadline:
            raise NoPlace(have, [why or "no others came in time; start more workers, or raise provision_timeout"])
        report(f"{have}; waiting for more workers")
        tasks += self._guest.wait_for(more_tasks(workers, count - found, len(tasks)))
        time.sleep(_POLL)

    def _gone(self, machine: DaskMachine) -> str:
        place = self._guest.places.get(machine.place)
        if place is None:
            return f"its place on {machine.id} was released"
        return self._guest.lost(place) or self.arrivals.gone(place.number)


def _first_lost(guest: Guest, taken: Sequence[Place]) -> str | None:
    return next((why for place in taken if (why := guest.lost(place))), None)
