"""Opens a pool: machines of a spec that is available, then nodes on them."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from skyward.api.budget import check_price
from skyward.api.context import PoolContext
from skyward.api.image import Image
from skyward.api.plugin import Cluster, Plugin
from skyward.api.provider import Lease, Receipt
from skyward.api.spec import Spec
from skyward.client.futures import UserCode
from skyward.errors import PluginError, PoolClosed
from skyward.machines.acquire import Candidate, Selection, acquire, look, taken
from skyward.machines.watchdog import Watchdog
from skyward.node.run_folder import RUN
from skyward.pool.inspect_socket import StacksSocket
from skyward.pool.lifetime import PoolState
from skyward.transport.payload import Packer

if TYPE_CHECKING:
    from skyward.client.engine import Engine
    from skyward.client.packing import Packing
    from skyward.history.recorder import Recorder
    from skyward.pool.inspect_socket import Summary
    from skyward.setup.fleet import Fleet

__all__ = [
    "Steps",
    "attach_console",
    "enter",
    "get_machines",
    "keep_history",
    "left_by",
    "make_packing",
    "open_nodes",
    "place_nodes",
    "register_joblib",
    "setup_script",
    "stopped_text",
    "transformed",
    "waiting_text",
]


log = logging.getLogger("skyward.pool")


def attach_console(console: bool | str, listen: Callable[..., Callable[[], None]], steps: ExitStack) -> None:
    if console is False:
        return
    from skyward.view.console import attach

    view = attach(console)
    steps.callback(view.close)
    steps.callback(listen(view))


def keep_history(wanted: bool, pool: str, user: UserCode, steps: ExitStack) -> Recorder | None:
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
    keep_receipt: Callable[[Receipt], None],
    watchdog: Watchdog,
    steps: ExitStack,
) -> tuple[PoolContext, Lease]:
    """Of the first available spec; their release is a step on `steps`. `choose` gets each spec before it is tried."""
    if RUN in os.environ:
        return _adopted(base, candidates)
    if len(candidates) > 1 and selection == "cheapest":
        base.report("comparing prices")
        candidates = [prospect.candidate for prospect in look(candidates, "cheapest").prospects]

    def attempt(candidate: Candidate) -> tuple[PoolContext, Lease]:
        choose(candidate)
        context = replace(base, provider=candidate.provider, spec=candidate.spec, nodes=candidate.nodes)
        context = replace(context, image=transformed(base.plugins, base.image, context.cluster))
        if context.image.warm and context.provider.rented:
            context = replace(context, provider=context.provider.warmed(_warm_key(context)))
        context = replace(context, spec=within_budget(context))
        lease = acquire(context, watchdog, steps, keep_receipt)
        if lease.accelerator is not None:  # machines that come later must have the same
            context = replace(context, spec=replace(context.spec, accelerator=lease.accelerator))
        return context, lease

    return taken(candidates, attempt, base.warn)


def within_budget(context: PoolContext) -> Spec:
    """With a life no longer than the budget pays for."""
    if context.budget is None:
        return context.spec
    plan = context.provider.offers(context.spec, context.nodes)
    offers = list(getattr(plan, "offers", plan))
    if not offers:
        return context.spec  # `acquire` says why
    hourly = context.nodes * offers[0].hourly_cost
    check_price(context.budget, hourly, context.provider.name)
    return replace(context.spec, ttl=min(context.spec.ttl, 3600 * context.budget / hourly))


def _adopted(base: PoolContext, candidates: Sequence[Candidate]) -> tuple[PoolContext, Lease]:
    """Of the detached run that this program belongs to. Its steward keeps to the budget."""
    from skyward.setup.adoption import adopt

    def attempt(candidate: Candidate) -> tuple[PoolContext, Lease]:
        context = replace(base, provider=candidate.provider, spec=candidate.spec, nodes=candidate.nodes, budget=None)
        context = replace(context, image=transformed(base.plugins, base.image, context.cluster))
        return context, adopt(context)

    for candidate in candidates[1:]:  # which of them the run has got is known to its steward
        with suppress(PoolClosed):
            return attempt(candidate)
    return attempt(candidates[0])


def open_nodes(
    context: PoolContext,
    lease: Lease,
    watchdog: Watchdog,
    state: PoolState,
    close: Callable[[], None],
    hook_failed: Callable[[PoolContext, Fleet, PluginError], None],
    steps: ExitStack,
) -> Fleet:
    from skyward.setup.fleet import Fleet

    fleet = Fleet(context, lease, plugin_commands(context.plugins, context.cluster), watchdog, steps)
    try:
        fleet.open(max(context.provision_timeout, context.image.bootstrap_timeout))
    except PluginError as exc:
        hook_failed(context, fleet, exc)
        raise
    tell = partial(_summary, context, lease.pool, fleet.engine, state)
    steps.enter_context(StacksSocket(fleet.store.directory, context.name, fleet.engine.stacks, tell, close))
    return fleet


def place_nodes(context: PoolContext, lease: Lease, watchdog: Watchdog, steps: ExitStack) -> Fleet:
    """For a detached run: agents wait for its program, and this process has no engine."""
    from skyward.setup.fleet import Fleet

    fleet = Fleet(context, lease, plugin_commands(context.plugins, context.cluster), watchdog, steps)
    fleet.set_up(max(context.provision_timeout, context.image.bootstrap_timeout))
    return fleet


def make_packing(context: PoolContext, fleet: Fleet, user: UserCode) -> Packing:
    from skyward.client.packing import Packing

    there = [path for greeting in fleet.engine.greetings() for path in greeting.get("path", ())]
    included = [str((Path.cwd() / include).resolve()) for include in context.image.includes]
    return Packing(Packer([*there, *included]), fleet.store, context.local, user)


def setup_script(context: PoolContext) -> str:
    from importlib import metadata

    from skyward.setup.env import script

    image = transformed(context.plugins, context.image, context.cluster)
    return script.script(image, metadata.version("uv"))


def _summary(context: PoolContext, machines: str, engine: Engine, state: PoolState) -> Summary:
    from skyward.pool.inspect_socket import summary_of  # most pools are never asked

    return summary_of(context, machines, engine, state)


def _warm_key(context: PoolContext) -> str:
    from skyward.setup.env.wheel import source_hash

    lock = context.image.lock
    locked = sha256(Path(lock).read_bytes()).hexdigest() if lock is not None and Path(lock).is_file() else ""
    return f"{context.image.environment_hash}-{source_hash()}-{locked}"


def transformed(plugins: Sequence[Plugin], image: Image, cluster: Cluster) -> Image:
    for plugin in plugins:
        if plugin.transform is not None:
            try:
                image = plugin.transform(image, cluster)
            except Exception as exc:
                raise PluginError(plugin.name, "transform", repr(exc)) from exc
            if not isinstance(image, Image):  # pyright: ignore[reportUnnecessaryIsInstance] - plugins may be untyped
                raise PluginError(plugin.name, "transform", f"it gave {image!r}, not a sky.Image")
    return image


def plugin_commands(plugins: Sequence[Plugin], cluster: Cluster) -> dict[str, Sequence[str]]:
    found: dict[str, Sequence[str]] = {}
    for plugin in plugins:
        if plugin.bootstrap is not None:
            try:
                lines = plugin.bootstrap(cluster)
            except Exception as exc:
                raise PluginError(plugin.name, "bootstrap", repr(exc)) from exc
            if isinstance(lines, str) or not all(isinstance(line, str) for line in lines):
                raise PluginError(plugin.name, "bootstrap", f"it gave {lines!r}, not a list of shell lines")
            found[plugin.name] = lines
    return found


def enter(plugins: Sequence[Plugin], pool: Any, cluster: Cluster, stack: ExitStack) -> None:
    for plugin in plugins:
        if plugin.around_client is not None:
            try:
                stack.enter_context(plugin.around_client(pool, cluster))
            except Exception as exc:
                raise PluginError(plugin.name, "around_client", repr(exc)) from exc


def register_joblib() -> None:
    if "joblib" in sys.modules:
        from skyward.plugins._joblib import register

        register()


# The steps by which a pool is closed: each is registered when its part is opened, and they run in reverse.
#
# A Ctrl-C during one step makes the rest quick: `PoolContext.hurried` is true from then on. What a step leaves undone
# is carried out by the watchdog, whose own step comes after those of hosts and machines.


T = TypeVar("T")
P = ParamSpec("P")


class Steps(ExitStack):
    """An ExitStack that notices when the user interrupts a step."""

    def __init__(self, hurry: threading.Event | None = None) -> None:
        super().__init__()
        self._hurry = hurry or threading.Event()

    def callback(self, callback: Callable[P, T], /, *args: P.args, **kwds: P.kwargs) -> Callable[P, T]:
        self._add(lambda *_: bool(callback(*args, **kwds) and False))
        return callback

    def enter_context(self, cm: AbstractContextManager[T, Any]) -> T:
        entered = cm.__enter__()
        self._add(cm.__exit__)
        return entered

    def _add(self, leave: Callable[..., Any]) -> None:
        hurry = self._hurry

        def step(*error: Any) -> Any:
            try:
                return leave(*error)
            except KeyboardInterrupt:
                hurry.set()
                raise

        self.push(step)


def left_by(error: BaseException | None) -> str:
    if error is None:
        return "the block was left"
    return f"the block was left by {'Ctrl-C' if isinstance(error, KeyboardInterrupt) else 'an exception'}"


def waiting_text(calls: int) -> str:
    what, them = ("1 call", "it") if calls == 1 else (f"{calls:,} calls", "them")
    return f"waiting for {what} to end before the pool is closed; Ctrl-C stops {them}."


def stopped_text(calls: int, streams: int, why: str) -> str:
    found = ((calls, "call"), (streams, "stream"))
    counts = [f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in found if count]
    were, they = ("was", "it") if calls + streams == 1 else ("were", "they")
    return f"{' and '.join(counts)} {were} stopped: {why} before {they} ended."
