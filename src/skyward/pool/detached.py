"""Submits a program as a detached run: machines are set up as for any pool, then handed to a steward on node 0.

Any step may be this process's last. Until the hand-over it closes like a pool; then the steward ends everything unless
`go` comes within a minute. So nothing has two owners, or none.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward import events
from skyward.api.image import check_number
from skyward.api.secret import revealed
from skyward.errors import BootstrapError, InvalidArgument
from skyward.machines.acquire import MACHINES, Candidate
from skyward.machines.parallel import each
from skyward.machines.watchdog import Watchdog
from skyward.node.logind import ends_at_logout
from skyward.node.orders import RunOrder
from skyward.node.run_folder import RUN
from skyward.pool import program_imports, run_record
from skyward.pool.budget_watch import draining
from skyward.pool.lifetime import OrderlyExit
from skyward.pool.opening import Steps, attach_console, get_machines, place_nodes
from skyward.pool.run_record import RunRecord, Submission
from skyward.setup.adoption import wanted
from skyward.setup.hosts import LOCAL_LEASE, Host
from skyward.setup.keeper_client import KeeperClient
from skyward.transport.includes import pack
from skyward.transport.roles import CLIENT

if TYPE_CHECKING:
    from skyward.api.context import PoolContext
    from skyward.pool.pool import ComputePool
    from skyward.setup.fleet import Fleet

__all__ = ["AtEnd", "Program", "hand_over", "submit"]

_ANSWER = 60.0
_GO_WITHIN = 60.0
_SOONER = 15.0  # seconds before machines are ended by others
_HOLD = 3600.0  # seconds for which a rented node 0 stays, so that its output and result can be fetched
_HOLD_COPIED = 120.0  # if they are elsewhere: whoever follows the run sees its end
_MOST_PAYLOAD = 64 << 20
_LINGER = (
    "ends what you run when you log out (KillUserProcesses=yes in logind.conf), a detached run too. Allow it once: "
    "`loginctl enable-linger`."
)


@dataclass(frozen=True)
class Program:
    """What a run executes, with the interpreter of the nodes."""

    module: str
    argv: Sequence[str]
    cwd: str
    title: str
    """What people call it, such as `train.py --epochs 3`."""
    payload: bytes = b""
    """Its standard input."""
    imports: Sequence[program_imports.Import] = ()
    """What it needs on node 0; looked up there before the hand-over."""
    path: Sequence[str] = ()
    """Where it looks for modules beside the environment of node 0."""
    files: Sequence[str] = ()
    """What it needs on another machine beside the image's `includes`, relative to its working directory."""


@dataclass(frozen=True)
class AtEnd:
    """What is wanted when the program has ended; see `sky.detach`."""

    restarts: int = 0
    results: str | None = None
    hold: float | None = None


def submit(pool: ComputePool, name: str, program: Program, at_end: AtEnd) -> RunRecord:
    """Gets the machines and starts the program there; on return, the run no longer needs this process."""
    if RUN in os.environ:
        raise InvalidArgument("the program of a detached run cannot submit another run: it has its own machines.")
    handing = threading.Event()
    context = replace(pool._context(), handing=handing)  # pyright: ignore[reportPrivateUsage] - same folder
    _refuse(context, pool._candidates, program)  # pyright: ignore[reportPrivateUsage]
    at_end = _checked(at_end, context, name)
    if len(program.payload) > _MOST_PAYLOAD:
        raise InvalidArgument(
            f"the function and its arguments have {len(program.payload) >> 20:,} MB; a detached run takes "
            f"{_MOST_PAYLOAD >> 20} MB. Have the function read large data from files."
        )
    record = run_record.create(name)
    record.write("submitted", pool=pool.name, program=program.title, provider=context.provider.name)
    try:
        _submit(pool, context, record, program, at_end, handing)
    except BaseException:
        record.close() if handing.is_set() else record.drop()
        raise
    record.close()
    return record


def _submit(
    pool: ComputePool,
    context: PoolContext,
    record: Submission,
    program: Program,
    at_end: AtEnd,
    handing: threading.Event,
) -> None:
    deadline = time.time() + context.spec.ttl
    with Steps() as steps:
        steps.enter_context(OrderlyExit())
        steps.enter_context(pool._user)  # pyright: ignore[reportPrivateUsage]
        attach_console(pool._console, pool.on_event, steps)  # pyright: ignore[reportPrivateUsage]
        watchdog = steps.enter_context(Watchdog())
        context.emit(events.PoolOpening(context.name, context.nodes, context.provider.name, context.spec.processes))
        candidates, selection = pool._candidates, pool._selection  # pyright: ignore[reportPrivateUsage]
        choose = pool._choose  # pyright: ignore[reportPrivateUsage]
        context, lease = get_machines(context, candidates, selection, choose, lambda receipt: None, watchdog, steps)
        target = record.way(lease.way_back())
        fleet = place_nodes(context, lease, watchdog, steps)
        _look_up(context, fleet, program)
        _check_hosts(context, fleet, target or {})
        host, sooner = fleet.by_node[0], lease.ends_at - _SOONER
        hold = copied = 0.0 if at_end.hold is None else at_end.hold
        if not (context.provider.access.stays or lease.keeps(host.keeper.directory)):
            if at_end.hold is None or at_end.results:
                hold = max(hold, _HOLD)  # else output and result would be gone with the machine
            if at_end.hold is None:
                copied = min(hold, _HOLD_COPIED)
            if target and "job" in target and not at_end.results:
                context.warn(
                    f"the files of the run cannot be read where Slurm's commands are ({host.keeper.directory} is not "
                    f"there), so its job stays for up to {hold / 60:.0f} min when the program has ended, until `sky "
                    f"attach {record.name}` has fetched them."
                )
        deadline = min(deadline, sooner)
        until = min(deadline, context.ends_at)
        order = _order(context, fleet, record, program, until, at_end.restarts, hold, target or {})
        order = replace(order, results=at_end.results or "", hold_copied=copied)
        keeper = host.keeper
        assert isinstance(keeper, KeeperClient)
        place = {"folder": order.folder, "socket": order.socket, "python": python_of(host)}
        if target is None and host.machine is not None and host.machine.ssh is not None:
            target = asdict(host.machine.ssh)
        machines = lease.pool if context.provider.rented else None
        limit = f"the time limit of job {target['job'][0]}" if target and "job" in target and deadline == sooner else ""
        handed = {"target": target, "directory": keeper.directory, "left": order.left, "machines": machines}
        kept = {"results": order.results, "hold": copied if order.results else hold}

        def note() -> None:
            record.write("handed", **place, **handed, **kept, limit=limit)
            lease.hand_over(record.name, deadline)

        def release() -> None:
            watchdog.drop(MACHINES)
            fleet.let_go()
            handing.set()

        hand_over(keeper, order, note, release)
        record.write("running")


def hand_over(keeper: KeeperClient, order: RunOrder, note: Callable[[], None], release: Callable[[], None]) -> None:
    """The watchdog has the machines until `release`; then the steward, which ends them unless `go` comes."""
    if why := keeper.hold(order, time.monotonic() + _ANSWER):
        raise BootstrapError("handing the run over", f"{keeper.shell.name} cannot take it: {why}.")
    note()
    release()
    if why := keeper.go(time.monotonic() + _ANSWER):
        raise BootstrapError("starting the run's program", f"{why}.")


def _look_up(context: PoolContext, fleet: Fleet, program: Program) -> None:
    host = fleet.by_node[0]
    context.report("looking up what the program imports")
    for text in program_imports.check(host.keeper.shell, python_of(host), program.imports, program.path):
        context.warn(text)


def _order(
    context: PoolContext,
    fleet: Fleet,
    record: Submission,
    program: Program,
    deadline: float,
    restarts: int,
    hold: float,
    target: Mapping[str, Any],
) -> RunOrder:
    host, now = fleet.by_node[0], time.time()
    folder, env, identity = str(record.path / "folder"), {}, None
    if not context.local:
        cache, _, name = host.keeper.directory.rpartition("/pools/")
        folder = f"{cache}/runs/{name}"
        env = {"SKYWARD_STATE": f"{folder}/state"}
        assert fleet.certificates is not None
        identity = vars(fleet.certificates.authority.issue(CLIENT))
    agents = [
        {"node": node, "place": [path] if (path := each.keeper.sockets.get(node)) else list(each.keeper.ports[node])}
        for node, each in sorted(fleet.by_node.items())
    ]
    return RunOrder(
        folder=folder,
        program="" if context.local else _send_files(context, program, host),
        socket=os.path.join(host.keeper.scratch, "steward"),
        argv=[python_of(host), "-P", "-m", program.module, *program.argv],
        payload=base64.b64encode(program.payload).decode(),
        cwd=program.cwd,
        env={**host.env, **revealed(context.image.env), **env},
        umask=0o022,  # the keeper names the user's own
        agents=agents,
        here=list(host.nodes),
        identity=identity,
        lease=LOCAL_LEASE if context.local else context.access.lease,
        go_within=_GO_WITHIN,
        left=deadline - now,
        drain=draining(deadline - now),
        grace=context.grace,
        restarts=restarts,
        hold=hold,
        wanted=wanted(context),
        placed=fleet.described(),
        head={"name": record.name, "program": program.title, "pool": context.name, "nodes": context.nodes}
        | {"until": deadline, "provider": context.provider.name, "budget": context.budget, "job": target.get("job")}
        | {"python": python_of(host), "prices": list(context.prices)},
        notices=f"{wait.__module__}:{wait.__qualname__}" if (wait := context.access.notices) else "",
    )


def _send_files(context: PoolContext, program: Program, host: Host) -> str:
    """The program's working files, to node 0, as an archive."""
    image = replace(context.image, includes=tuple(dict.fromkeys((*context.image.includes, *program.files))))
    path = f"{host.keeper.directory}/program.tar"
    with tempfile.NamedTemporaryFile(prefix="skyward-program-") as archive:
        pack(image, Path(program.cwd), archive)
        archive.flush()
        context.report(f"sending the program's files ({archive.tell() / 1e6:.1f} MB)", 0)
        host.keeper.shell.upload(Path(archive.name), path)
    return path


def python_of(host: Host) -> str:
    home = host.env.get("VIRTUAL_ENV")
    return str(Path(home, "bin", "python")) if home else sys.executable


def _refuse(context: PoolContext, candidates: Sequence[Candidate], program: Program) -> None:
    """Refuses, before anything is started, what cannot continue without this computer."""
    for provider in (candidate.provider for candidate in candidates):
        # rented machines must be able to end themselves: nobody else may be there to do it
        if not (provider.access.local or provider.access.detaches or provider.access.lease_file):
            raise InvalidArgument(
                f"a detached run with {provider.name} is not possible: it works with sky.Local(), sky.SSH(...), "
                "sky.Join(...), sky.Slurm(), sky.Kubernetes() and sky.AWS(). Leave --detach out, and start the program "
                "in tmux or screen."
            )
    if not context.local:
        if context.min_nodes < context.nodes:
            raise InvalidArgument(
                "a detached run needs all its hosts from the beginning: those that are missing could not be set up "
                "later, without this computer. Leave min_nodes out."
            )
        if outside := [path for path in program.files if path.startswith("..")]:
            raise InvalidArgument(
                f"{outside[0]} lies outside of the working directory {program.cwd}, so it cannot be sent to node 0. "
                "Submit the run from a folder that has all of its files."
            )
    elif ends_at_logout():
        raise InvalidArgument(f"this computer {_LINGER}")


def _checked(at_end: AtEnd, context: PoolContext, name: str) -> AtEnd:
    if at_end.hold is not None:
        check_number("hold", at_end.hold, whole=False)
        if context.provider.access.stays:
            raise InvalidArgument(
                f"hold= is for machines that are let go at the end; with {context.provider.name} a run's files stay "
                "until `sky runs drop`."
            )
    if at_end.results is None:
        return at_end
    place = os.path.abspath(os.path.expanduser(at_end.results)) if context.local else at_end.results
    if not place.startswith(("/", "~/")):
        raise InvalidArgument(f"results={place!r}: expected a path on node 0 that begins with / or ~/.")
    return replace(at_end, results=os.path.join(place, name))


def _check_hosts(context: PoolContext, fleet: Fleet, target: Mapping[str, Any]) -> None:
    """What only the machines can tell; nothing has been handed over yet."""
    if fleet.blocked:
        raise BootstrapError(
            "handing the run over",
            f"the nodes cannot reach each other ({fleet.blocked}), and without this computer calls have no other way. "
            "Open the hosts' firewalls to each other, or use one host.",
        )

    def check(host: Host) -> None:
        shell = host.keeper.shell
        if shell.run([python_of(host), "-P", "-m", "skyward.node.logind"], timeout=_ANSWER).code:
            raise BootstrapError("handing the run over", f"{shell.name} {_LINGER}")

    if not context.local and "job" not in target:  # Slurm ends its jobs by itself
        each(check, list(fleet.by_node.values()))
