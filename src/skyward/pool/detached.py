"""Submits a program as a detached run: machines are set up as for any pool, then handed to a steward on node 0.

Each step may be the last one of this process. Before the hand-over, what closes a pool closes this; after it the
steward ends everything unless `go` comes within a minute. So nothing has two owners, or none.
"""

from __future__ import annotations

import base64
import getpass
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyward import events
from skyward.api.secret import revealed
from skyward.errors import BootstrapError, InvalidArgument
from skyward.machines.watchdog import Watchdog
from skyward.node.orders import RunOrder
from skyward.pool import program_imports, run_record
from skyward.pool.budget_watch import draining
from skyward.pool.lifetime import OrderlyExit
from skyward.pool.opening import Steps, attach_console, get_machines, place_nodes
from skyward.pool.run_record import RunRecord, Submission
from skyward.setup.adoption import wanted
from skyward.setup.hosts import LOCAL_LEASE
from skyward.setup.keeper_client import KeeperClient
from skyward.setup.local_shell import inherited
from skyward.transport import private

if TYPE_CHECKING:
    from skyward.api.context import PoolContext
    from skyward.pool.pool import ComputePool
    from skyward.setup.fleet import Fleet

__all__ = ["Program", "ends_at_logout", "submit"]

_ANSWER = 60.0
_GO_WITHIN = 60.0
_MOST_PAYLOAD = 64 << 20


@dataclass(frozen=True)
class Program:
    """What a run executes, with the interpreter of the nodes."""

    module: str
    argv: Sequence[str]
    cwd: str
    title: str
    """What people call it, such as `train.py --epochs 3`."""
    payload: bytes = b""
    """What it reads on its standard input."""
    imports: Sequence[program_imports.Import] = ()
    """What it needs on node 0; looked up there before the run is handed over."""
    path: Sequence[str] = ()
    """Where it looks for modules beside the environment of node 0."""


def submit(pool: ComputePool, name: str, program: Program, *, restarts: int = 0, hold: float = 0.0) -> RunRecord:
    """Gets the pool's machines and starts the program there; when this returns, the run needs this process no more."""
    handing = threading.Event()
    context = replace(pool._context(), handing=handing)  # pyright: ignore[reportPrivateUsage] - same folder
    _refuse(context)
    if len(program.payload) > _MOST_PAYLOAD:
        raise InvalidArgument(
            f"the function and its arguments have {len(program.payload) >> 20:,} MB; a detached run takes "
            f"{_MOST_PAYLOAD >> 20} MB. Have the function read large data from files."
        )
    record = run_record.create(name)
    record.write("submitted", pool=pool.name, program=program.title, provider=context.provider.name)
    try:
        _submit(pool, context, record, program, restarts, hold, handing)
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
    restarts: int,
    hold: float,
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
        fleet = place_nodes(context, lease, watchdog, steps)
        _look_up(context, fleet, program)
        order = _order(context, fleet, record, program, min(deadline, context.ends_at), restarts, hold)
        keeper = fleet.by_node[0].keeper
        assert isinstance(keeper, KeeperClient)
        if why := keeper.hold(order, time.monotonic() + _ANSWER):
            raise BootstrapError("handing the run over", f"{keeper.shell.name} does not hold it: {why}.")
        record.write("handed", folder=order.folder, socket=order.socket, directory=keeper.directory, left=order.left)
        handing.set()
        if why := keeper.go(time.monotonic() + _ANSWER):
            raise BootstrapError("starting the run's program", f"{why}.")
        record.write("running")


def _look_up(context: PoolContext, fleet: Fleet, program: Program) -> None:
    host = fleet.by_node[0]
    context.report("looking up what the program imports")
    for text in program_imports.check(host.keeper.shell, _python(host.env), program.imports, program.path):
        context.warn(text)


def _order(
    context: PoolContext,
    fleet: Fleet,
    record: Submission,
    program: Program,
    deadline: float,
    restarts: int,
    hold: float,
) -> RunOrder:
    host = fleet.by_node[0]
    folder = private.make(record.path, "folder")
    private.make(folder, "results")
    now = time.time()
    agents = [
        {"node": node, "place": [path] if (path := each.keeper.sockets.get(node)) else list(each.keeper.ports[node])}
        for node, each in sorted(fleet.by_node.items())
    ]
    env = {**inherited(os.environ), **host.env, **revealed(context.image.env)}
    return RunOrder(
        folder=str(folder),
        socket=os.path.join(host.keeper.scratch, "steward"),
        argv=[_python(host.env), "-P", "-m", program.module, *program.argv],
        payload=base64.b64encode(program.payload).decode(),
        cwd=program.cwd,
        env=env,
        umask=0o022,  # the keeper names the user's own
        agents=agents,
        here=list(host.nodes),
        identity=None,
        lease=LOCAL_LEASE,
        go_within=_GO_WITHIN,
        left=deadline - now,
        drain=draining(deadline - now),
        grace=context.grace,
        restarts=restarts,
        hold=hold,
        wanted=wanted(context),
        placed=fleet.described(),
        head={"name": record.name, "program": program.title, "pool": context.name, "nodes": context.nodes}
        | {"until": deadline, "provider": context.provider.name, "budget": context.budget},
    )


def _python(env: Mapping[str, str]) -> str:
    home = env.get("VIRTUAL_ENV")
    return str(Path(home, "bin", "python")) if home else sys.executable


def _refuse(context: PoolContext) -> None:
    """What cannot go on without this computer is said before anything is started."""
    if not context.local:
        raise InvalidArgument(
            f"a detached run with {context.provider.name} is not possible yet: it works with sky.Local(). Leave "
            "--detach out, and start the program inside tmux or screen."
        )
    if ends_at_logout():
        raise InvalidArgument(
            "this computer ends what you run when you log out (KillUserProcesses=yes in logind.conf), a detached run "
            "too. Allow it once: `loginctl enable-linger`."
        )


def ends_at_logout(root: Path = Path("/")) -> bool:
    """Whether logind would end a run when its user logs out; `setup/env/scripts/check.sh` asks hosts the same."""
    if not (root / "run/systemd/system").is_dir() or os.geteuid() == 0:  # root's processes are exempt by default
        return False
    folders = [root / "usr/lib/systemd", root / "etc/systemd"]
    files = [folder / "logind.conf" for folder in folders]
    files += [path for folder in folders for path in sorted((folder / "logind.conf.d").glob("*.conf"))]
    texts = "\n".join(path.read_text(errors="replace") for path in files if path.is_file())
    told = re.findall(r"^KillUserProcesses=(\S+)", texts, re.MULTILINE)
    kills = bool(told) and told[-1].lower() in ("yes", "true", "on", "1")
    return kills and not (root / "var/lib/systemd/linger" / getpass.getuser()).exists()
