"""The pool: opens things in order, closes them in reverse, and sends calls to nodes.

with sky.ComputePool(nodes=4) as pool:      console, image, machines, environment, nodes, hooks
    train() >> pool                         ... and all of it backwards when the block is left, however it is left
"""

from __future__ import annotations

import errno
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Never, Self, TypeVar, TypeVarTuple, Unpack, cast, overload

from skyward import events
from skyward.accelerators import Accelerator
from skyward.api.checks import check_path, check_switches
from skyward.api.compute import (
    Compute,
    GroupOptions,
    PendingCompute,
    PendingComputeGroup,
    PendingStream,
    as_compute,
    checked_retries,
    enter_target,
    leave_target,
    resume_options,
)
from skyward.api.context import PoolContext
from skyward.api.futures import AwaitableFuture, Stream, Untyped
from skyward.api.html import PageAddress
from skyward.api.image import Image
from skyward.api.plugin import Plugin
from skyward.api.provider import Provider, Receipt
from skyward.api.ref import Ref
from skyward.api.spec import WEEK, Spec, Worker
from skyward.api.stacks import Stacks
from skyward.api.usage_errors import FOR_GROUPS, FOR_POOLS, corrects, corrects_call, deprecated, hide_frames
from skyward.client import gather
from skyward.client.futures import UserCode, when_done
from skyward.client.gather import GroupCounter
from skyward.errors import InvalidArgument, TransferError
from skyward.machines.acquire import Candidate, Selection, look
from skyward.machines.offers import Offers, Planned
from skyward.machines.parallel import each
from skyward.machines.watchdog import Watchdog
from skyward.node.shared.names import Collections
from skyward.pool import lifetime, opening
from skyward.pool.budget_watch import BudgetWatch, of_budget
from skyward.pool.failures import keep_failed_calls
from skyward.pool.lifetime import PAGE_NOTICE, OrderlyExit, PoolState, notify_watchers
from skyward.pool.mistakes import Mistakes, called_like_an_executor, for_awaiting, not_mapped, not_put
from skyward.pool.opening import (
    Steps,
    attach_console,
    get_machines,
    keep_history,
    left_by,
    make_packing,
    open_nodes,
    setup_script,
    stopped_text,
    waiting_text,
)
from skyward.pool.options import (
    check_limits,
    check_listener,
    checked,
    checked_budget,
    checked_group,
    checked_name,
    checked_plugins,
    checked_replace,
    checked_replay_limit,
    checked_selection,
    checked_switch,
    chosen_specs,
    chosen_worker,
)
from skyward.pool.sending import Sender
from skyward.transport.backoff import backoff
from skyward.transport.pickle_errors import StaysHere

if TYPE_CHECKING:
    from distributed import Client

    from skyward.api.compute import PendingKept, Resume
    from skyward.api.spec import Transfer
    from skyward.client.files import Begin
    from skyward.client.gather import PoolExecutor
    from skyward.client.resume import Resumed
    from skyward.history.history import History
    from skyward.history.recorder import Recorder
    from skyward.history.store import Entry
    from skyward.view.page.server import PageServer

__all__ = [
    "ComputePool",
    "plan",
]


_making = threading.Lock()


S = TypeVar("S")
Ts = TypeVarTuple("Ts")

_TOLD = 1.0


Path = str | os.PathLike[str]


def _target(path: str, remote: str | None) -> str:
    if remote is not None:
        return remote
    if os.path.isabs(path) or os.path.normpath(path).startswith(".."):
        return os.path.basename(os.path.abspath(path))
    return os.path.normpath(path)


def _lack(error: TransferError, source: str) -> str:
    return "is lost: pull again when it is back" if error.errno == errno.EHOSTDOWN else f"has no {source}"


def _name(path: str) -> str:
    return os.path.basename(os.path.normpath(path)) or path


async def _in_thread(act: Any, undo: Any = None, stop: Any = None) -> None:
    """Runs `act` to its end in a thread. If the waiting task is cancelled, `stop` runs meanwhile, then `undo`."""
    import asyncio  # takes a while to load, and most programs never need it

    with ThreadPoolExecutor(2, "skyward-async") as threads:
        work = asyncio.get_running_loop().run_in_executor(threads, act)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            if stop is not None:
                await asyncio.get_running_loop().run_in_executor(threads, stop)
            await asyncio.wait([work])
            if undo is not None and work.exception() is None:
                await asyncio.get_running_loop().run_in_executor(threads, undo)
            raise


T = TypeVar("T")

_UNTOLD = 1.0  # leaving the block says that it waits if it takes longer
_LOOK = 0.05
_SETTLING = 2.0


def plan(*specs: Spec, **options: Any) -> Planned:
    """What `ComputePool` with the same `specs` and `options` would launch, where and for how much; creates nothing."""
    return ComputePool(*specs, **options).plan()


@corrects(FOR_POOLS)
class ComputePool(Collections, Mistakes):
    """Machines that exist while the with-block lasts, and take calls: `train(x) >> pool`.

    Args:
        *specs: kinds of machines that would do, as `sky.Spec(...)`, instead of the single options that a Spec has, too.
            The cheapest available one is taken, or with selection="first" the first.
        provider: where machines come from: `sky.Local()`, `sky.SSH(hosts=[...])`, `sky.AWS()`. Default: this computer.
        nodes: how many machines. Default: 1, and with `sky.SSH` all hosts.
        accelerator: what each node has, such as "A100", "A100-80GB" or "H100:8" (eight). Default: none.
        image: Python, packages, variables and files of the nodes, as `sky.Image(...)`. Default: your Python alone.
        plugins: frameworks that are set up on the nodes, as `[sky.plugins.torch()]`. Default: none.
        concurrency: how many calls each process runs at a time, in threads. Default: 1.
        worker: the same in full, such as `sky.Worker(8, executor="process")`. Default: none.
        name: what the pool is called. Default: made from the program's name.
        vcpus: least virtual CPUs of each machine; clouds only. Default: 2, with an accelerator any number.
        memory_gb: least memory of each machine, in GB; clouds only. Default: 4, with an accelerator any.
        architecture: "x86_64" or "arm64"; clouds only. Default: "x86_64", with an accelerator either.
        allocation: "spot" machines cost less and may be taken away; "on-demand" ones stay; "spot-if-available" tries
            both in this order; "cheapest" goes by price alone. Default: "spot-if-available".
        selection: which of several specs is tried first: "cheapest" (default) or "first".
        max_hourly_cost: dollars per hour for all nodes together; what costs more is not taken. Default: no limit.
        ttl: seconds after which what the pool has started ends itself, in use or not, and rented machines with it.
            Default: 604800, a week; on this computer none.
        processes_per_node: how many processes each node runs, each of them one rank; "gpu": one per GPU. Default: 1. If
            it is given, `sky.plugins.torch()` forms a group for a single rank too.
        min_nodes: with how many of `nodes` the pool opens if not all are available; the others join when they come.
            Default: all of them.
        retries: how often a `>>` call is restarted after the loss of its node. Default: 3.
        replace: whether lost machines are replaced. Default: None, which means: spot machines and machines of a
            cluster.
        default_compute_timeout: time limit in seconds for calls that have none. Default: None, no limit.
        provision_timeout: seconds until machines have to run, and hosts to be set up. Default: 300.
        max_result_bytes: the largest result that is sent back, in bytes. Default: 2147483648 (2 GiB).
        grace: seconds for a body to end after its time limit, or when the pool closes, before it is killed. Default:
            10.
        stall_timeout: seconds after which a broadcast fails whose ranks all wait for each other; None: never.
            Default: 300.
        console: "live" (a view on the terminal), "plain" (lines), "silent" or False (nothing at all, nor what bodies
            print), "auto" or True: live on a terminal, lines elsewhere. Default: "auto".
        history: whether events are kept on this computer, for thirty days. Default: True.
        max_replay_bytes: how many bytes of functions and arguments of failed calls are kept with the history, for
            `sky replay`; 0 keeps none. Default: 268435456 (256 MiB).
        view: whether the address of the pool's page is printed when it is open. Default: False.
        budget: dollars that the pool may cost in all, if its provider has prices. Shortly before they are spent bodies
            are told (`sky.preempted()`); then the pool closes, and machines end by themselves. Default: none.
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
        processes_per_node: int | Literal["gpu"] | None = None,
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
        max_replay_bytes: int = 256 << 20,
        view: bool = False,
        budget: float | None = None,
        allow_nested: bool = False,
    ) -> None:
        given = dict(locals())
        del given["self"]
        self.given: dict[str, Any] = given  # for `sky.detach`, which makes it again elsewhere
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
        self._max_replay = checked_replay_limit(max_replay_bytes)
        self._allow_nested = checked_switch("allow_nested", allow_nested)
        self._replace = checked_replace(replace, self._candidates)
        self.budget = checked_budget(budget)
        self._user = UserCode()
        self._state = PoolState()
        self._steps: ExitStack = Steps()
        self._hurry = threading.Event()
        self._prices: list[tuple[float, float]] = []
        self._weak = lifetime.Reference(self)
        self.receipt: Receipt | None = None
        """What was created, what is confirmed gone and what it cost, as the provider says; None until closed."""

    @classmethod
    def from_config(
        cls, name: str | None = None, /, *, path: str | os.PathLike[str] | None = None, **options: Any
    ) -> ComputePool:
        """The pool `name` (or the default one) of this project's sky.toml, or of pyproject.toml under [tool.skyward].

        `path` is another file. `options` override those of the file: `from_config("gpu", nodes=2)`.
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
        notify_watchers(self)
        self._state.begin_opening(self._allow_nested)
        began = time.monotonic()
        try:
            with Steps(self._hurry) as steps:
                self._open(steps, began)
                with self._state.opened():
                    self._steps = steps.pop_all()
        except BaseException:
            self._steps.close()  # empty, unless Ctrl-C came when they were handed over
            self._state.end_closing()
            raise
        try:
            self._tell_opened(began)
        except BaseException:
            self.close()
            raise
        return self

    def _open(self, steps: Steps, began: float) -> None:
        """Every step registers its undoing before the next begins."""
        lifetime.check_threads()
        self._hurry.clear()
        self._prices.clear()
        steps.enter_context(OrderlyExit())
        steps.enter_context(self._user)
        attach_console(self._console, self.on_event, steps)
        self._recorder = keep_history(self._history, self.name, self._user, steps)
        steps.callback(self._weak.call(ComputePool._tell_closed), began)
        watchdog = steps.enter_context(Watchdog())
        self._take(self._candidates[0])
        self._tell_opening()
        keep_receipt = self._weak.call(ComputePool._keep_receipt)
        context = self._context()
        if not context.local:
            steps.enter_context(lifetime.no_core_dumps())
        context, holding = get_machines(
            context, self._candidates, self._selection, self._choose, keep_receipt, watchdog, steps
        )
        self.spec = context.spec
        self._state.check_wanted()
        steps.callback(lifetime.end, lifetime.begin(self, self._weak.call(ComputePool._after_fork)))
        close_for_another = self._weak.call(ComputePool._close_for_another)
        keep_failed = partial(keep_failed_calls, self._recorder, self._max_replay, steps)
        self._fleet = open_nodes(context, holding, watchdog, self._state, close_for_another, keep_failed, steps)
        self._state.check_wanted()
        self._engine, self._store = self._fleet.engine, self._fleet.store
        keep_failed(context, self._fleet)
        if context.budget is not None:
            close = self._weak.call(ComputePool._close)
            steps.enter_context(BudgetWatch(context, self._engine.tell_terms, close))
        packing = make_packing(context, self._fleet, self._user)
        self._sender = Sender(context, self._engine, packing, self._retries, self._timeout)
        self._refs = packing.refs(self._engine)
        clients = self._dask_clients = weakref.WeakSet[Any]()
        steps.callback(lambda: [client.close(timeout=2) for client in list(clients)])
        opening.enter(self.plugins, self, context.cluster, steps)
        enter_target(self)
        steps.callback(self._weak.call(leave_target))
        opening.register_joblib()

    def _tell_opened(self, began: float) -> None:
        self._emit(events.PoolOpened(self.name, len(self._fleet.by_node), self.slots, time.monotonic() - began))
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

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """When the submitted calls have ended, or at once if an error has left the block."""
        if error is None:
            try:
                self._finish()
            except BaseException as exc:  # Ctrl-C, or a signal that ends the program
                self._close(left_by(exc))
                raise
        self._close(left_by(error))

    def _finish(self) -> None:
        """Waits for the calls that have not ended, and for what their callbacks send; stops streams.

        A slow callback may wait for the pool to be closed, so callbacks are waited for only as long as they end. Takes
        no lock while it waits: Ctrl-C leaves none taken.
        """
        began, told, settled, callbacks = time.monotonic(), False, False, self._user.callbacks
        stopped, pauses = 0, backoff(0.001, _LOOK)
        try:
            while self._state.is_ours and self._state.now == "open":
                ended, streams = self._engine.finish()
                stopped += streams
                if ended and settled:
                    break
                if ended:  # callbacks of those that ended last may send more
                    before = callbacks.finished
                    self._engine.settle(_SETTLING)
                    callbacks.wait(callbacks.submitted, _SETTLING)
                    settled = callbacks.finished == before
                    continue
                settled = False
                if not told and time.monotonic() - began > _UNTOLD:
                    told = True
                    self._emit(events.Notice(self.name, waiting_text(self._engine.unfinished()[0])))
                time.sleep(next(pauses))
        finally:
            if stopped:
                self._emit(events.Notice(self.name, stopped_text(0, stopped, left_by(None))))

    def __del__(self) -> None:
        state = self.__dict__.get("_state")
        if state is not None and state.now == "open" and state.is_ours:
            self._weak.renew(self)
            lifetime.drop(self)

    def close(self) -> None:
        """Stops every call and releases everything; may be called twice, and from any thread. Unlike leaving the
        with-block, it does not wait for submitted calls.
        """
        self._close("the pool was closed")

    def _close_for_another(self) -> None:
        self._emit(events.Notice(self.name, "`sky down` in another terminal closes this pool.", "warning"))
        self.close()

    def _close(self, why: str) -> None:
        # closing waits for callbacks and listeners, so they must not wait for it; the end of the program does not wait
        # until a pool is open: what is started for it ends with this process
        ends = self._state.now == "opening" and lifetime.is_ending()
        if not self._state.begin_closing(waits=not self._user.is_current() and not ends):
            return
        try:
            calls, streams = self._engine.unfinished()
            if calls or streams:
                level = "warning" if calls else "info"
                self._emit(events.Notice(self.name, stopped_text(calls, streams, why), level))
            self._emit(events.PoolClosing(self.name))
            self._steps.close()
        except BaseException as exc:
            # A signal between two steps. After Ctrl-C the others do not wait: keepers, whose pipes close, and the
            # watchdog do the rest.
            if isinstance(exc, KeyboardInterrupt):
                self._hurry.set()
            self._steps.close()
            raise
        finally:
            self._state.end_closing()

    def _tell_opening(self) -> None:
        processes = self.spec.processes
        self._emit(events.PoolOpening(self.name, self.nodes, self.provider.name, processes))

    def _tell_closed(self, began: float) -> None:
        engine = self.__dict__.get("_engine")
        counts = engine.totals() if engine else (0, 0, 0)
        self._emit(events.PoolClosed(self.name, time.monotonic() - began, *counts))
        self._user.listeners.flush()  # before the console is taken off
        self._show_end()

    def _take(self, one: Candidate) -> None:
        self.provider, self.spec, self.nodes = one.provider, one.spec, one.nodes

    def _choose(self, candidate: Candidate) -> None:
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
            budget=self.budget,
            prices=self._prices,
        )

    def _keep_receipt(self, receipt: Receipt) -> None:
        self.receipt = receipt
        if not receipt.is_empty:
            self._emit(events.Notice(self.name, f"{receipt}{of_budget(self.budget, self._prices)}"))

    def _add_packages(self, pip: Sequence[str]) -> tuple[str, ...]:
        """Puts packages (`pip`, as in `Image`) beside those of the nodes; returns the paths where calls find them."""
        self._state.check_open()
        return self._fleet.add_packages(pip)

    def _shared_channel(self) -> Any:
        self._state.check_open()
        return self._engine.shared.channel()

    # events, plans

    def on_event(self, listener: Callable[[events.Event], None]) -> Callable[[], None]:
        """Calls `listener` with every event, in a thread for listeners; returns a function that ends this."""
        check_listener(listener)
        return self._user.listeners.add(listener)

    def plan(self) -> Planned:
        """What opening the pool would launch, where and for how much, and what was ruled out; creates nothing.

        Of several specs it says which is tried first, and why.
        """
        if len(self._candidates) > 1:
            return look(self._candidates, self._selection)
        found: Any = self.provider.offers(self.spec, self.nodes)
        return found if hasattr(found, "hourly_cost") else Offers(found, self.nodes)

    def script(self) -> str:
        """The script that would set up a machine of this pool, if it is reached by ssh."""
        return setup_script(self._context())

    def __reduce__(self) -> Any:
        raise StaysHere("a pool stays in the process that opened it: send calls to it from there, not from a body.")

    def _listening(self) -> object:
        return self._user.listeners.wants()

    def _emit(self, event: events.Event) -> None:
        self._user.listeners.emit(event)

    def _after_fork(self) -> None:
        if "_fleet" in self.__dict__:
            self._fleet.after_fork()

    _executor: weakref.ref[PoolExecutor] | None = None

    @overload
    def run(self, call: PendingKept[T], /, *args: Never, **kwargs: Never) -> Ref[T]: ...
    @overload
    def run(self, call: PendingCompute[Untyped], /, *args: Never, **kwargs: Never) -> Any: ...
    @overload
    def run(self, call: PendingCompute[Iterator[T]], /, *args: Never, **kwargs: Never) -> Stream[T]: ...
    @overload
    def run(self, call: PendingCompute[T], /, *args: Never, **kwargs: Never) -> T: ...
    def run(self, call: PendingCompute[Any], /, *args: Never, **kwargs: Never) -> Any:
        """Runs a call on one node and returns its result; Ctrl-C stops it there. The same as `call >> pool`."""
        if args or kwargs:
            raise called_like_an_executor(call, "run", args, kwargs)
        future = self.submit(call)
        try:
            return future.result()
        except BaseException as exc:
            __tracebackhide__ = True
            hide_frames(exc)
            future.cancel()
            raise

    @overload
    def submit(self, call: PendingKept[T], /, *args: Never, **kwargs: Never) -> AwaitableFuture[Ref[T]]: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def submit(self, call: PendingCompute[Untyped], /, *args: Never, **kwargs: Never) -> AwaitableFuture[Any]: ...
    @overload
    def submit(
        self, call: PendingCompute[Iterator[T]], /, *args: Never, **kwargs: Never
    ) -> AwaitableFuture[Stream[T]]: ...
    @overload
    def submit(self, call: PendingCompute[T], /, *args: Never, **kwargs: Never) -> AwaitableFuture[T]: ...
    def submit(self, call: PendingCompute[Any], /, *args: Never, **kwargs: Never) -> AwaitableFuture[Any]:
        """Sends a call to one node; the future's cancel() stops it there. The same as `call > pool`."""
        if args or kwargs:
            raise called_like_an_executor(call, "submit", args, kwargs)
        future = self._send([call], alone=True)[0]
        future.unasked = True
        return future

    def submit_all(self, calls: Sequence[PendingCompute[T]], /) -> list[AwaitableFuture[T]]:
        """Deprecated: write `[call > pool for call in calls]`."""
        deprecated("pool.submit_all(calls)", "`[call > pool for call in calls]`", removal="0.3")
        return self._send(calls)

    def run_async(self, call: PendingCompute[T], /) -> AwaitableFuture[T]:
        """Deprecated: write `pool.submit(call)`."""
        deprecated("pool.run_async(call)", "`pool.submit(call)`", removal="0.3")
        return self.submit(call)

    @overload
    def broadcast(self, call: PendingKept[T], /, *args: Never, **kwargs: Never) -> list[Ref[T]]: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def broadcast(self, call: PendingCompute[Untyped], /, *args: Never, **kwargs: Never) -> list[Any]: ...
    @overload
    def broadcast(self, call: PendingCompute[Iterator[T]], /, *args: Never, **kwargs: Never) -> list[Stream[T]]: ...
    @overload
    def broadcast(self, call: PendingCompute[T], /, *args: Never, **kwargs: Never) -> list[T]: ...
    def broadcast(self, call: PendingCompute[Any], /, *args: Never, **kwargs: Never) -> list[Any]:
        """Runs a call on every rank at once; results in rank order. If one fails, the others are stopped.

        There is one rank on each node, or as many as `processes_per_node` says. If the call has retries and a node is
        lost, all of it is restarted when every node is there.
        """
        if args or kwargs:
            raise called_like_an_executor(call, "broadcast", args, kwargs)
        self._state.check_open()
        try:
            return self._sender.broadcast(call, self)
        except Exception as exc:
            __tracebackhide__ = True
            hide_frames(exc)
            raise

    @property
    def executor(self) -> PoolExecutor:
        """A concurrent.futures.Executor over this pool: the same one until it is shut down, which leaves the pool open.

        Then there is a new one, so `with pool.executor as executor:` works repeatedly.
        """
        self._state.check_open()
        from skyward.client.gather import PoolExecutor

        with _making:
            made = self._executor() if self._executor is not None else None
            if made is None or made.is_shut:
                made = PoolExecutor(self._send)
                # its open calls keep it; if the pool did, each would keep the other, and a dropped pool stay open
                self._executor = weakref.ref(made)
        return made

    def _send(
        self, calls: Sequence[PendingCompute[Any]], alone: bool = False, keep: bool = False
    ) -> list[AwaitableFuture[Any]]:
        self._state.check_open()
        return self._sender.send(calls, self, alone, keep)

    def run_parallel(self, group: PendingComputeGroup[*Ts], /) -> tuple[*Ts]:
        """Runs the calls of a `group` at once; results in their order. The same as `group >> pool`."""
        calls = checked_group(group).calls()
        futures, run, ended = self._send_group(group, calls)
        try:
            return cast("tuple[*Ts]", gather.gathered(futures, calls, group.return_exceptions, ended))
        except BaseException as exc:
            __tracebackhide__ = True
            hide_frames(exc)
            self._user.listeners.flush(_TOLD)  # that it has ended is shown before the error is
            raise
        finally:
            if run is not None:
                run.finish()

    def submit_parallel(self, group: PendingComputeGroup[*Ts], /) -> AwaitableFuture[tuple[*Ts]]:
        """The same as `run_parallel(group)`, later: `group > pool`."""
        calls = checked_group(group).calls()
        futures, _, ended = self._send_group(group, calls)
        return cast("AwaitableFuture[tuple[*Ts]]", gather.combined(futures, calls, group.return_exceptions, ended))

    def stream_parallel(self, group: PendingStream[T], /) -> Stream[T]:
        """Runs the calls of a `group` at once and yields results as they come (or in order)."""
        futures, _, ended = self._send_group(group, group.items)
        if ended is not None:
            for future in futures:
                when_done(future, ended)
        return gather.streamed(futures, group.ordered, group.items, group.return_exceptions)

    def _send_group(
        self, group: Any, calls: Sequence[PendingCompute[Any]]
    ) -> tuple[Sequence[Future[Any]], Resumed | None, Callable[[Future[Any]], None] | None]:
        """The futures of a group, what keeps their results, and what is called as each ends."""
        send = partial(self._send, keep=group.return_exceptions)
        run = self._resumed(group.resume, calls)
        futures, left = (send(calls), calls) if run is None else run.send(calls, send, self._user)
        counter = None
        if len(left) > 1 and group.progress and self._listening():
            counter = GroupCounter(self.name, gather.name_of_all(left), len(left), self._emit)
        return futures, run, None if counter is None else counter.ended if run is None else run.counting(counter.ended)

    def _resumed(self, resume: Resume | None, calls: Sequence[PendingCompute[Any]]) -> Resumed | None:
        if resume is None:
            return None
        from skyward.client.resume import Resumed, surroundings

        self._state.check_open()
        around = surroundings(self.image, [plugin.name for plugin in self.plugins])
        return Resumed(resume, calls, around, self._say)

    def _follow_group(self, name: str, total: int | None) -> GroupCounter | None:
        if not self._listening():
            return None
        flush = partial(self._user.listeners.flush, _TOLD)
        return GroupCounter(self.name, name, total, self._emit, flush=flush)

    # a compute function by how it is called: one with more parameters, which have defaults, is not a Compute[[S], T]
    @overload
    def map(
        self,
        fn: Callable[[S], PendingCompute[T]],
        items: Iterable[S],
        *,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[GroupOptions],
    ) -> list[T]: ...
    @overload
    def map(
        self,
        fn: Callable[[S], PendingCompute[T]],
        items: Iterable[S],
        *,
        return_exceptions: bool,
        **options: Unpack[GroupOptions],
    ) -> list[T | BaseException]: ...
    @overload
    def map(
        self,
        fn: Callable[[S], T],
        items: Iterable[S],
        *,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[GroupOptions],
    ) -> list[T]: ...
    @overload
    def map(
        self, fn: Callable[[S], T], items: Iterable[S], *, return_exceptions: bool, **options: Unpack[GroupOptions]
    ) -> list[T | BaseException]: ...
    @corrects_call("pool.map", FOR_GROUPS, "pool.map(fn, items)")
    def map(
        self,
        fn: Callable[[Any], Any],
        items: Iterable[Any],
        *more: Never,
        return_exceptions: bool = False,
        progress: bool = True,
        resume: str | None = None,
        changed: Literal["keep", "redo"] | None = None,
        resume_with: object = None,
    ) -> list[Any]:
        """Applies `fn` to each of `items`, in chunks sized by how long items take; results in order.

        `return_exceptions`: a failed item has its exception in its place, and the others continue. Otherwise (the
        default) the first failure is raised and the rest is stopped; what had finished is in its `partial`, by index.
        `progress`: whether to show how many are done, how many per second, and the time left (the default). `resume`,
        `changed`, `resume_with`: keeps results, and computes only what is missing; as in `sky.gather`.
        """
        fn = as_compute(fn)
        if mistake := not_mapped(fn, items, more):
            raise mistake
        check_switches(return_exceptions=return_exceptions, progress=progress)
        known: Compute[[Any], Any] = cast("Any", fn) if isinstance(fn, Compute) else Compute(fn)
        self._state.check_open()
        each = self._sender.limited(PendingCompute[Any](known.fn, timeout=known.timeout, retries=known.retries))
        chosen = list(items)
        options = resume_options(resume, changed, resume_with)
        run = self._resumed(options, [PendingCompute(known.fn, (item,)) for item in chosen] if options else [])
        left = len(chosen) - (0 if run is None else len(run.known))
        counter = self._follow_group(each.name, left) if progress and left > 1 else None
        count = None if counter is None else counter.add
        try:
            found = gather.mapped(self._send, each, chosen, self.slots, return_exceptions, count, run)
            return for_awaiting(found)
        finally:
            if counter is not None:
                counter.end()
            if run is not None:
                run.finish()

    @corrects_call("pool.put", example="pool.put(obj)")
    def put(self, value: T) -> Ref[T]:
        """Keeps an object (`value`) for calls: `train(pool.put(table), rate)`; it is sent to each machine once.

        As an argument, also inside lists and dicts, the Ref becomes the object, which calls of one process share.
        Letting go of the Ref frees it.
        """
        self._state.check_open()
        if isinstance(value, PendingCompute | PendingComputeGroup):
            raise not_put(cast("object", value))
        return self._refs.put(value)

    @corrects_call("pool.push", example='pool.push("data")')
    def push(self, local: Path, remote: Path | None = None, *, progress: bool = True) -> Transfer:
        """Copies a file or a folder to every node; only what has changed since, by size and time of last change.

        Args:
            local: a file or a folder of this computer.
            remote: where it goes on the nodes, relative to the working directory that bodies start in. A folder's
                contents go
                into the folder of this name; a file gets this name, or goes into a folder of this name if there is one.
                Default: the same path as `local`, or its last part if `local` is absolute.
            progress: whether the live view shows progress. Default: True.

        Each byte leaves this computer once, where nodes reach each other. An interrupted copy is continued by the next
        call. Nothing is deleted on the nodes. Raises `sky.errors.TransferError`.
        """
        self._state.check_open()
        from skyward.client.files import Push

        source = check_path("local", local, 'pool.push("data")')
        target = _target(source, None if remote is None else check_path("remote", remote, 'pool.push("data", "data")'))
        nodes = self._machines()
        with self._engine.pushing:
            push = Push(self._engine, self._store, nodes, self.provider.access.local)
            done = push.run(source, target, self._counting(f"push {_name(source)}", progress))
        self._tell_left_out("push", source, done)
        return done

    @corrects_call("pool.pull", example='pool.pull("out", "results")')
    def pull(self, remote: Path, local: Path, node: int | None = None, *, progress: bool = True) -> Transfer:
        """Copies a file or a folder from nodes to this computer; only what has changed since.

        Args:
            remote: a file or a folder of the nodes, relative to the working directory that bodies start in.
            local: where it goes, as `remote` in `push`. From all nodes: the folder in which each node gets a folder,
                `node-0`,
                `node-1`, ...
            node: the number of one node. Default: all nodes; those that are lost, or do not have it, are named.
            progress: whether the live view shows progress. Default: True.

        Nothing is written outside `local`, whatever a node says. An interrupted copy is continued by the next call.
        Nothing is deleted here. Raises `sky.errors.TransferError`.
        """
        self._state.check_open()
        from skyward.api.spec import Transfer

        source = check_path("remote", remote, 'pool.pull("out", "results")')
        target = check_path("local", local, 'pool.pull("out", "results")')
        if node is not None:
            self._check_node(node)
            done = self._pull(node, source, target, progress)
        else:
            nodes = list(self._engine.file_nodes())
            parts = each(lambda n: self._pulled(n, source, os.path.join(target, f"node-{n}", ""), progress), nodes)
            there = [(n, part) for n, part in zip(nodes, parts, strict=True) if isinstance(part, Transfer)]
            missing = [part for part in parts if not isinstance(part, Transfer)]
            if not there:
                raise missing[0]
            done = Transfer(
                sum(part.files for _, part in there),
                sum(part.bytes for _, part in there),
                sum(part.unchanged for _, part in there),
                tuple(
                    [f"node {n}: {text}" for n, part in there for text in part.left_out]
                    + [f"node {error.node}, which {_lack(error, source)}" for error in missing]
                ),
            )
        self._tell_left_out("pull", source, done)
        return done

    def _pulled(self, node: int, source: str, target: str, progress: bool) -> Transfer | TransferError:
        try:
            return self._pull(node, source, target, progress)
        except TransferError as exc:
            if exc.errno in (errno.ENOENT, errno.EHOSTDOWN) and exc.node is not None:
                return exc
            raise

    def _pull(self, node: int, source: str, target: str, progress: bool) -> Transfer:
        from skyward.client.files import Pull

        name = f"pull {_name(source)} from node {node}"
        return Pull(self._engine, node, self._say).run(source, target, self._counting(name, progress))

    def _machines(self) -> list[int]:
        nodes = self._engine.file_nodes()
        lost = [str(node) for node, gone in nodes.items() if gone]
        if lost:
            self._say(f"push leaves out nodes that are lost: {', '.join(lost)}. Push again when they are back.")
        there = [node for node, gone in nodes.items() if not gone]
        unique = {id(self._fleet.by_node[node].keeper): node for node in reversed(there)}
        return sorted(unique.values())

    def _check_node(self, node: int) -> None:
        nodes = self._engine.file_nodes()
        if type(node) is not int or node not in nodes:
            raise InvalidArgument(f"node={node!r}: the pool has the nodes 0 to {len(nodes) - 1}.")

    def _counting(self, name: str, progress: bool) -> Begin:
        from skyward.client.files import counting

        return counting(self.name, name, self._emit if progress else None)

    def _tell_left_out(self, what: str, path: str, done: Transfer) -> None:
        if done.left_out:
            more = f"; and {len(done.left_out) - 5} more" if len(done.left_out) > 5 else ""
            self._say(f"{what} of {path} leaves out: {'; '.join(done.left_out[:5])}{more}.")

    def _say(self, text: str, level: Literal["info", "warning"] = "warning") -> None:
        self._emit(events.Notice(self.name, text, level))

    nodes: int
    spec: Spec
    worker: Worker
    _state: PoolState

    @property
    def concurrency(self) -> int:
        """How many calls each process runs at a time; a node has `processes_per_node` of them."""
        return self.worker.concurrency

    @property
    def world_size(self) -> int:
        """How many ranks the pool has: one for each process of each node. With "gpu" it is known once open."""
        engine, each = self.__dict__.get("_engine"), self.spec.processes
        return len(engine.ranks) if engine else self.nodes * (1 if each == "gpu" else each)

    @property
    def slots(self) -> int:
        """How many calls the pool runs at a time."""
        return self.world_size * self.worker.concurrency

    @property
    def is_active(self) -> bool:
        """Whether the pool takes calls."""
        return self._state.now == "open" and self._state.is_ours

    def current_nodes(self) -> int:
        """How many nodes take calls now."""
        return len(self._engine.up()) if self.is_active else 0

    @corrects_call("pool.stacks", example="pool.stacks()")
    def stacks(self) -> Stacks:
        """Where every body is, also inside C code or a collective; see `Stack`. Takes about 0.1 s."""
        self._state.check_open()
        return self._engine.stacks()

    def dask(self) -> Client:
        """A dask client of this pool's nodes; the first call starts dask there, in processes of its own.

        Needs distributed here (`pip install distributed`) and on other machines (`Image(pip=["distributed"])`).
        """
        self._state.check_open()
        client = self._fleet.dask.connect()
        self._dask_clients.add(client)
        client.wait_for_workers(len(self._fleet.by_node), timeout=60)
        return client

    name: str
    _recorder: Recorder | None = None
    _page: tuple[Recorder, PageServer] | None = None

    def history(self) -> History:
        """What has happened in this pool so far: its calls, output, metrics; also after it was closed.

        It is kept on this computer for thirty days, and `sky history` lists it.
        """
        from skyward.history.history import read

        self._recorded().flush()
        return read(self._entry())

    @corrects_call("pool.trace", example='pool.trace("run.json")')
    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what has happened so far to `path`, as a trace for https://ui.perfetto.dev and chrome://tracing."""
        self.history().trace(path)

    @corrects_call(
        "pool.view", {"port": "nothing: any port that is free is taken, and is in the address"}, "pool.view()"
    )
    def view(self) -> PageAddress:
        """Shows the pool in the browser; returns the page's address.

        This process serves the page on loopback, also after the pool was closed. The address works once; for another
        tab call this again. From another computer: `ssh -L 8000:127.0.0.1:PORT`, then the same address with port 8000.
        """
        from skyward.view.page.server import PageServer

        recorder = self._recorded()
        if self._page is None or self._page[0] is not recorder:
            if self._page is not None:
                self._page[1].close()
            recorder.flush()
            self._page = recorder, PageServer(self._entry(), recorder.flush)
        return PageAddress(self._page[1].address(), self.name)

    def _show_end(self) -> None:
        if self._page is not None and self._page[0] is self._recorder:
            self._page[1].show_end()

    def _recorded(self) -> Recorder:
        if self._recorder is None:
            raise InvalidArgument(
                f"there is no history of {self.name}: it was not opened yet, or none is kept (history=False, "
                "or SKYWARD_HISTORY=off, or a home that cannot be written)."
            )
        return self._recorder

    def _entry(self) -> Entry:
        from skyward.history.store import find

        recorder = self._recorded()
        return find(recorder.id, recorder.root)

    async def __aenter__(self) -> Self:
        self._signals = OrderlyExit().__enter__()  # in this thread: only the main one can have handlers
        try:
            await _in_thread(self.__enter__, undo=self.close, stop=self.close)
        except BaseException:
            self._signals.__exit__(None, None, None)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await _in_thread(partial(self._leave, error), stop=self.close)
        finally:
            self._signals.__exit__(None, None, None)
