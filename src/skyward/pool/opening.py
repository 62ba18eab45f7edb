"""How a pool is opened, after its options are checked: machines of a spec that is available, then nodes on them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from skyward.api.context import PoolContext
from skyward.api.provider import Holding, Machine
from skyward.client.callbacks import UserCode
from skyward.errors import SkywardError
from skyward.machines.acquire import acquire
from skyward.machines.replacement import Supply
from skyward.machines.selection import Candidate, Selection, look, taken
from skyward.machines.watchdog import Watchdog
from skyward.pool import hooks
from skyward.pool.stacks_socket import StacksSocket
from skyward.pool.state import PoolState
from skyward.transport.payload import Packer

if TYPE_CHECKING:  # imported when a pool is opened
    from skyward.client.engine import Engine
    from skyward.client.packing import Packing
    from skyward.history.recorder import Recorder
    from skyward.pool.summary import Summary
    from skyward.setup.bringup import PoolHosts

__all__ = ["attach_console", "get_machines", "keep_history", "make_packing", "open_nodes", "setup_script"]

log = logging.getLogger("skyward.pool")


def attach_console(console: bool | str, listen: Callable[..., Callable[[], None]], steps: ExitStack) -> None:
    """Shows the pool's events to the user, if they are to be shown."""
    if console is False:
        return
    from skyward.view.console import attach

    view = attach(console)
    steps.callback(view.close)
    steps.callback(listen(view))


def keep_history(wanted: bool, pool: str, user: UserCode, steps: ExitStack) -> Recorder | None:
    """Has the pool's events written to its history, unless they are not to be kept; nothing else depends on it."""
    if not wanted or os.environ.get("SKYWARD_HISTORY", "").lower() in ("off", "0", "no", "false"):
        return None
    from skyward.history.recorder import Recorder

    try:
        recorder = Recorder(pool)
    except OSError as exc:  # a home that cannot be written, or that others have a hand in
        log.warning("no history of this pool is kept: %s", exc)
        return None

    def end() -> None:
        user.listeners.record = user.listeners.record_end = None
        recorder.close()

    user.listeners.record, user.listeners.record_end = recorder.record, recorder.record_end
    steps.callback(end)
    return recorder


def get_machines(
    base: PoolContext,
    candidates: Sequence[Candidate],
    selection: Selection,
    choose: Callable[[Candidate], None],
    keep_receipt: Callable[[object], None],
    watchdog: Watchdog,
    steps: ExitStack,
) -> tuple[PoolContext, Holding]:
    """Machines of the first spec that is available; giving them back is a step on `steps`.

    `choose` is told of each spec before it is tried; `keep_receipt` gets the receipt when machines were given back.
    """
    if len(candidates) > 1 and selection == "cheapest":
        base.report("comparing prices")
        candidates = [prospect.candidate for prospect in look(candidates, "cheapest").prospects]

    def attempt(candidate: Candidate) -> tuple[PoolContext, Holding]:
        choose(candidate)
        context = replace(base, provider=candidate.provider, spec=candidate.spec, nodes=candidate.nodes)
        context = replace(context, image=hooks.transformed(base.plugins, base.image, context.cluster))
        if context.image.warm and context.provider.rented:
            context = replace(context, provider=context.provider.warmed(_warm_key(context)))
        holding = acquire(context, watchdog, steps, keep_receipt)
        if holding.accelerator is not None:  # machines that come later must have the same
            context = replace(context, spec=replace(context.spec, accelerator=holding.accelerator))
        return context, holding

    return taken(candidates, attempt, base.warn)


def open_nodes(
    context: PoolContext, holding: Holding, watchdog: Watchdog, state: PoolState, steps: ExitStack
) -> PoolHosts:
    """Sets the machines up and opens the engine; every node is ready for calls then."""
    from skyward.setup.bringup import PoolHosts
    from skyward.setup.hosts import HostSetup

    commands = hooks.commands(context.plugins, context.cluster)
    supply = Supply(context, holding.pool) if context.provider.elastic else None
    host_setup = HostSetup(context, commands, watchdog, supply, steps)
    hosts = PoolHosts(context, holding.machines, supply, host_setup)
    try:
        hosts.open(steps, max(context.provision_timeout, context.image.bootstrap_timeout))
    except SkywardError as exc:
        if supply is not None:
            _note_lost_machines(exc, supply, holding.machines)
        raise
    tell = partial(_summary, context, holding.pool, hosts.engine, state)
    steps.enter_context(StacksSocket(hosts.store.directory, context.name, hosts.engine.stacks, tell))
    return hosts


def make_packing(context: PoolContext, hosts: PoolHosts, user: UserCode) -> Packing:
    """What turns calls into bytes: modules that nodes can import are sent by name."""
    from skyward.client.packing import Packing

    there = [path for about in hosts.engine.abouts() for path in about.get("path", ())]
    included = [str((Path.cwd() / include).resolve()) for include in context.image.includes]
    return Packing(Packer([*there, *included]), hosts.store, context.local, user)


def setup_script(context: PoolContext) -> str:
    """The script that sets a machine of a pool up."""
    from importlib import metadata

    from skyward.setup.env import script

    image = hooks.transformed(context.plugins, context.image, context.cluster)
    return script.script(image, metadata.version("uv"))


def _summary(context: PoolContext, machines: str, engine: Engine, state: PoolState) -> Summary:
    from skyward.pool.summary import summary_of  # most pools are never asked

    return summary_of(context, machines, engine, state)


def _warm_key(context: PoolContext) -> str:
    """What an environment is known by before it is resolved; a new Skyward makes another."""
    from skyward.setup.env.wheel import source_hash

    lock = context.image.lock
    locked = sha256(Path(lock).read_bytes()).hexdigest() if lock is not None and Path(lock).is_file() else ""
    return f"{context.image.environment_hash}-{source_hash()}-{locked}"


def _note_lost_machines(error: SkywardError, supply: Supply, machines: Sequence[Machine]) -> None:
    """Adds which machines are gone: not the user's fault, if one was taken away while it was set up."""
    try:
        reasons = supply.ended(machines)
    except SkywardError:
        return  # the error stands as it is
    for machine, reason in zip(machines, reasons, strict=True):
        if reason:
            error.add_note(f"{machine.id}: {reason}. Open the pool again for another machine.")
