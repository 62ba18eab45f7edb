"""Nodes of a Ray cluster: a placement group for the pool, and in each bundle a machine that connects to us."""

from __future__ import annotations

import getpass
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

from skyward.api.checks import check_pairs, check_port
from skyward.api.image import check_number, check_one_of
from skyward.api.provider import Availability, Leftover, Machine, Offer, Provider, Report
from skyward.api.shell import Access
from skyward.api.spec import Spec
from skyward.api.usage_errors import corrects
from skyward.errors import BootstrapError, InvalidArgument, NotGivenBack, SkywardError
from skyward.machines.asking import Waiting, ended
from skyward.machines.ledger import History, Ledger, given_back, pool_dir, read
from skyward.node import join_notice
from skyward.node.check_network import addresses
from skyward.providers.ray.jobs import (
    REFUSED,
    BesideDriver,
    Busy,
    Driver,
    JobDriver,
    Jobs,
    NothingFits,
    RayRefused,
    amounts,
    driver_source,
    known_token,
)
from skyward.setup.joined.arrivals import Arrivals, JoinedLease, join_program, open_arrivals
from skyward.setup.joined.members import JoinedMachine

__all__ = ["Ray", "Strategy", "accelerator_types", "demand", "parse_address"]


_ENDING, _REPORTED = 30.0, 2.0
_TOKEN = "ray-token"
_JOBS_API = ("http://", "https://")
_HEADLESS = 20.0
"""Seconds without head and nodes until all nodes are given up."""


@corrects(
    {
        **dict.fromkeys(("num_cpus", "num_gpus", "cpus", "gpus"), '`resources={"CPU": 4, "GPU": 1}`'),
        "nodes": "`sky.ComputePool(provider=sky.Ray(), nodes=4)`",
        "runtime_env": '`sky.ComputePool(provider=sky.Ray(), image=sky.Image(pip=["numpy"], env={"DEBUG": "1"}))`',
    }
)
@dataclass(frozen=True)
class Ray(Provider):
    """Nodes of a Ray cluster, held by a placement group while the pool is open.

    Args:
        address: "http://head:8265", the Jobs API, for which neither Ray nor the cluster's Python is needed here; or,
            on a machine of the cluster that has Ray, "auto" or "head:6379". Default: "auto", what the variables
            RAY_API_SERVER_ADDRESS or RAY_ADDRESS say, else the cluster of this machine.
        resources: what each node asks for, in Ray's words: {"CPU": 4, "GPU": 1}. Default: what `vcpus`, `memory_gb` and
            `accelerator` say, and at least 1 CPU.
        strategy: that of the placement group. Default: "STRICT_SPREAD", every node is another machine.
        token: the cluster's token; "" if it has none. Default: None, it is looked for where Ray's own programs do.
        autoscaling: whether the cluster grows, so that a pool waits for what no node has now. Default: False.
        lease: how many seconds nodes continue without hearing from us. Default: 900.
        host: the address at which this computer listens for nodes. Default: "", all of its addresses.
        port: the port there. Default: 0, any that is free.
        request_timeout: how many seconds one request to the Jobs API may take. Default: 30.
    """

    address: str = "auto"
    resources: Mapping[str, float] | Sequence[tuple[str, float]] = ()
    strategy: Strategy = "STRICT_SPREAD"
    token: str | None = field(default=None, repr=False)
    autoscaling: bool = False
    lease: float = 900.0
    host: str = ""
    port: int = 0
    request_timeout: float = 30.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", parse_address(self.address))
        object.__setattr__(self, "resources", parse_resources(self.resources))
        check_one_of("strategy", self.strategy, get_args(Strategy))
        check_number("lease", self.lease, whole=False)
        check_number("request_timeout", self.request_timeout, whole=False)
        check_token(self.token)
        check_port(self.port)

    @property
    def rented(self) -> bool:
        return self.address.startswith(_JOBS_API)

    @property
    def elastic(self) -> bool:
        return True

    @property
    def access(self) -> Access:
        return Access(lease=self.lease, notices=join_notice.wait)

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        asked = _demand(self, spec)
        memory = asked.get("memory")
        return [Offer(f"Ray: {amounts(asked)}", 0.0, asked.get("CPU"), None if memory is None else memory / 1e9)]

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        return [Availability("not asked; Ray says so when a pool opens") for _ in offers]

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> RayLease:
        ledger = _start_ledger(self, spec, pool) if self.rented else None
        try:
            arrivals = open_arrivals(pool, ttl=spec.ttl, lease=self.lease, host=self.host, port=self.port)
        except BaseException:
            if ledger is not None:
                ledger.remove()
            raise
        lease = RayLease(self, arrivals, ledger)
        # machines are expected that Ray has moved, and that nobody waits for yet
        lease.warn_with(lambda text: None if lease.expected() else report(text))
        try:
            lease.machines = tuple(lease.more(spec, count, timeout, report))
            return lease
        except BaseException:
            lease.close(_ignore)
            raise

    def give_back(self, pool: str, report: Report) -> str | None:
        return _stop_jobs(self, pool, "", report) if self.rented else None

    def find(self) -> list[Leftover]:
        if not self.rented:
            return []
        mine = [job for job in _jobs(self).listed() if job["metadata"].get("skyward-user") == _user()]
        return [
            Leftover(
                pool=job["metadata"]["skyward"],
                id=f"{job['metadata']['skyward']}-{place}",
                detail=f"{job['status'].lower()}, job {job['submission_id']}",
                expires=_number(job["metadata"].get("skyward-expires")),
            )
            for job in mine
            for place in _places(job["metadata"].get("skyward-places", ""))
        ]

    def reopened(self, metadata: Mapping[str, Any]) -> Provider:
        if "address" not in metadata:
            return self
        address: Any = metadata["address"]
        # nobody else has a ledger: the driver beside a program ends with it
        if not isinstance(address, str) or not address.isprintable() or not address.startswith(_JOBS_API):
            raise InvalidArgument(f"the ledger of the pool names no Jobs API of Ray: {address!r}.")
        # a token of this user's variables never goes to an address that only a ledger says
        token = _kept_token(str(metadata.get("pool", "")))
        return replace(self, address=address, token=self.token or token)


@dataclass(frozen=True)
class RayMachine(JoinedMachine):
    turn: int = 0
    """How many machines have had this place before."""

    @property
    def preemptible(self) -> bool:
        return True


@dataclass
class _Place:
    driver: Driver
    bundle: int
    turn: int = 0
    losses: int = 0
    awaited: bool = False


class RayLease(JoinedLease):
    def __init__(self, provider: Ray, arrivals: Arrivals, ledger: Ledger | None) -> None:
        super().__init__(provider, arrivals, ledger)
        self._ray = provider
        self._ledger = ledger
        self._where = provider.address
        self._drivers: list[Driver] = []
        self._places: dict[int, _Place] = {}
        self._next = 0
        self._head = ""
        self._refused: float | None = None
        self.headless = ""
        self._lock = threading.RLock()

    def more(self, spec: Spec, count: int, timeout: float, report: Report) -> Sequence[Machine]:
        """Those that Ray moves after a loss, or new ones."""

        def start(first: int) -> Driver:
            return _start(self._ray, spec, self.pool, self._ledger, count, first, self.arrivals.text)

        return self.get(count, _demand(self._ray, spec), timeout, report, start)

    def get(
        self, count: int, demand: Mapping[str, float], timeout: float, report: Report, start: Callable[[int], Driver]
    ) -> list[RayMachine]:
        """For places that Ray refills after a loss, else new ones from `start`, which gets the first place."""
        deadline = time.monotonic() + timeout
        if self.headless:
            raise SkywardError("the Ray cluster no longer has a head")
        with self._lock:
            lost = [number for number, place in self._places.items() if not place.awaited and self._gone(number, place)]
            moved = len(lost) >= count
            numbers = lost[:count] if moved else list(range(self._next, self._next + count))
            self._next += 0 if moved else count
            for number in numbers if moved else ():
                self._places[number].awaited = True
                self._places[number].turn += 1
        self.arrivals.expect(numbers)
        try:
            if moved:
                driver = self._places[numbers[0]].driver
            else:
                report("asking Ray")
                driver = start(numbers[0])
                self._drivers.append(driver)
            wish, waiting = f"{count} x ({amounts(demand)})", Waiting(timeout, report)
            failed = partial(_look, driver, waiting, self._where, count, wish, moved)
            machines = self.arrivals.wait(numbers, deadline, _ignore, failed)
            with self._lock:
                for bundle, number in enumerate(numbers):
                    place = self._places.setdefault(number, _Place(driver, bundle))
                    seen = place.driver.glance()
                    place.losses, self._head = len(seen.losses.get(place.bundle, ())), seen.head or self._head
            return [self._machine(machine, number) for machine, number in zip(machines, numbers, strict=True)]
        finally:
            with self._lock:
                for number in numbers if moved else ():
                    self._places[number].awaited = False

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        return [replace(m, left=self.gone(m)) if isinstance(m, RayMachine) else m for m in machines]

    def terminate(self, machines: Sequence[Machine]) -> None:
        """A driver whose machines have all gone releases its places."""
        for machine in machines:
            if isinstance(machine, RayMachine):
                self._dismiss(machine)

    def close(self, report: Report) -> object:
        self.arrivals.close()
        for driver in self._drivers:
            if isinstance(driver, BesideDriver):
                driver.stop(_ENDING)
        self.let_go()
        return _stop_jobs(self._ray, self.pool, self.headless, report) if self._ray.rented else None

    def gone(self, machine: RayMachine) -> str:
        assert machine.joined is not None
        place = self._places.get(machine.joined.place)
        if place is None or place.turn != machine.turn:
            return "another machine has its place, or nobody"
        return self._gone(machine.joined.place, place)

    def _dismiss(self, machine: RayMachine) -> None:
        assert machine.joined is not None
        with self._lock:
            place = self._places.get(machine.joined.place)
            if place is None or place.turn != machine.turn:
                return
            del self._places[machine.joined.place]
        self.arrivals.dismiss(machine.joined.place)

    def expected(self) -> bool:
        with self._lock:
            numbers = list(self._places)
        return not all(map(self.arrivals.is_connected, numbers))

    def _gone(self, number: int, place: _Place) -> str:
        if why := self.arrivals.gone(number):
            return why
        seen = place.driver.glance()
        losses = seen.losses.get(place.bundle, ())
        if self._without_head(seen.refused):
            return self.headless
        return losses[-1] if len(losses) > place.losses else seen.ended

    def _without_head(self, refused: bool) -> bool:
        """Its machine refuses us, and no node is connected."""
        if self.headless:
            return True
        if not refused or self._forwarded() or any(map(self.arrivals.is_connected, list(self._places))):
            self._refused = None
            return False
        now = time.monotonic()
        if self._refused is None:
            self._refused = now
            self.arrivals.tell(
                f"the head of the Ray cluster seems to have ended: {self._where} refuses connections, and no node is "
                f"connected. If that lasts for {_HEADLESS:.0f} s, calls on these nodes end with an error."
            )
        if now - self._refused >= _HEADLESS:
            self.headless = (
                f"the head of the Ray cluster has ended, and with it all nodes ({self._where} refuses connections)"
            )
            for number in list(self._places):
                self.arrivals.dismiss(number, self.headless)
        return bool(self.headless)

    def _forwarded(self) -> bool:
        """Whether a local port, which may have ended by itself, forwards to the head."""
        local = urlsplit(self._where).hostname in ("localhost", "127.0.0.1", "::1")
        return local and not self._head.startswith("127.") and self._head not in [entry[1] for entry in addresses()]

    def _machine(self, machine: Machine, number: int) -> RayMachine:
        turn = self._places[number].turn
        id = f"{machine.id}-{turn}" if turn else machine.id
        return RayMachine(id, machine.private_ip, joined=machine.joined, turn=turn)


def _look(driver: Driver, waiting: Waiting, where: str, count: int, wish: str, moved: bool) -> None:
    """Raises if nobody will come any more."""
    found = driver.report()
    if found.infeasible:
        raise NothingFits(wish, where, found.nodes)
    if ended := driver.ended():
        raise SkywardError(f"the nodes on Ray at {where} are not available: {found.failed or ended}")
    if found.hopeless or (found.losses and not moved):
        raise BootstrapError("joining", _not_joined(found.hopeless or next(iter(found.losses.values()))[-1]))
    text = "waiting for Ray to give another machine" if moved else found.progress(count, wish)
    late = BootstrapError("joining", f"provision_timeout= is over. Last seen: {text}.")
    waiting.tell(text, lambda: Busy(wish, found.free or found.nodes) if found.waiting else late)


def _not_joined(why: str) -> str:
    if "cannot be reached" not in why:
        return f"Ray gave a place, and what was started there ended: {why}"
    return (
        f"Ray gave the places, but what runs there cannot connect to this computer: {why}. The nodes "
        "of the cluster must be able to open a connection to here. Run the program on a machine of the cluster or on "
        "one that its nodes reach, say which address and port they reach (host=, port=), or open the firewall."
    )


def _start(ray: Ray, spec: Spec, pool: str, ledger: Ledger | None, count: int, first: int, text: str) -> Driver:
    order = {
        "pool": pool,
        "text": text,
        "program": join_program(),
        "count": count,
        "first": first,
        "strategy": ray.strategy,
        "resources": _demand(ray, spec),
        "types": accelerator_types(spec),
        "autoscaling": ray.autoscaling,
        "address": None if ray.rented else ray.address,
    }
    if ledger is None:
        return BesideDriver(order)
    tags = {
        "skyward": pool,
        "skyward-user": _user(),
        "skyward-expires": f"{ledger.history.metadata['expires']:.0f}",
        "skyward-places": f"{first}-{first + count - 1}",
    }
    jobs = _jobs(ray)
    package = jobs.upload(driver_source(), order)
    id = ledger.create("job", lambda: jobs.submit(package, tags), address=ray.address)
    return JobDriver(jobs, id)


def _start_ledger(ray: Ray, spec: Spec, pool: str) -> Ledger:
    settings = {"provider": ray.name, "address": ray.address, "pool": pool, "expires": time.time() + spec.ttl}
    ledger = Ledger.start(pool, settings)
    # whoever ends the pool if we cannot needs the token; the directory is the user's alone
    path = ledger.directory / _TOKEN
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(_known_token(ray) or "")
    return ledger


def _stop_jobs(ray: Ray, pool: str, headless: str, report: Report) -> str | None:
    """Jobs known or with the pool's name; reads it back. If the head is gone, so are its jobs."""
    with given_back(pool) as ledger:
        history = History(pool) if ledger is None else ledger.history
        ids = list(history.left("job"))
        if ledger is not None and not ids and not history.unanswered:
            return None  # nothing was ever created
        try:
            jobs = _jobs(ray)
            named = [job["submission_id"] for job in jobs.listed() if job["metadata"]["skyward"] == pool]
            stopped = list(dict.fromkeys([*ids, *named]))

            def left(waited: float) -> list[str]:
                return [f"job {id}, {state.lower()}" for id in stopped if (state := jobs.stop(id))]

            ended(pool, f"Ray at {ray.address}", left, _ENDING, _REPORTED, report)
        except RayRefused as exc:
            if not headless or exc.code != REFUSED:
                raise NotGivenBack(pool, f"Ray at {ray.address}", ids, 0.0, str(exc)) from exc
            return f"{headless}. No job of pool {pool} is left to be stopped."
        names = ", ".join(f"job {id}" for id in stopped)
        return f"Ray has ended {names} of pool {pool}." if stopped else None


def _demand(ray: Ray, spec: Spec) -> dict[str, float]:
    return demand(dict(cast("Sequence[tuple[str, float]]", ray.resources)), spec)


def _jobs(ray: Ray) -> Jobs:
    return Jobs(ray.address, _known_token(ray), ray.request_timeout)


def _known_token(ray: Ray) -> str | None:
    return known_token() if ray.token is None else ray.token


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return str(os.getuid())


def _number(text: object) -> float | None:
    try:
        return float(str(text))
    except ValueError:
        return None


def _places(text: str) -> Iterable[int]:
    first, _, last = text.partition("-")
    return range(int(first), int(last) + 1) if first.isdigit() and last.isdigit() and len(last) < 6 else ()


def _kept_token(pool: str) -> str:
    try:
        return (pool_dir(pool) / _TOKEN).read_text() if read(pool) is not None else ""
    except (OSError, InvalidArgument):
        return ""


def _ignore(text: str) -> None:
    """Nobody is told, or somebody else tells more."""


Strategy = Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"]


def parse_address(given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        raise InvalidArgument(f'address={given!r} is not an address. Write "auto", "http://head:8265" or "head:6379".')
    given = given.strip()
    if given == "auto":
        known = (os.environ.get("RAY_API_SERVER_ADDRESS"), os.environ.get("RAY_ADDRESS"))
        given = next((found for found in known if found and found.startswith("http")), "auto")
    if given.startswith("ray://"):
        raise InvalidArgument(
            f"address={given!r} is that of Ray Client, which needs the same Ray and the same Python on both sides, and "
            'is not used here. Give the address of the Jobs API, where Ray\'s dashboard is: "http://<head>:8265".'
        )
    return given.rstrip("/")


def parse_resources(given: object) -> tuple[tuple[str, float], ...]:
    pairs = check_pairs("resources", given, '{"CPU": 4, "GPU": 1}')
    for name, amount in pairs:
        if not isinstance(name, str) or not isinstance(amount, int | float) or isinstance(amount, bool) or amount < 0:
            raise InvalidArgument(
                f'resources: {name!r}: {amount!r} cannot be asked of Ray. Write {{"CPU": 4, "GPU": 1}}.'
            )
    return tuple(sorted((str(name), float(amount)) for name, amount in pairs))


def accelerator_types(spec: Spec) -> list[str]:
    if spec.accelerator is None:
        return []
    name, exact = spec.accelerator.name, f"{spec.accelerator.name}-{spec.accelerator.memory_gb}G"
    return [f"accelerator_type:{kind}" for kind in ((exact,) if spec.accelerator.exact else ()) + (name,)]


def demand(resources: Mapping[str, float], spec: Spec) -> dict[str, float]:
    asked = dict(resources)
    if not asked or spec.vcpus is not None:
        asked.setdefault("CPU", spec.vcpus or 1)
    if spec.memory_gb is not None:
        asked.setdefault("memory", round(spec.memory_gb * 1e9))
    if spec.accelerator is not None and not {"GPU", "TPU", "neuron_cores"} & asked.keys():
        asked["GPU"] = spec.accelerator.count
    return asked


def check_token(token: object) -> None:
    if token is not None and (
        not isinstance(token, str) or not token.isascii() or not token.isprintable() or (token and not token.strip())
    ):
        raise InvalidArgument("token= is not a token. Leave it out, or give the cluster's.")
