"""Nodes of a Ray cluster: a placement group for the pool, and in each of its bundles a machine that connects to us."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

from skyward.api.image import check_number, check_one_of
from skyward.api.provider import Availability, Holding, Leftover, Machine, Offer, Provider, Report
from skyward.api.shell import Access
from skyward.api.spec import Spec
from skyward.api.usage_errors import check_pairs, check_port, corrects
from skyward.errors import InvalidArgument, NotGivenBack, SkywardError
from skyward.machines.ledger import Ledger, pool_dir, read, remove
from skyward.node import join_notice
from skyward.providers.ray.held import HeldPool, RayMachine
from skyward.providers.ray.jobs import (
    REFUSED,
    BesideDriver,
    Driver,
    JobDriver,
    Jobs,
    RayRefused,
    amounts,
    driver_source,
    known_token,
)
from skyward.setup.joined.arrivals import close_arrivals, open_arrivals
from skyward.setup.joined.program import join_program

__all__ = ["Ray", "Strategy", "accelerator_types", "demand", "parse_address"]


_ENDING = 30.0
_TOKEN = "ray-token"
_JOBS_API = ("http://", "https://")
_HELD: dict[str, HeldPool] = {}


@corrects(
    {
        **dict.fromkeys(("num_cpus", "num_gpus", "cpus", "gpus"), '`resources={"CPU": 4, "GPU": 1}`'),
        "nodes": "`sky.ComputePool(provider=sky.Ray(), nodes=4)`",
        "runtime_env": '`sky.ComputePool(provider=sky.Ray(), image=sky.Image(pip=["numpy"], env={"DEBUG": "1"}))`',
    }
)
@dataclass(frozen=True)
class Ray(Provider):
    """Nodes of a Ray cluster, held by a placement group for as long as the pool is open.

    Args:
        address: "http://head:8265", the Jobs API, for which neither Ray nor the cluster's Python is needed here; or,
            on a machine of the cluster that has Ray, "auto" or "head:6379". Default: "auto", what the variables
            RAY_API_SERVER_ADDRESS or RAY_ADDRESS say, else the cluster of this machine.
        resources: what each node asks for, in Ray's words: {"CPU": 4, "GPU": 1}. Default: what `vcpus`, `memory_gb` and
            `accelerator` say, and at least 1 CPU.
        strategy: that of the placement group. Default: "STRICT_SPREAD", every node is another machine.
        token: the cluster's token; "" if it has none. Default: None, it is looked for where Ray's own programs do.
        autoscaling: whether the cluster grows, so that what no node has now is waited for. Default: False.
        lease: how many seconds nodes go on when they hear nothing of us. Default: 900.
        host: the address at which this computer listens for nodes. Default: "", all of its addresses.
        port: the port there. Default: 0, one that is free.
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
        """Whether a job holds the places, which could outlive us; a driver beside us cannot."""
        return self.address.startswith(_JOBS_API)

    @property
    def elastic(self) -> bool:
        return True

    @property
    def access(self) -> Access:
        return Access(lease=self.lease, notices=join_notice.wait)

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        asked = self._demand(spec)
        memory = asked.get("memory")
        return [Offer(f"Ray: {amounts(asked)}", 0.0, asked.get("CPU"), None if memory is None else memory / 1e9)]

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        return [Availability("not asked; Ray says so when a pool opens") for _ in offers]

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Holding:
        try:
            if self.rented:
                self._start_ledger(spec, pool)
            arrivals = open_arrivals(
                pool, ttl=spec.ttl, lease=self.lease, host=self.host, port=self.port, warn=_warning(pool, report)
            )
            _HELD[pool] = HeldPool(arrivals, self.address)
            return self.acquire_more(spec, pool, count, timeout, report)
        except BaseException:
            self.give_back(pool, _ignore)
            raise

    def acquire_more(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Holding:
        held = _HELD.get(pool)
        if held is None:
            raise SkywardError(f"the pool {pool} is not open in this process.")

        def start(first: int) -> Driver:
            return self._start(spec, pool, count, first, held.arrivals.text)

        return Holding(pool, tuple(held.get(count, self._demand(spec), timeout, report, start)))

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        fresh: list[Machine] = []
        for machine in cast("Sequence[RayMachine]", machines):
            assert machine.joined is not None
            held = _HELD.get(machine.joined.pool)
            fresh.append(replace(machine, left="the pool was closed" if held is None else held.gone(machine)))
        return fresh

    def terminate(self, machines: Sequence[Machine]) -> None:
        for machine in cast("Sequence[RayMachine]", machines):
            assert machine.joined is not None
            held = _HELD.get(machine.joined.pool)
            if held is not None:
                held.dismiss(machine)

    def give_back(self, pool: str, report: Report) -> object:
        held = _HELD.pop(pool, None)
        close_arrivals(pool)
        for driver in held.drivers if held is not None else ():
            if isinstance(driver, BesideDriver):
                driver.stop(_ENDING)
        return self._stop_jobs(pool, "" if held is None else held.headless, report) if self.rented else None

    def find(self) -> list[Leftover]:
        if not self.rented:
            return []
        mine = [job for job in self._jobs().listed() if job["metadata"].get("skyward-user") == _user()]
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

    def _start(self, spec: Spec, pool: str, count: int, first: int, text: str) -> Driver:
        order = {
            "pool": pool,
            "text": text,
            "program": join_program(),
            "count": count,
            "first": first,
            "strategy": self.strategy,
            "resources": self._demand(spec),
            "types": accelerator_types(spec),
            "autoscaling": self.autoscaling,
            "address": None if self.rented else self.address,
        }
        if not self.rented:
            return BesideDriver(order)
        ledger = Ledger.held(pool)
        assert ledger is not None
        tags = {
            "skyward": pool,
            "skyward-user": _user(),
            "skyward-expires": f"{ledger.history.metadata['expires']:.0f}",
            "skyward-places": f"{first}-{first + count - 1}",
        }
        jobs = self._jobs()
        package = jobs.upload(driver_source(), order)
        call = ledger.intent("job", address=self.address)
        try:
            id = jobs.submit(package, tags)
        except RayRefused as exc:
            if not exc.unanswered:
                ledger.refused(call, "job", str(exc))
            raise
        ledger.answer(call, "job", id)
        return JobDriver(jobs, id)

    def _start_ledger(self, spec: Spec, pool: str) -> None:
        settings = {"provider": self.name, "address": self.address, "pool": pool, "expires": time.time() + spec.ttl}
        ledger = Ledger.start(pool, settings)
        # whoever ends the pool if we cannot needs the token; the directory is the user's alone
        path = ledger.directory / _TOKEN
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(self._known_token() or "")

    def _stop_jobs(self, pool: str, headless: str, report: Report) -> str | None:
        """Stops the jobs of a pool, those that we know of and those that carry its name, and reads that back.

        If the head is known to be gone, so are its jobs, and that is what is said.
        """
        ledger = Ledger.held(pool) or Ledger.resume(pool)
        history = None if ledger is None else ledger.history
        ids = list(history.left("job")) if history is not None else []
        if ledger is not None and history is not None and not ids and not history.unanswered:
            ledger.remove()  # nothing was ever created
            return None
        receipt = None
        try:
            jobs = self._jobs()
            named = [job["submission_id"] for job in jobs.listed() if job["metadata"]["skyward"] == pool]
            stopped = list(dict.fromkeys([*ids, *named]))
            for id in stopped:
                report(f"stopping the job {id}")
                jobs.stop(id, _ENDING)
                if ledger is not None:
                    ledger.gone("job", id)
            if stopped:
                receipt = f"Ray has ended {', '.join(f'job {id}' for id in stopped)} of pool {pool}."
        except RayRefused as exc:
            if not headless or exc.code != REFUSED:
                if ledger is not None:
                    ledger.let_go()  # so that `sky down` can take it over
                raise NotGivenBack(pool, f"Ray at {self.address}", ids, 0.0, str(exc)) from exc
            receipt = f"{headless}. No job of pool {pool} is left to be stopped."
        if ledger is not None:
            ledger.remove()
        else:
            remove(pool)
        return receipt

    def _jobs(self) -> Jobs:
        return Jobs(self.address, self._known_token(), self.request_timeout)

    def _known_token(self) -> str | None:
        return known_token() if self.token is None else self.token

    def _demand(self, spec: Spec) -> dict[str, float]:
        return demand(dict(cast("Sequence[tuple[str, float]]", self.resources)), spec)


def _warning(pool: str, report: Report) -> Report:
    def warn(text: str) -> None:
        held = _HELD.get(pool)
        if held is None or not held.expected():
            report(text)

    return warn


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
    """Nobody is told."""


Strategy = Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"]


def parse_address(given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        raise InvalidArgument(f'address={given!r} is no address. Write "auto", "http://head:8265" or "head:6379".')
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
        raise InvalidArgument("token= is no token. Leave it out, or give the cluster's.")
