"""The pool: opens things in order, closes them in reverse, and sends calls to nodes.

with sky.ComputePool(nodes=4) as pool:      console, image, machines, environment, keeper, links, hooks
    train() >> pool                         ... and all of it backwards when the block is left, however it is left
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar, TypeVarTuple, cast

from skyward import blobs, events
from skyward.accelerators import Accelerator
from skyward.bootstrap import Environment, prepare
from skyward.errors import ForkedPoolError, InvalidArgument, NestedPoolError, PluginError, PoolClosed
from skyward.executor import PoolExecutor
from skyward.image import Image, check_number
from skyward.includes import collect_includes
from skyward.payload import Packer
from skyward.plugin import Cluster, Plugin
from skyward.provider import Machine, Provider
from skyward.providers.local import Local
from skyward.runtime import AcceleratorInfo, InstanceInfo, NetworkInfo, Peer
from skyward.shell import LocalShell, inherited
from skyward.spec import Spec, Volume, Worker
from skyward.task import Compute, PendingCompute, PendingComputeGroup, PendingStream, enter_target, leave_target

__all__ = ["ComputePool"]

T = TypeVar("T")
S = TypeVar("S")
Ts = TypeVarTuple("Ts")

log = logging.getLogger("skyward.pool")

_RETRIES = 3
_MAP_SECONDS = 0.05
_COUNTER = itertools.count(1)


class ComputePool:
    """Machines that exist while the with-block lasts, and take calls."""

    def __init__(
        self,
        *specs: Spec,
        provider: Provider | None = None,
        nodes: int | tuple[int, int] = 1,
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
        max_hourly_cost: float | None = None,
        ttl: float = 600,
        volumes: Sequence[Volume] = (),
        retries: int = _RETRIES,
        default_compute_timeout: float | None = None,
        provision_timeout: float = 300,
        max_result_bytes: int = 2 << 30,
        grace: float = 10.0,
        console: bool | str = "auto",
        allow_nested: bool = False,
    ) -> None:
        self.provider, self.spec = _chosen(
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
            },
        )
        if isinstance(self.spec.nodes, tuple):
            raise InvalidArgument(
                f"nodes={self.spec.nodes!r}: pools that grow and shrink are not there yet; give one number of nodes."
            )
        if volumes:
            raise InvalidArgument(
                "volumes=...: no provider here mounts volumes yet; read the data inside the function."
            )
        self.nodes = self.spec.nodes
        self.worker = _chosen_worker(concurrency, worker)
        self.image = _checked("image", image if image is not None else Image(), Image)
        self.plugins = tuple(_checked("plugins", p, Plugin) for p in _listed("plugins", plugins))
        self.name = name or f"{_program()}-{os.getpid()}-{next(_COUNTER)}"
        if not isinstance(self.name, str) or len(self.name) > 100:
            raise InvalidArgument(f"name={name!r}: a pool's name is a short text.")
        for label, value in (("provision_timeout", provision_timeout), ("grace", grace)):
            check_number(label, value, whole=False)
        check_number("max_result_bytes", max_result_bytes)
        if default_compute_timeout is not None:
            check_number("default_compute_timeout", default_compute_timeout, whole=False)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise InvalidArgument(f"retries={retries!r}: a whole number of restarts, 0 or more, is wanted.")
        self._retries, self._timeout, self._patience = retries, default_compute_timeout, provision_timeout
        self._max_result, self._grace, self._console = max_result_bytes, grace, console
        self._allow_nested = allow_nested
        self._listeners: list[Callable[[events.Event], None]] = []
        self._state: Literal["new", "opening", "open", "closing", "closed"] = "new"
        self._state_lock = threading.Lock()
        self._stack = ExitStack()
        self._pid = os.getpid()
        self._hurry = False

    def __repr__(self) -> str:
        return f"<ComputePool {self.name} {self._state}, {self.nodes} x {self.provider.name}>"

    # opening and closing

    def __enter__(self) -> ComputePool:
        self._check_process()
        if "COMPUTE_POOL" in os.environ and not self._allow_nested:
            raise NestedPoolError(
                "this code runs on a node of a pool already; a body that opens a pool of its own can multiply machines "
                "without end. If it is meant, say ComputePool(..., allow_nested=True)."
            )
        with self._state_lock:
            if self._state not in ("new", "closed"):
                raise PoolClosed(f"the pool is {self._state} already; make another ComputePool for a second block.")
            self._state = "opening"
        try:
            with ExitStack() as stack:
                self._open(stack)
                self._stack = stack.pop_all()
        except BaseException:
            self._state = "closed"
            raise
        return self

    def _open(self, stack: ExitStack) -> None:
        """Every step registers how it is undone before the next begins."""
        began = time.monotonic()
        deadline = began + self._patience
        self._pid, self._hurry = os.getpid(), False
        stack.enter_context(_Signals())
        self._attach_console(stack)
        stack.callback(self._finished, began)
        self._emit(events.PoolOpening(self.name, self.nodes, self.provider.name))
        cluster = Cluster(self.name, self.nodes, self.worker.concurrency, self.spec)
        image = self._transformed(cluster)
        machines = self._launched(stack)
        self._store = blobs.Store(str(os.getpid()))
        stack.callback(self._store.close)
        environment = self._environment(image)
        site = self._sited(stack, environment)
        self._connected(stack, site, machines, environment, image, deadline)
        for plugin in self.plugins:
            if plugin.around_client is not None:
                try:
                    stack.enter_context(plugin.around_client(self, cluster))
                except Exception as exc:
                    raise PluginError(plugin.name, "around_client", repr(exc)) from exc
        enter_target(self)
        stack.callback(leave_target, self)
        self._state = "open"
        _OPEN.add(self)
        stack.callback(_OPEN.discard, self)
        seconds = time.monotonic() - began
        self._emit(events.PoolOpened(self.name, self.nodes, self.nodes * self.worker.concurrency, seconds))

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call and gives everything back; safe to call twice, and from any thread."""
        if os.getpid() != self._pid:
            return  # a forked child: nothing here is its own
        with self._state_lock:
            if self._state != "open":
                return
            self._state = "closing"
        self._emit(events.PoolClosing(self.name))
        try:
            self._stack.close()
        except KeyboardInterrupt:
            # the second Ctrl-C: no more patience; the keeper, which sees our end of its pipe close, ends the rest
            self._hurry = True
            self._stack.close()
            raise
        finally:
            self._state = "closed"

    def _finished(self, began: float) -> None:
        engine = self.__dict__.get("_engine")
        self._emit(events.PoolClosed(self.name, time.monotonic() - began, engine.settled if engine else 0))

    def _attach_console(self, stack: ExitStack) -> None:
        if self._console is False:
            return
        from skyward.console import attach

        view = attach(self._console)
        stack.callback(view.close)
        stack.callback(self.on_event(view))

    def _transformed(self, cluster: Cluster) -> Image:
        image = self.image
        for plugin in self.plugins:
            if plugin.transform is not None:
                try:
                    image = plugin.transform(image, cluster)
                except Exception as exc:
                    raise PluginError(plugin.name, "transform", repr(exc)) from exc
                if not isinstance(image, Image):
                    raise PluginError(plugin.name, "transform", f"it returned {image!r}, not an Image.")
        return image

    def _launched(self, stack: ExitStack) -> list[Machine]:
        offer = next(iter(self.provider.offers(self.spec)))
        machines = self.provider.launch(offer, self.nodes, self.name)
        stack.callback(self.provider.terminate, machines)
        return machines

    def _environment(self, image: Image) -> Environment:
        environment = prepare(image, report=lambda text: self._emit(events.NodePhase(self.name, None, text)))
        paths = collect_includes(image, Path.cwd(), Path(self._store.directory) / "includes")
        return Environment(environment.python, environment.env, (*environment.paths, *paths), environment.fresh)

    def _sited(self, stack: ExitStack, environment: Environment) -> Any:
        from skyward.engine.site import Site

        for node in range(self.nodes):
            self._emit(events.NodePhase(self.name, node, "starting"))
        env = {**inherited(os.environ), **environment.env}
        site = Site(LocalShell(), environment.python, env)
        stack.callback(lambda: site.end(0.2 if self._hurry else 10.0))
        self._site = site
        return site

    def _connected(
        self,
        stack: ExitStack,
        site: Any,
        machines: list[Machine],
        environment: Environment,
        image: Image,
        deadline: float,
    ) -> None:
        from skyward.engine import certs
        from skyward.engine.calls import Packing
        from skyward.engine.client import Engine, Plan

        authority = certs.Authority(self.name)
        mine = certs.context(authority.issue("client"), server=False)
        identities = [vars(authority.issue(f"node-{i}")) for i in range(self.nodes)]
        directory = self._store.directory
        order = {
            "scheduler": {"host": machines[0].private_ip, "identity": vars(authority.issue("scheduler"))},
            "nodes": [
                {"node": i, "host": m.private_ip, "identity": identities[i], "directory": directory}
                for i, m in enumerate(machines)
            ],
            "directories": [directory],
        }
        self._authority = authority
        site.order(order, deadline)

        def reach(node: int) -> socket.socket:
            return LocalShell().reach(*site.ports[node])

        def setup(node: int, abouts: list[dict[str, Any]], ports: list[int]) -> tuple[dict[str, Any], list[Any]]:
            return self._setup(node, abouts, ports, machines, environment), hooks

        hooks: list[Any] = []
        plan = Plan(
            pool=self.name,
            nodes=self.nodes,
            slots=self.worker.concurrency,
            reach=reach,
            context=mine,
            setup=setup,
            emit=self._emit,
            release=self._store.release,
            gang=self.nodes > 1 and any(p.around_app for p in self.plugins),
        )
        self._engine = Engine(plan)
        wanted = [(p.name, p.around_app, p.decorate) for p in self.plugins if p.around_app or p.decorate]
        if wanted:
            head, buffers = Packer(environment.paths).pack(wanted, "plugins")
            hooks[:] = [head, *map(bytes, buffers)]
        stack.callback(self._disconnect)
        self._engine.open(deadline)
        roots = [p for about in self._engine.abouts() for p in about["path"]]
        self._packing = Packing(Packer([*roots, *environment.paths, *_included(image)]), self._store)

    def _disconnect(self) -> None:
        self._site.closing()
        if self._hurry:
            self._engine.abandon()
        else:
            self._engine.close(self._grace)

    def _setup(
        self,
        node: int,
        abouts: list[dict[str, Any]],
        ports: list[int],
        machines: list[Machine],
        environment: Environment,
    ) -> dict[str, Any]:
        counts = [about.get("accelerators", 0) for about in abouts]
        wanted = self.spec.accelerator
        info = InstanceInfo(
            node=node,
            total_nodes=self.nodes,
            accelerators=counts[node],
            total_accelerators=sum(counts),
            head_addr=machines[0].private_ip,
            head_port=ports[0],
            job_id=self.name,
            peers=tuple(Peer(i, m.private_ip, m.public_ip) for i, m in enumerate(machines)),
            accelerator=None if wanted is None else _accelerator_info(wanted, counts[node]),
            network=NetworkInfo(interface="lo" if machines[node].reached == "local" else None),
            ports={"torch": ports[0], "jax": ports[1], "tensorflow": ports[2]},
        )
        process = self.worker.process
        slots = self.worker.concurrency
        return {
            "scheduler": self._site.scheduler,
            "info": info.to_json(),
            "env": {**_thread_counts(self.nodes * (slots if process else 1), environment.env), **environment.env},
            "cwd": os.getcwd(),
            "grace": self._grace,
            "threads": 1 if process else slots,
            "processes": slots if process else 1,
            "runner": {
                "threads": 1 if process else slots,
                "paths": list(environment.paths),
                "blobs": self._store.directory,
                "max_result": self._max_result,
                "node": node,
            },
        }

    # calls

    def run(self, call: PendingCompute[T], /) -> T:
        """Runs a call on one node and returns its result; Ctrl-C stops it there."""
        future = self.submit(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, call: PendingCompute[T], /) -> Future[T]:
        """Sends a call to one node; the future's cancel() stops it there."""
        return self._sent([call])[0]

    def run_async(self, call: PendingCompute[T], /) -> Future[T]:
        """The same as `submit`."""
        return self.submit(call)

    def broadcast(self, call: PendingCompute[T], /) -> list[T]:
        """Runs a call on every node at once; results in node order. If one fails, the others are stopped."""
        self._check_open()
        retries = 0 if call.retries is None else call.retries
        calls = self._packing.copies(self._limited(call), self.nodes, retries)
        self._engine.send_to(list(enumerate(calls)))
        futures = [c.future for c in calls]
        try:
            wait(futures)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        failed = [e for e in map(_error_of, futures) if e is not None]
        if failed:
            raise next((e for e in failed if not isinstance(e, CancelledError)), failed[0])
        return [f.result() for f in futures]

    def run_parallel(self, group: PendingComputeGroup[*Ts], /) -> tuple[*Ts]:
        """Runs several calls at once; results in their order."""
        futures = self._sent(group.calls())
        return cast("tuple[*Ts]", tuple(_gathered(futures)))

    def submit_parallel(self, group: PendingComputeGroup[*Ts], /) -> Future[tuple[*Ts]]:
        """The same as `run_parallel`, later."""
        combined: Future[Any] = Future()
        futures = self._sent(group.calls())
        _combine(futures, combined)
        return combined

    def stream_parallel(self, group: PendingStream[T], /) -> Iterator[T]:
        """Runs several calls at once and yields results as they come (or in order)."""
        futures = self._sent(group.items)
        return _streamed(futures, group.ordered)

    def map(self, fn: Callable[[S], T] | Compute[[S], T], items: Iterable[S]) -> list[T]:
        """Applies a function to every item, in chunks sized by how long items take; results in order."""
        plain = fn.fn if isinstance(fn, Compute) else fn
        if not callable(plain):
            raise InvalidArgument(f"map() applies a function to items; {plain!r} is none.")
        timeout = fn.timeout if isinstance(fn, Compute) else None
        return _Mapping(self, plain, list(items), timeout, self.nodes * self.worker.concurrency).run()

    @property
    def executor(self) -> PoolExecutor:
        """A concurrent.futures.Executor over this pool; shutting it down leaves the pool open."""
        self._check_open()
        return PoolExecutor(self._sent)

    def _sent(self, calls: Sequence[PendingCompute[Any]]) -> list[Any]:
        self._check_open()
        packed = self._packing.calls([self._limited(c) for c in calls], self._retries)
        self._engine.send(packed)
        return [c.future for c in packed]

    def _limited(self, call: PendingCompute[T]) -> PendingCompute[T]:
        if not isinstance(call, PendingCompute):
            raise TypeError(f"a pool runs calls, such as train(x) of an @sky.compute function, not {call!r}.")
        return call.with_timeout(self._timeout) if call.timeout is None and self._timeout is not None else call

    # what is known of it

    @property
    def concurrency(self) -> int:
        """How many calls each node runs at a time."""
        return self.worker.concurrency

    @property
    def is_active(self) -> bool:
        """Whether the pool takes calls."""
        return self._state == "open" and os.getpid() == self._pid

    def current_nodes(self) -> int:
        """How many nodes take calls at this moment."""
        return len(self._engine.up()) if self.is_active else 0

    def on_event(self, listener: Callable[[events.Event], None]) -> Callable[[], None]:
        """Has `listener` called with every event; returns a function that ends this."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def dask(self) -> Any:
        """A dask client of this pool: every pool is a real dask cluster."""
        self._check_open()
        from distributed import Client
        from distributed.security import Security

        mine = self._authority.issue("dask-client")
        security = Security(
            require_encryption=True, tls_ca_file=mine.ca, tls_client_cert=mine.cert, tls_client_key=mine.key
        )
        return Client(self._site.scheduler, security=security, set_as_default=False)

    def __reduce__(self) -> Any:
        raise TypeError("a ComputePool stays in the process that opened it; it cannot be sent to a node.")

    def _emit(self, event: events.Event) -> None:
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                log.exception("a listener raised on %r", event)

    def _check_open(self) -> None:
        self._check_process()
        if self._state != "open":
            raise PoolClosed(
                f"the pool is {'not open yet' if self._state in ('new', 'opening') else self._state}; "
                "calls are sent inside `with sky.ComputePool(...) as pool:`."
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid and self._state != "new":
            raise ForkedPoolError(
                f"this pool was opened by process {self._pid}, of which this one ({os.getpid()}) is a fork. "
                "Use it there, or open another pool here."
            )


class _Mapping:
    """`map` in chunks: the first ones are small, the next as large as the measured time per item allows."""

    def __init__(self, pool: ComputePool, fn: Any, items: list[Any], timeout: float | None, slots: int) -> None:
        self._pool, self._fn, self._items, self._timeout, self._slots = pool, fn, items, timeout, slots
        self._per_item: float | None = None

    def run(self) -> list[Any]:
        results: list[Any] = [None] * len(self._items)
        pending: dict[Future[Any], tuple[int, int]] = {}
        at = 0
        try:
            while pending or at < len(self._items):
                chunks: list[tuple[int, int]] = []
                while at < len(self._items) and len(pending) + len(chunks) < self._slots * 2:
                    size = self._size(len(self._items) - at)
                    chunks.append((at, at + size))
                    at += size
                calls = [PendingCompute(_apply, (self._fn, self._items[a:b]), {}, self._timeout) for a, b in chunks]
                pending |= dict(zip(self._pool._sent(calls), chunks, strict=True))  # pyright: ignore[reportPrivateUsage] - same module
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    start, end = pending.pop(future)
                    seconds, results[start:end] = future.result()
                    self._per_item = seconds / (end - start)
        except BaseException:
            for future in pending:
                future.cancel()
            raise
        return results

    def _size(self, left: int) -> int:
        if self._timeout is not None or self._per_item is None:
            return 1
        share = -(-left // (self._slots * 3))
        return max(1, min(left, share, int(_MAP_SECONDS / max(self._per_item, 1e-7))))


def _apply(fn: Callable[[Any], Any], items: list[Any]) -> tuple[float, list[Any]]:
    began = time.perf_counter()
    results = [fn(item) for item in items]
    return time.perf_counter() - began, results


class _Signals:
    """While open, SIGTERM and SIGHUP end the program as leaving the with-block would, not at once."""

    def __enter__(self) -> None:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._before[number] = signal.signal(number, _exit_on_signal)

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) is _exit_on_signal:
                signal.signal(number, handler)


def _exit_on_signal(number: int, _: object) -> None:
    sys.exit(128 + number)


_OPEN: weakref.WeakSet[ComputePool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_OPEN):
        pool.close()


def _let_go_in_child() -> None:
    for pool in list(_OPEN):
        pool._engine.after_fork()  # pyright: ignore[reportPrivateUsage] - same module
        pool._site.after_fork()  # pyright: ignore[reportPrivateUsage] - same module


os.register_at_fork(after_in_child=_let_go_in_child)


def _error_of(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError as exc:
        return exc


def _gathered(futures: Sequence[Future[Any]]) -> Iterator[Any]:
    """Results in order; the first failure, in time, cancels the rest."""
    try:
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
        for future in futures:
            yield future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _combine(futures: Sequence[Future[Any]], combined: Future[Any]) -> None:
    left = itertools.count(len(futures) - 1, -1)

    def settled(future: Future[Any]) -> None:
        error = _error_of(future)
        if error is not None and not combined.done():
            for other in futures:
                other.cancel()
            if not combined.done():
                combined.set_exception(error)
        if next(left) == 0 and not combined.done():
            combined.set_result(tuple(f.result() for f in futures))

    if not futures:
        combined.set_result(())
    for future in futures:
        future.add_done_callback(settled)


def _streamed(futures: Sequence[Future[T]], ordered: bool) -> Iterator[T]:
    try:
        if ordered:
            for future in futures:
                yield future.result()
            return
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        for future in futures:
            future.cancel()


def _chosen(specs: Sequence[Spec], provider: Provider | None, options: dict[str, Any]) -> tuple[Provider, Spec]:
    if specs and provider is not None:
        raise InvalidArgument("give either Spec objects or provider=..., not both: a Spec names its own provider.")
    for spec in specs:
        _checked("specs", spec, Spec)
    if len(specs) > 1:
        raise InvalidArgument("one Spec is taken for now: choosing among several comes with the cloud providers.")
    spec = specs[0] if specs else Spec(provider=provider, **options)
    chosen = spec.provider if spec.provider is not None else Local()
    if isinstance(chosen, type) and issubclass(chosen, Provider):
        raise InvalidArgument(f"provider={chosen.__name__}: add parentheses, provider=sky.{chosen.__name__}().")
    return _checked("provider", chosen, Provider), spec


def _chosen_worker(concurrency: int | None, worker: Worker | None) -> Worker:
    if concurrency is not None and worker is not None:
        raise InvalidArgument("give either concurrency=n or worker=sky.Worker(...), not both.")
    if worker is not None:
        return _checked("worker", worker, Worker)
    return Worker(concurrency=concurrency) if concurrency is not None else Worker()


def _checked(name: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name}={value!r}: a sky.{kind.__name__} is wanted here.")
    return value


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, list | tuple):
        return tuple(cast("Sequence[Any]", value))
    raise InvalidArgument(f"{name}={value!r}: a list is wanted, even for one: {name}=[...].")


def _accelerator_info(wanted: Accelerator, count: int) -> AcceleratorInfo:
    digits = "".join(c for c in wanted.memory if c.isdigit() or c == ".")
    return AcceleratorInfo(
        type=wanted.name,
        count=count,
        memory_gb=float(digits) if digits else None,
        is_trainium=wanted.name.lower().startswith("trainium"),
    )


def _thread_counts(processes: int, env: dict[str, str]) -> dict[str, str]:
    """Nodes that share this computer's cores must not each start a thread for every one of them."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    each = str(max(1, (os.cpu_count() or 1) // processes))
    return {name: each for name in names if name not in os.environ and name not in env}


def _included(image: Image) -> list[str]:
    """Where included modules lie on this computer: nodes have them too, so they travel by name."""
    return [str((Path.cwd() / include).resolve()) for include in image.includes]


def _program() -> str:
    name = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "python").stem
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:30] + "-" + secrets.token_hex(2)
