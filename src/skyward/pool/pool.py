"""The pool: opens things in order, closes them in reverse, and sends calls to nodes.

with sky.ComputePool(nodes=4) as pool:      console, image, machines, environment, nodes, hooks
    train() >> pool                         ... and all of it backwards when the block is left, however it is left
"""

from __future__ import annotations

import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal, TypeVar

from skyward import events
from skyward.accelerators import Accelerator
from skyward.api.compute import checked_retries
from skyward.api.context import PoolContext
from skyward.api.image import Image
from skyward.api.keywords import FOR_POOLS, corrects
from skyward.api.plugin import Plugin
from skyward.api.provider import Provider
from skyward.api.spec import WEEK, Spec, Worker
from skyward.api.targets import enter_target, leave_target
from skyward.client.callbacks import UserCode
from skyward.machines.selection import Candidate, Selection, look
from skyward.machines.watchdog import Watchdog
from skyward.node.shared.names import Collections
from skyward.pool import hooks, lifetime
from skyward.pool.awaiting import AsyncPool
from skyward.pool.calls import Calls
from skyward.pool.closing import Steps
from skyward.pool.facts import Facts
from skyward.pool.files import Files
from skyward.pool.groups import Groups
from skyward.pool.mistakes import Mistakes
from skyward.pool.objects import Objects
from skyward.pool.opening import attach_console, get_machines, keep_history, make_packing, open_nodes, setup_script
from skyward.pool.options import (
    check_limits,
    check_listener,
    checked,
    checked_name,
    checked_plugins,
    checked_replace,
    checked_selection,
    checked_switch,
    chosen_specs,
    chosen_worker,
)
from skyward.pool.recording import Recorded
from skyward.pool.sending import Sender
from skyward.pool.signals import OrderlyExit
from skyward.pool.state import PAGE_NOTICE, PoolState, hear_of
from skyward.transport.culprits import StaysHere

__all__ = ["ComputePool", "plan"]

T = TypeVar("T")


def plan(*specs: Spec, **options: Any) -> Any:
    """What `ComputePool` with the same `specs` and `options` would launch, where and for how much; creates nothing."""
    return ComputePool(*specs, **options).plan()


@corrects(FOR_POOLS)
class ComputePool(Collections, Calls, Groups, Objects, Files, Facts, Recorded, Mistakes, AsyncPool):
    """Machines that exist while the with-block lasts, and take calls: `train(x) >> pool`.

    Args:
        *specs: kinds of machines that would do, as `sky.Spec(...)`; instead of the single options below that a Spec
            has, too. The cheapest that can be had is taken, or with selection="first" the first.
        provider: where machines come from: `sky.Local()`, `sky.SSH(hosts=[...])`, `sky.AWS()`. Default: this computer.
        nodes: how many machines. Default: 1, and with `sky.SSH` all hosts.
        accelerator: what each node has, such as "A100", "A100-80GB" or "H100:8" (eight). Default: none.
        image: Python, packages, variables and files of the nodes, as `sky.Image(...)`. Default: your Python alone.
        plugins: frameworks that are set up on the nodes, as `[sky.plugins.torch()]`. Default: none.
        concurrency: how many calls each process runs at a time, in threads. Default: 1.
        worker: the same in full, such as `sky.Worker(8, executor="process")`; instead of `concurrency`. Default: none.
        name: what the pool is called. Default: made from the program's name.
        vcpus: virtual CPUs that each machine has at least; clouds only. Default: 2, with an accelerator any number.
        memory_gb: memory that each machine has at least, in GB; clouds only. Default: 4, with an accelerator any.
        architecture: "x86_64" or "arm64"; clouds only. Default: "x86_64", with an accelerator either.
        allocation: "spot" machines cost less and may be taken away; "on-demand" ones stay; "spot-if-available" tries
            both in this order; "cheapest" goes by price alone. Default: "spot-if-available".
        selection: which of several specs is tried first: "cheapest" (default) or "first".
        max_hourly_cost: dollars an hour for all nodes together; what costs more is not taken. Default: no limit.
        ttl: seconds after which rented machines end themselves, in use or not. Default: 604800, a week.
        processes_per_node: how many processes each node runs, each of them one rank; "gpu": one for each GPU of the
            node. Default: 1.
        min_nodes: with how many of `nodes` the pool opens if not all can be had; the others join when they come.
            Default: all of them.
        retries: how often a `>>` call is started again after the loss of its node. Default: 3.
        replace: whether another machine takes the place of a lost one. Default: None, which means: of spot machines
            and of machines of a cluster.
        default_compute_timeout: time limit in seconds for calls that have none. Default: None, no limit.
        provision_timeout: seconds until machines have to run, and hosts to be set up. Default: 300.
        max_result_bytes: the largest result that is sent home, in bytes. Default: 2147483648 (2 GiB).
        grace: seconds for a body to end after its time limit, or when the pool closes, before it is killed. Default:
            10.
        stall_timeout: seconds after which a broadcast fails whose ranks all wait for each other; None: never.
            Default: 300.
        console: "live" (a view on the terminal), "plain" (lines), "silent" or False (nothing at all, nor what bodies
            print), "auto" or True: live on a terminal, lines elsewhere. Default: "auto".
        history: whether what happens is kept on this computer, for thirty days. Default: True.
        view: whether the address of the pool's page is printed when it is open. Default: False.
        allow_nested: whether a body may open this pool. Default: False.
    """

    def __init__(
        self,
        *specs: Spec,
        provider: Provider | None = None,
        nodes: int | None = None,
        accelerator: str | Accelerator | None = None,
        image: Image | None = None,
        plugins: Sequence[Plugin] = (),
        concurrency: int | None = None,
        worker: Worker | None = None,
        name: str | None = None,
        vcpus: float | None = None,
        memory_gb: float | None = None,
        architecture: Literal["x86_64", "arm64"] | None = None,
        allocation: Literal["spot", "on-demand", "spot-if-available", "cheapest"] = "spot-if-available",
        selection: Literal["cheapest", "first"] = "cheapest",
        max_hourly_cost: float | None = None,
        ttl: float = WEEK,
        processes_per_node: int | Literal["gpu"] = 1,
        min_nodes: int | None = None,
        retries: int = 3,
        replace: bool | None = None,
        default_compute_timeout: float | None = None,
        provision_timeout: float = 300,
        max_result_bytes: int = 2 << 30,
        grace: float = 10.0,
        stall_timeout: float | None = 300.0,
        console: bool | str = "auto",
        history: bool = True,
        view: bool = False,
        allow_nested: bool = False,
    ) -> None:
        self._candidates = chosen_specs(
            specs,
            provider,
            {
                "accelerator": accelerator,
                "nodes": nodes,
                "vcpus": vcpus,
                "memory_gb": memory_gb,
                "architecture": architecture,
                "allocation": allocation,
                "max_hourly_cost": max_hourly_cost,
                "ttl": ttl,
                "processes_per_node": processes_per_node,
                "min_nodes": min_nodes,
            },
        )
        self._selection: Selection = checked_selection(selection)
        self._take(self._candidates[0])
        self.worker = chosen_worker(concurrency, worker)
        self.image = checked("image", Image() if image is None else image, Image)
        self.plugins = checked_plugins(plugins)
        self.name = checked_name(name)
        check_limits(provision_timeout, grace, max_result_bytes, default_compute_timeout, stall_timeout)
        self._retries, self._timeout, self._grace = checked_retries(retries), default_compute_timeout, grace
        self._patience, self._max_result, self._stall_timeout = provision_timeout, max_result_bytes, stall_timeout
        self._console = checked_switch("console", console, ("auto", "live", "plain", "silent"))
        self._history, self._view = checked_switch("history", history), checked_switch("view", view)
        self._allow_nested = checked_switch("allow_nested", allow_nested)
        self._replace = checked_replace(replace, self._candidates)
        self._user = UserCode()
        self._state = PoolState()
        self._steps: ExitStack = Steps()
        self._hurry = threading.Event()
        self._weak = lifetime.Reference(self)
        self.receipt: object = None
        """What was created, what is confirmed gone and what it cost, once the pool is closed; None where nothing is."""

    @classmethod
    def from_config(
        cls, name: str | None = None, /, *, path: str | os.PathLike[str] | None = None, **options: Any
    ) -> ComputePool:
        """The pool `name` (or the default one) of this project's sky.toml, or of pyproject.toml under [tool.skyward].

        `path` is another file. `options` count before those of the file: `from_config("gpu", nodes=2)`.
        """
        from skyward.pool.settings import pool_options, read_settings

        known = [parameter for parameter in inspect.signature(cls).parameters if parameter != "specs"]
        return cls(**{**pool_options(read_settings(path), name, known), **options})

    def __repr__(self) -> str:
        return f"<ComputePool {self.name} {self._state.now}, {self.nodes} x {self.provider.name}>"

    def _repr_html_(self) -> str:
        from skyward.pool.notebooks import pool_as_html

        return pool_as_html(self)

    # opening and closing

    def __enter__(self) -> ComputePool:
        hear_of(self)
        self._state.begin_opening(self._allow_nested)
        try:
            with Steps(self._hurry) as steps:
                self._open(steps)
                self._steps = steps.pop_all()
        except BaseException:
            self._state.now = "closed"
            raise
        return self

    def _open(self, steps: Steps) -> None:
        """Every step registers how it is undone before the next begins."""
        lifetime.check_threads()
        began = time.monotonic()
        self._hurry.clear()
        steps.enter_context(OrderlyExit())
        steps.enter_context(self._user)
        attach_console(self._console, self.on_event, steps)
        self._recorder = keep_history(self._history, self.name, self._user, steps)
        steps.callback(self._weak.call(ComputePool._tell_closed), began)
        watchdog = steps.enter_context(Watchdog())
        self._take(self._candidates[0])
        self._tell_opening()
        keep_receipt = self._weak.call(ComputePool._keep_receipt)
        context, holding = get_machines(
            self._context(), self._candidates, self._selection, self._choose, keep_receipt, watchdog, steps
        )
        self.spec = context.spec
        steps.callback(lifetime.end, lifetime.begin(self, self._weak.call(ComputePool._after_fork)))
        self._hosts = open_nodes(context, holding, watchdog, self._state, steps)
        self._engine, self._store = self._hosts.engine, self._hosts.store
        packing = make_packing(context, self._hosts, self._user)
        self._sender = Sender(context, self._engine, packing, self._retries, self._timeout)
        self._refs = packing.refs(self._engine)
        clients = self._dask_clients = weakref.WeakSet[Any]()
        steps.callback(lambda: [client.close(timeout=2) for client in list(clients)])
        hooks.enter(self.plugins, self, context.cluster, steps)
        enter_target(self)
        steps.callback(self._weak.call(leave_target))
        hooks.register_joblib()
        self._state.now = "open"
        self._emit(events.PoolOpened(self.name, len(self._hosts.by_node), self.slots, time.monotonic() - began))
        if self._view:
            self._emit(events.Notice(self.name, f"{PAGE_NOTICE}{self.view()}"))
        self._user.listeners.flush()

    def open(self) -> ComputePool:
        """Opens the pool without a with-block, as in notebooks: `pool = sky.ComputePool(...).open()`; see `close`.

        In a notebook the pool is closed when its name is bound to something else.
        """
        from skyward.pool.notebooks import watch

        self.__enter__()
        watch(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        state = self.__dict__.get("_state")
        if state is not None and state.now == "open" and state.is_ours:
            self._weak.renew(self)
            lifetime.drop(self)

    def close(self) -> None:
        """Ends every call and gives everything back; safe to call twice, and from any thread."""
        # closing waits for callbacks and listeners, so they must not wait for it
        if not self._state.begin_closing(waits=not self._user.is_current()):
            return
        self._emit(events.PoolClosing(self.name))
        try:
            self._steps.close()
        except KeyboardInterrupt:
            # Ctrl-C between two steps: the others do not wait; keepers, whose pipes close, and the watchdog do the rest
            self._hurry.set()
            self._steps.close()
            raise
        finally:
            self._state.end_closing()

    def _tell_opening(self) -> None:
        processes = self.spec.processes_per_node
        self._emit(events.PoolOpening(self.name, self.nodes, self.provider.name, processes))

    def _tell_closed(self, began: float) -> None:
        engine = self.__dict__.get("_engine")
        self._emit(events.PoolClosed(self.name, time.monotonic() - began, engine.settled if engine else 0))
        self._user.listeners.flush()  # before the console is taken off
        self._show_end()

    def _take(self, one: Candidate) -> None:
        self.provider, self.spec, self.nodes = one.provider, one.spec, one.nodes

    def _choose(self, candidate: Candidate) -> None:
        """Told before machines of a spec are asked for."""
        if candidate.spec is not self.spec:
            self._take(candidate)
            self._tell_opening()

    def _context(self) -> PoolContext:
        return PoolContext(
            name=self.name,
            provider=self.provider,
            spec=self.spec,
            nodes=self.nodes,
            image=self.image,
            plugins=self.plugins,
            worker=self.worker,
            provision_timeout=self._patience,
            replace=self._replace,
            grace=self._grace,
            max_result=self._max_result,
            stall_timeout=self._stall_timeout,
            emit=self._weak.call(ComputePool._emit),  # listeners may hold the pool, and must not keep it alive
            listening=self._weak.ask(ComputePool._listening),
            hurried=self._hurry.is_set,
        )

    def _keep_receipt(self, receipt: object) -> None:
        self.receipt = receipt
        if receipt is not None:
            self._emit(events.Notice(self.name, str(receipt)))

    def add_packages(self, pip: Sequence[str]) -> tuple[str, ...]:
        """Puts packages (`pip`, as in `Image`) beside those of the nodes; returns the paths where calls find them."""
        self._state.check_open()
        return self._hosts.add_packages(pip)

    def _shared_channel(self) -> Any:
        self._state.check_open()
        return self._engine.shared.channel()

    # events, plans

    def on_event(self, listener: Callable[[events.Event], None]) -> Callable[[], None]:
        """Has `listener` called with every event, in a thread for listeners; returns a function that ends this."""
        check_listener(listener)
        return self._user.listeners.add(listener)

    def plan(self) -> Any:
        """What opening the pool would launch, where and for how much, and what was ruled out; creates nothing.

        With several specs it says which of them is tried first, and why.
        """
        if len(self._candidates) > 1:
            return look(self._candidates, self._selection)
        return self.provider.offers(self.spec, self.nodes)

    def script(self) -> str:
        """The script that sets a machine of this pool up, as it would be run there; for machines reached by ssh."""
        return setup_script(self._context())

    def __reduce__(self) -> Any:
        raise StaysHere("a pool stays in the process that opened it: send calls to it from there, not from a body.")

    def _listening(self) -> object:
        return self._user.listeners.wants()

    def _emit(self, event: events.Event) -> None:
        self._user.listeners.emit(event)

    def _after_fork(self) -> None:
        """In a forked child: closes copies of what belongs to the parent."""
        if "_hosts" in self.__dict__:
            self._hosts.after_fork()
