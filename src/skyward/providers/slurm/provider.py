"""Nodes of a Slurm cluster: one job for a pool, one step per node, each of which connects to the client."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

from skyward.api.image import check_number
from skyward.api.provider import Availability, Leftover, Machine, Offer, Provider, Report
from skyward.api.shell import Access, SshTarget
from skyward.api.spec import Spec
from skyward.api.usage_errors import corrects
from skyward.errors import BootstrapError, InvalidArgument, MissingPackage, NoPlace, NotGivenBack
from skyward.machines.ledger import History, Ledger, given_back
from skyward.providers.slurm import notices
from skyward.providers.slurm.commands import Commands, SlurmRefused
from skyward.providers.slurm.jobs import (
    UNANSWERED,
    Job,
    SlurmMachine,
    Taken,
    answered,
    cancel,
    check_wanted,
    comment,
    end,
    end_machines,
    expand,
    granted,
    job_name,
    kill_wait,
    leftovers,
    listed,
    when_started,
    why_ended,
    why_gone,
)
from skyward.providers.slurm.options import (
    SETTINGS,
    VARIABLE,
    batch_script,
    check_setup,
    check_time,
    extra_options,
    gpu_request,
    job_options,
    parse_gpus,
)
from skyward.providers.ssh import login_target
from skyward.setup.joined.arrivals import Arrivals, JoinedLease, join_program, open_arrivals

__all__ = ["Slurm"]

_LOGIN = ("host", "user", "port", "key", "host_keys", "known_hosts", "config")
_NOT_IN_NAMES = " /\\'\"`$;&|<>(){}"
_NOT_REACHED = 'Run the program on a login node, or use sky.Slurm(login="user@login"), which meets them there.'


@corrects(
    {
        "queue": '`partition="..."`',
        **dict.fromkeys(
            ("nodes", "gpus", "accelerator"), '`sky.ComputePool(provider=sky.Slurm(), nodes=4, accelerator="A100")`'
        ),
        **dict.fromkeys(("walltime", "time_limit", "timeout"), '`time="2:00:00"`'),
        "host": '`login="user@login"`',
    }
)
@dataclass(frozen=True, repr=False)
class Slurm(Provider):
    """Nodes of a Slurm cluster, as a job that waits in its queue; used on a login node, or over ssh to one.

    Args:
        partition: where the job is queued. Default: the site's own default, as for all settings here.
        account: which account is charged.
        qos: the quality of service.
        time: the job's time limit as Slurm writes it, "2:00:00" or "1-12:00:00". Without it, the pool's `ttl` is the
            limit if that was given, else the partition's own limit.
        constraint: features that nodes must have.
        gres: what each node must have, such as "gpu:a100:2". Default: what the pool's accelerator needs.
        nodelist: nodes that must be among them; if these are more than the pool asks for, the only ones that may be.
        exclude: nodes that must not.
        login: "user@login" or an SshTarget: the login node on which the commands of Slurm are run. Default: None, this
            computer.
        python: the Python of nodes, by name or path. It joins the pool, and environments are made with it if it has the
            version of this program's. Default: that of this program where nodes have its path, else their python3.
        modules: what each node loads first, ["python/3.11", "cuda"].
        setup: lines of bash that each node runs next, such as "source /sw/env.sh". What both set holds in bodies, too.
        options: further long options of sbatch, {"reservation": "course", "exclusive": True}.
        wait: how many seconds the job may wait in the queue. Default: None, as long as it takes.
        lease: how many seconds nodes continue without hearing from us. Default: 900.
        ssh_timeout: how many seconds the login node may take to let us in. Default: 60.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    constraint: str | None = None
    gres: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    login: str | SshTarget | None = None
    python: str | None = None
    modules: Sequence[str] = ()
    setup: str = ""
    options: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()
    wait: float | None = None
    lease: float = 900.0
    ssh_timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in SETTINGS:
            value = getattr(self, name)
            if (
                value is not None
                and name != "time"
                and (not isinstance(value, str) or not value.isprintable() or not value)
            ):
                raise InvalidArgument(f"{name}={value!r}: expected a text as sbatch takes it, like {name}='...'.")
        if self.time is not None:
            check_time(self.time)
        modules = self.modules.split() if isinstance(self.modules, str) else self.modules
        object.__setattr__(self, "modules", check_setup(self.python, modules, self.setup))
        object.__setattr__(self, "options", extra_options(self.options))
        for name in ("wait", "lease", "ssh_timeout"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), whole=False)
        _ = self._target

    @property
    def access(self) -> Access:
        return Access(lease=self.lease, ssh_timeout=self.ssh_timeout, notices=notices.wait, detaches=True)

    @property
    def rented(self) -> bool:
        return True

    @property
    def elastic(self) -> bool:
        return True

    @property
    def replaces_together(self) -> bool:
        return True  # jobs of one node each could start on one machine, and have to be submitted again then

    # opening

    def offers(self, spec: Spec, count: int) -> Iterable[Offer]:
        commands = self._commands()
        try:
            _gpus(self, commands, spec)
            said = commands.run("sinfo", "-h", *_partition(self), "-o", "%R|%D|%c|%m|%l|%F")
        finally:
            commands.close()
        rows = [row.split("|") for row in said.splitlines() if row.count("|") == 5]
        return [
            Offer(
                f"{name}: {nodes} nodes{_idle(counts)}, time limit {limit}",
                0.0,
                _number(cpus),
                _number(memory, 1 / 1024),
            )
            for name, nodes, cpus, memory, limit, counts in rows
        ]

    def availability(self, offers: Sequence[Offer], count: int) -> list[Availability]:
        return [Availability("a job waits for its turn") for _ in offers]

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> SlurmLease:
        commands = self._commands()
        ledger: Ledger | None = None
        try:
            gpus = _gpus(self, commands, spec)
            grace = kill_wait(commands)
            login = None if self._target is None else _login_record(self._target)
            ledger = Ledger.start(pool, {"provider": self.name, "expires": time.time() + spec.ttl, "login": login})
            hint = "" if self._target else _NOT_REACHED
            arrivals = open_arrivals(pool, ttl=spec.ttl, lease=self.lease, grace=grace, relay=self._target, hint=hint)
        except BaseException:
            commands.close()
            if ledger is not None:
                ledger.remove()
            raise
        lease = SlurmLease(self, arrivals, ledger, commands)
        try:
            machines = lease.job(spec, count, gpus, timeout, report)
            assert machines is not None, "there is no other job of the pool yet"
            lease.machines = machines
            return lease
        except BaseException:
            lease.close(lambda text: None)
            raise

    # closing, and what is left

    def give_back(self, pool: str, report: Report) -> object:
        with given_back(pool) as ledger:
            here = self if ledger is None else self.reopened(ledger.history.metadata)
            commands = here._commands()
            try:
                return _ended(commands, pool, ledger, False, report)
            finally:
                commands.close()

    def find(self) -> list[Leftover]:
        if self._target is None and shutil.which("squeue") is None:
            raise MissingPackage("this computer has no commands of Slurm.")
        commands = self._commands()
        try:
            jobs = [job for job in listed(commands) if not job.over]
        finally:
            commands.close()
        return [item for job in jobs for item in leftovers(job)]

    def reopened(self, metadata: Mapping[str, Any]) -> Slurm:
        login = metadata.get("login")
        return self if login is None else replace(self, login=_recorded_login(login))

    # how

    @property
    def _target(self) -> SshTarget | None:
        return login_target(self.login)

    def _commands(self) -> Commands:
        told = {**_settings(self), "options": dict(self.options), "partitions": "`sinfo -s` lists them"}
        return Commands(self._target, self.ssh_timeout, told)


class SlurmLease(JoinedLease):
    def __init__(self, provider: Slurm, arrivals: Arrivals, ledger: Ledger, commands: Commands) -> None:
        super().__init__(provider, arrivals, ledger)
        self._slurm, self._ledger, self._commands = provider, ledger, commands
        self._taken = Taken(arrivals.pool)

    def more(self, spec: Spec, count: int, timeout: float, report: Report) -> Sequence[Machine]:
        commands = self._commands
        try:
            check_wanted(commands, self.pool, self._ledger.history.made("job"), report)
            gpus = _gpus(self._slurm, commands, spec)
            while (machines := self.job(spec, count, gpus, timeout, report)) is None:
                pass
            return machines
        except SlurmRefused as exc:  # what may pass is tried again
            if exc.kind == "server":
                raise BootstrapError("asking Slurm", str(exc)) from exc
            if exc.kind in ("capacity", "quota"):
                raise NoPlace("Slurm has no other node for this pool now", [str(exc).rstrip(".")]) from exc
            raise

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        reasons = why_gone(self._commands, self.arrivals, [m for m in machines if isinstance(m, SlurmMachine)])
        return [replace(m, left=reasons[m.id]) if isinstance(m, SlurmMachine) else m for m in machines]

    def terminate(self, machines: Sequence[Machine]) -> None:
        end_machines(self._commands, self.arrivals, [m for m in machines if isinstance(m, SlurmMachine)])

    def way_back(self) -> Mapping[str, Any]:
        first, login = cast("SlurmMachine", self.machines[0]), self._commands.login
        return {**({} if login is None else asdict(login)), "job": [first.job, first.node]}

    def keeps(self, directory: str) -> bool:
        look = 'test -d "$1" && echo here'  # the home of many clusters: all nodes and the login node share it
        return bool(self._commands.run("sh", "-c", look, "sh", directory, check=False))

    def leave(self) -> None:
        super().leave()
        self._commands.close()

    def close(self, report: Report) -> object:
        """The nodes' end ends their jobs."""
        self.arrivals.close()
        self.let_go()
        try:
            with given_back(self.pool) as ledger:
                return _ended(self._commands, self.pool, ledger, True, report)
        finally:
            self._commands.close()

    def job(
        self, spec: Spec, count: int, gpus: str | None, timeout: float, report: Report
    ) -> tuple[SlurmMachine, ...] | None:
        """None if it got a node that the pool has, as jobs that start at the same time may."""
        slurm, commands, arrivals = self._slurm, self._commands, self.arrivals
        ledger, taken = self._ledger, self._taken
        with taken.submitting:
            records = ledger.history.records
            first = max((r.data["first"] + r.data["count"] for r in records if "first" in r.data), default=0)
            places = range(first, first + count)
            here = elsewhere(slurm, commands, taken.nodes(commands) if first else [], count)
            arrivals.expect(places)
            report("submitting a job to Slurm")
            script = batch_script(join_program(), first, slurm.python, slurm.modules, slurm.setup)
            options = _options(here, self._ledger, spec, count, gpus)
            submit = partial(commands.submit, options, VARIABLE, arrivals.text, script)
            try:
                id = ledger.create("job", submit, first=first, count=count)
            except SlurmRefused as exc:
                if exc.kind == "capacity" and (hint := other_partitions(here, commands, gpus)):
                    raise SlurmRefused(exc.action, exc.code, f"{exc} {hint}", exc.region, exc.kind) from exc
                raise
        try:
            job = when_started(commands, id, slurm.wait, report)
            self.ends_at = min(self.ends_at, (job.start or time.time()) + job.limit)
            if first and (lost := answered(lambda: taken.claim(commands, job), None, report, f"job {id} has nodes")):
                raise _Occupied(lost)
            got = granted(commands, id, spec)
            report(f"job {id} has {', '.join(job.nodes[:3])}{', ...' if len(job.nodes) > 3 else ''}{got}")
            machines = arrivals.wait(
                places, time.monotonic() + timeout, report, lambda: _failed(commands, id, arrivals.tried)
            )
        except BaseException as exc:
            for place in places:
                arrivals.dismiss(place)
            cancel(commands, [Job(id, "RUNNING")])
            if not isinstance(exc, _Occupied):
                raise
            report(f"job {id} started on {', '.join(exc.nodes)}, where the pool has a node already: asking for others")
            return None
        finally:
            taken.settle(id)
        pairs = zip(machines, job.nodes, strict=True)
        return tuple(SlurmMachine(f"{id}/{node}", joined=machine.joined, job=id, node=node) for machine, node in pairs)


def elsewhere(slurm: Slurm, commands: Commands, taken: Sequence[str], count: int) -> Slurm:
    """Excludes the pool's nodes; if more nodes are named than requested, which sbatch would refuse, all others."""
    wanted, exclude = slurm.nodelist, [*filter(None, [slurm.exclude]), *taken]
    if wanted is not None:
        named = wanted if "/" not in wanted else commands.run("scontrol", "show", "hostlist", wanted)  # a file
        free = [node for node in expand(named.strip()) if node not in taken]
        if len(free) > count:
            wanted = None
            nodes = commands.run("sinfo", "-h", "-N", *_partition(slurm), "-o", "%N").split()
            exclude += [node for node in nodes if node not in free]
        elif taken:
            wanted = ",".join(free) or None
    return replace(slurm, nodelist=wanted, exclude=",".join(dict.fromkeys(exclude)) or None)


def _partition(slurm: Slurm) -> list[str]:
    return [] if slurm.partition is None else ["-p", slurm.partition]


def _settings(slurm: Slurm) -> dict[str, Any]:
    return {name: getattr(slurm, name) for name in SETTINGS}


def _gpus(slurm: Slurm, commands: Commands, spec: Spec) -> str | None:
    if spec.accelerator is None or slurm.gres is not None:
        return slurm.gres
    said = commands.run("sinfo", "-h", *_partition(slurm), "-o", "%D|%G")
    where = f"Slurm's partition {slurm.partition}" if slurm.partition else "Slurm's default partition"
    return gpu_request(spec.accelerator, parse_gpus(said), where)


def other_partitions(slurm: Slurm, commands: Commands, gpus: str | None) -> str:
    """Those that have the GPUs that the default one lacks."""
    if gpus is None or slurm.partition is not None:
        return ""
    rows = [row.partition("|") for row in commands.run("sinfo", "-h", "-o", "%R|%G", check=False).splitlines()]
    kinds = {name: {known.type for known in parse_gpus(f"1|{rest}")} for name, _, rest in rows}
    type = "".join(gpus.split(":")[1:-1])
    having = [name for name, types in kinds.items() if types and (not type or type in types)]
    return f"These partitions have {gpus}: {', '.join(having)}. Give sky.Slurm(partition=...) one." if having else ""


def _options(slurm: Slurm, ledger: Ledger, spec: Spec, count: int, gpus: str | None) -> list[str]:
    expires = float(ledger.history.metadata["expires"])
    options = job_options(_settings(slurm), extra_options(slurm.options), spec, count, gpus)
    return [*options, f"--job-name={job_name(ledger.pool)}", f"--comment={comment(ledger.pool, expires)}"]


def _ended(commands: Commands, pool: str, ledger: Ledger | None, told: bool, report: Report) -> object:
    history = History(pool) if ledger is None else ledger.history
    made = history.made("job")
    if not made and history.certain:
        return None  # no job was ever submitted
    try:
        return end(commands, pool, list(made), told, bool(history.unanswered), report)
    except UNANSWERED as exc:
        jobs = [f"job {id}" for id in history.left("job")]
        raise NotGivenBack(pool, "Slurm's queue", jobs, 0.0, f"Slurm could not be asked: {exc}") from exc


def _failed(commands: Commands, id: str, tried: str) -> str | None:
    try:
        job = next(iter(listed(commands, id)), None)
        return f"{why_ended(commands, id, job, tried)}." if job is None or job.over else None
    except UNANSWERED:
        return None  # asked again


class _Occupied(Exception):
    def __init__(self, nodes: Sequence[str]) -> None:
        super().__init__(nodes)
        self.nodes = nodes


def _number(text: str, factor: float = 1.0) -> float | None:
    digits = text.rstrip("+")
    return float(digits) * factor if digits.isdigit() else None


def _idle(counts: str) -> str:
    parts = counts.split("/")
    return f", {parts[1]} idle" if len(parts) == 4 and parts[1].isdigit() else ""


def _login_record(target: SshTarget) -> dict[str, Any]:
    """Without a command: nobody would run one that a file names."""
    known = asdict(target)
    return {**{name: known[name] for name in _LOGIN}, "proxied": target.proxy is not None}


def _recorded_login(record: object) -> SshTarget:
    told: Mapping[str, Any] = cast("Mapping[str, Any]", record) if isinstance(record, dict) else {}
    if told.get("proxy") or told.get("proxied"):
        raise InvalidArgument(
            "the pool was opened through a proxy command, and commands are not taken from a ledger. Put ProxyCommand "
            "into ~/.ssh/config and open pools without proxy=, or end the job on the login node: scancel."
        )
    host, user, port, key, host_keys, known_hosts, config = (cast(Any, told.get(name)) for name in _LOGIN)
    names = [host, *(value for value in (user, key, known_hosts) if value is not None)]
    if not (
        all(isinstance(name, str) and name and name.isprintable() and not name.startswith("-") for name in names)
        and not any(character in f"{host}{user}" for character in _NOT_IN_NAMES)
        and (port is None or (type(port) is int and 0 < port < 65536))
        and host_keys in ("strict", "accept-new")
        and type(config) is bool
    ):
        raise InvalidArgument(f"the ledger of the pool names no login node: {record!r}.")
    return SshTarget(host, user, port, key, host_keys, known_hosts, config)
