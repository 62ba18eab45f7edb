"""Nodes of a Slurm cluster: one job for a pool, one step a node, and each step connects to the client by itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

from skyward.api.image import check_number
from skyward.api.provider import Availability, Holding, Leftover, Machine, Offer, Provider, Report
from skyward.api.shell import Access, SshTarget
from skyward.api.spec import Spec
from skyward.api.usage_errors import corrects
from skyward.errors import BootstrapError, InvalidArgument, MissingPackage, NoPlace, NotGivenBack, SkywardError
from skyward.machines.ledger import History, Ledger, remove
from skyward.providers.slurm import notices
from skyward.providers.slurm.commands import Commands, SlurmRefused
from skyward.providers.slurm.jobs import (
    UNANSWERED,
    Job,
    SlurmMachine,
    Taken,
    answered,
    by_pool,
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
from skyward.providers.ssh import parse_host

__all__ = ["Slurm"]

_LOGIN = ("host", "user", "port", "key", "host_keys", "known_hosts", "config")
_NOT_IN_NAMES = " /\\'\"`$;&|<>(){}"
_NOT_REACHED = 'Run the program on a login node, or use sky.Slurm(login="user@login"), which meets them there.'
_OPEN: dict[str, Commands] = {}
_TAKEN: dict[str, Taken] = {}


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
            limit if that was given, and the partition's own limit if not.
        constraint: features that nodes must have.
        gres: what each node must have, such as "gpu:a100:2"; without it, that follows from the pool's accelerator.
        nodelist: nodes that must be among them; if these are more than the pool asks for, the only ones that may be.
        exclude: nodes that must not.
        login: "user@login" or an SshTarget: the login node on which the commands of Slurm are run. Default: None, this
            computer.
        python: the Python of nodes, by name or path. It joins the pool, and environments are made with it if it has the
            version of this program's. Default: that of this program where nodes have its path, else their python3.
        modules: what each node loads first, ["python/3.11", "cuda"].
        setup: lines of bash that each node runs then, such as "source /sw/env.sh". What both set holds in bodies, too.
        options: further long options of sbatch, {"reservation": "course", "exclusive": True}.
        wait: how many seconds the job may wait in the queue. Default: None, as long as it takes.
        lease: how many seconds nodes go on when they hear nothing of us. Default: 900.
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
                raise InvalidArgument(f"{name}={value!r}: a text as sbatch takes it is wanted, like {name}='...'.")
        if self.time is not None:
            check_time(self.time)
        modules = self.modules.split() if isinstance(self.modules, str) else self.modules
        object.__setattr__(self, "modules", check_setup(self.python, modules, self.setup))
        object.__setattr__(self, "options", extra_options(self.options))
        for name in ("wait", "lease", "ssh_timeout"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), whole=False)
        _ = self._target

    def __repr__(self) -> str:
        shown = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return f"Slurm({', '.join(f'{name}={value!r}' for name, value, default in shown if value != default)})"

    @property
    def access(self) -> Access:
        return Access(lease=self.lease, ssh_timeout=self.ssh_timeout, notices=notices.wait)

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
            self._gpu_request(commands, spec)
            said = commands.run("sinfo", "-h", *self._partition, "-o", "%R|%D|%c|%m|%l|%F")
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

    def acquire(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Holding:
        from skyward.setup.joined.arrivals import close_arrivals, open_arrivals

        commands = self._commands()
        ledger: Ledger | None = None
        try:
            gpus = self._gpu_request(commands, spec)
            expires = time.time() + spec.ttl
            login = None if self._target is None else _login_record(self._target)
            ledger = Ledger.start(pool, {"provider": self.name, "expires": expires, "login": login})
            _OPEN[pool] = commands
            grace = kill_wait(commands)
            hint = "" if self._target else _NOT_REACHED
            open_arrivals(pool, ttl=spec.ttl, lease=self.lease, grace=grace, relay=self._target, hint=hint)
            held = self._job(ledger, commands, spec, count, gpus, timeout, report)
            assert held is not None, "there is no other job of the pool yet"
            return held
        except BaseException:
            close_arrivals(pool)
            if ledger is not None and (ledger.history.made("job") or ledger.history.unanswered):
                self.give_back(pool, lambda text: None)
            else:
                _OPEN.pop(pool, None)
                commands.close()
                if ledger is not None:
                    ledger.remove()
            raise

    def acquire_more(self, spec: Spec, pool: str, count: int, timeout: float, report: Report) -> Holding:
        ledger, commands = Ledger.held(pool), _OPEN.get(pool)
        if ledger is None or commands is None:
            raise InvalidArgument(f"no pool {pool!r} is open in this process, so none can be given more nodes.")
        try:
            check_wanted(commands, pool, ledger.history.made("job"), report)
            gpus = self._gpu_request(commands, spec)
            while True:
                held = self._job(ledger, commands, spec, count, gpus, timeout, report)
                if held is not None:
                    return held
        except SlurmRefused as exc:  # what may pass is tried again
            if exc.kind == "server":
                raise BootstrapError("asking Slurm", str(exc)) from exc
            if exc.kind in ("capacity", "quota"):
                raise NoPlace("Slurm has no other node for this pool now", [str(exc).rstrip(".")]) from exc
            raise

    # while a pool is open

    def refresh(self, machines: Sequence[Machine]) -> list[Machine]:
        from skyward.setup.joined.arrivals import find_arrivals

        reasons: dict[str, str] = {}
        for pool, ours in by_pool(machines).items():
            commands, arrivals = _OPEN.get(pool), find_arrivals(pool)
            if commands is None or arrivals is None:
                reasons |= {machine.id: f"pool {pool} is not open in this process" for machine in ours}
            else:
                reasons |= why_gone(commands, arrivals, ours)
        return [replace(m, reason=reasons[m.id]) if isinstance(m, SlurmMachine) else m for m in machines]

    def terminate(self, machines: Sequence[Machine]) -> None:
        from skyward.setup.joined.arrivals import find_arrivals

        for pool, ours in by_pool(machines).items():
            commands, arrivals = _OPEN.get(pool), find_arrivals(pool)
            if commands is None or arrivals is None:
                raise SkywardError(f"pool {pool} is not open in this process, so its nodes cannot be ended one by one.")
            end_machines(commands, arrivals, ours)

    # closing, and what is left

    def give_back(self, pool: str, report: Report) -> object:
        from skyward.setup.joined.arrivals import close_arrivals

        told = close_arrivals(pool)
        ledger = Ledger.held(pool) or Ledger.resume(pool)
        commands = _OPEN.pop(pool, None)
        _TAKEN.pop(pool, None)
        try:
            here = self if ledger is None or commands is not None else self.reopened(ledger.history.metadata)
            commands = commands or here._commands()
            history = History(pool) if ledger is None else ledger.history
            receipt = end(commands, pool, list(history.made("job")), told, bool(history.unanswered), report)
            remove(pool) if ledger is None else ledger.remove()
            return receipt
        except BaseException as exc:
            if ledger is not None:
                ledger.let_go()  # whoever finishes it has to be able to take it over
            if isinstance(exc, UNANSWERED):
                jobs = [] if ledger is None else [f"job {id}" for id in ledger.history.left("job")]
                raise NotGivenBack(pool, "Slurm's queue", jobs, 0.0, f"Slurm could not be asked: {exc}") from exc
            raise
        finally:
            if commands is not None:
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
        if self.login is None or isinstance(self.login, SshTarget):
            return self.login
        user, host, port = parse_host(self.login)
        return SshTarget(host, user, port)

    @property
    def _partition(self) -> list[str]:
        return [] if self.partition is None else ["-p", self.partition]

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SETTINGS}

    def _elsewhere(self, commands: Commands, taken: Sequence[str], count: int) -> Slurm:
        """This provider without the nodes that the pool has: no two of its nodes are on one machine.

        If more nodes are named than are asked for, which sbatch would refuse, all others are excluded instead.
        """
        wanted, exclude = self.nodelist, [*filter(None, [self.exclude]), *taken]
        if wanted is not None:
            named = wanted if "/" not in wanted else commands.run("scontrol", "show", "hostlist", wanted)  # a file
            free = [node for node in expand(named.strip()) if node not in taken]
            if len(free) > count:
                wanted = None
                nodes = commands.run("sinfo", "-h", "-N", *self._partition, "-o", "%N").split()
                exclude += [node for node in nodes if node not in free]
            elif taken:
                wanted = ",".join(free) or None
        return replace(self, nodelist=wanted, exclude=",".join(dict.fromkeys(exclude)) or None)

    def _commands(self) -> Commands:
        told = {**self._settings, "options": dict(self.options), "partitions": "`sinfo -s` lists them"}
        return Commands(self._target, self.ssh_timeout, told)

    def _gpu_request(self, commands: Commands, spec: Spec) -> str | None:
        if spec.accelerator is None or self.gres is not None:
            return self.gres
        said = commands.run("sinfo", "-h", *self._partition, "-o", "%D|%G")
        where = f"Slurm's partition {self.partition}" if self.partition else "Slurm's default partition"
        return gpu_request(spec.accelerator, parse_gpus(said), where)

    def _other_partitions(self, commands: Commands, gpus: str | None) -> str:
        if gpus is None or self.partition is not None:
            return ""
        rows = [row.partition("|") for row in commands.run("sinfo", "-h", "-o", "%R|%G", check=False).splitlines()]
        kinds = {name: {known.type for known in parse_gpus(f"1|{rest}")} for name, _, rest in rows}
        type = "".join(gpus.split(":")[1:-1])
        having = [name for name, types in kinds.items() if types and (not type or type in types)]
        return (
            f"These partitions have {gpus}: {', '.join(having)}. Give sky.Slurm(partition=...) one." if having else ""
        )

    def _job(
        self,
        ledger: Ledger,
        commands: Commands,
        spec: Spec,
        count: int,
        gpus: str | None,
        timeout: float,
        report: Report,
    ) -> Holding | None:
        """Submits a job, waits until it runs, and until its nodes have connected to us.

        None if it came to a node that the pool has: two jobs that start at the same time may.
        """
        from skyward.setup.joined.arrivals import find_arrivals
        from skyward.setup.joined.program import join_program

        pool, arrivals = ledger.pool, find_arrivals(ledger.pool)
        assert arrivals is not None
        taken = _TAKEN.setdefault(pool, Taken(pool))
        with taken.submitting:
            first = max(
                (r.data["first"] + r.data["count"] for r in ledger.history.records if "first" in r.data), default=0
            )
            places = range(first, first + count)
            here = self._elsewhere(commands, taken.nodes(commands) if first else [], count)
            options = here._options(ledger, spec, count, gpus)
            arrivals.expect(places)
            report("submitting a job to Slurm")
            call = ledger.intent("job", first=first, count=count)
            try:
                script = batch_script(join_program(), first, self.python, self.modules, self.setup)
                id = commands.submit(options, VARIABLE, arrivals.text, script)
            except SlurmRefused as exc:
                if not exc.unanswered:
                    ledger.refused(call, "job", str(exc))
                if exc.kind == "capacity" and (hint := here._other_partitions(commands, gpus)):
                    raise SlurmRefused(exc.action, exc.code, f"{exc} {hint}", exc.region, exc.kind) from exc
                raise
            ledger.answer(call, "job", id)
        try:
            job = when_started(commands, id, self.wait, report)
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
            report(f"job {id} came to {', '.join(exc.nodes)}, where the pool has a node already: asking for others")
            return None
        finally:
            taken.settle(id)
        made = [
            SlurmMachine(f"{id}/{node}", joined=machine.joined, job=id, node=node)
            for machine, node in zip(machines, job.nodes, strict=True)
        ]
        return Holding(pool, tuple(made))

    def _options(self, ledger: Ledger, spec: Spec, count: int, gpus: str | None) -> list[str]:
        expires = float(ledger.history.metadata["expires"])
        options = job_options(self._settings, extra_options(self.options), spec, count, gpus)
        return [*options, f"--job-name={job_name(ledger.pool)}", f"--comment={comment(ledger.pool, expires)}"]


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
    """What a ledger says of the login node: no command, as nobody would run one that a file names."""
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
