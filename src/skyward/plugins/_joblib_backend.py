# pyright: reportIncompatibleMethodOverride=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The joblib backend. Only this file imports joblib at its top, and only `_joblib` imports this file.

joblib's thread    submit -> waiting -> at most `n_jobs` batches on the pool
engine's thread    a batch is done -> queue
our thread         queue -> joblib's callback: takes the result, reads the user's iterator, submits more
"""

from __future__ import annotations

import dis
import gc
import itertools
import math
import operator
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from types import CodeType, GeneratorType
from typing import Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary

from joblib.parallel import (
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
    default_parallel_config,
    parallel_config,
    register_parallel_backend,
)

from skyward.api.compute import Chunk, Compute, PendingCompute, name_of
from skyward.api.image import check_number
from skyward.client.futures import when_done
from skyward.errors import InvalidArgument
from skyward.plugins._joblib import Lacking, Slots, Tasks, open_pool, packages_with, runs

__all__ = ["SkywardBackend", "default_for_threads", "parallel_config", "tasks_in"]


Callback = Callable[[Any], None]
_News = tuple["_Sent", Future[Any]] | Literal["added", "stop"]

_STEP = 8
_AT_ONCE = 16
# What joblib hands to every backend; those that concern the temporary files of its own process pool mean nothing here.
_SETTINGS = {"temp_folder", "max_nbytes", "mmap_mode", "prefer", "require", "verbose", "context"}


class SkywardBackend(AutoBatchingMixin, ParallelBackendBase):
    """Uses the given pool, or the one opened last. Each Parallel gets a copy of the configured instance."""

    # A round trip costs well under a millisecond here, so batches can be shorter than those of a process pool.
    MIN_IDEAL_BATCH_DURATION = 0.05
    MAX_IDEAL_BATCH_DURATION = 0.5
    supports_retrieve_callback = True
    supports_sharedmem = False
    uses_threads = False
    parallel: Any = None

    def __init__(
        self,
        pool: Slots | None = None,
        max_inflight: int | None = None,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        progress: bool = True,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        if max_inflight is not None:
            check_number("max_inflight", max_inflight)
        self._given, self._max_inflight, self._progress = pool, max_inflight, progress
        self._limit: int | None = None
        self._frozen: int | None = None
        self._traffic: _Traffic | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None or n_jobs == 1:
            return 1
        slots = self._slots()
        count = min(n_jobs, slots) if n_jobs > 0 else max(slots + 1 + n_jobs, 1)
        return _Elsewhere(count) if self.parallel is not None else count

    def configure(self, n_jobs: int = 1, parallel: Any = None, **settings: Any) -> int:
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        unknown = settings.keys() - _SETTINGS
        if unknown:
            raise InvalidArgument(
                f"{', '.join(sorted(unknown))}: Parallel on a pool has no such setting; it belongs to another backend "
                "of joblib. Leave it out; what nodes need before a call goes into the pool's image or plugins."
            )
        if self.parallel is not parallel:
            own = SkywardBackend(self._target(), self._max_inflight, self.nesting_level, progress=self._progress)
            own.parallel = parallel
            raise FallbackToBackend(own)
        count = self.effective_n_jobs(n_jobs)
        self._limit = self._max_inflight if int(count) >= self._slots() else min(count, self._max_inflight or count)
        self._frozen = settings.get("max_nbytes") if settings.get("mmap_mode") == "r" else None
        return count

    def get_nested_backend(self) -> tuple[Any, int | None]:
        """See `_Runs`."""
        return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None

    def compute_batch_size(self) -> int:
        """joblib's doubling would take many rounds for very short calls."""
        if 0 < self._smoothed_batch_duration < self.MIN_IDEAL_BATCH_DURATION / _STEP:
            self._effective_batch_size *= _STEP // 2
            self._smoothed_batch_duration *= _STEP // 2
        return super().compute_batch_size()

    def start_call(self) -> None:
        # joblib cuts tasks into batches ahead of time. After a call that failed it would run the rest in the next one.
        ahead: Any = getattr(self.parallel, "_ready_batches", None)
        while ahead is not None and not ahead.empty():
            ahead.get_nowait()
        counted = TaskCounter(self._target(), self.parallel) if self._progress else None
        self._traffic = _Traffic(self._target(), self._limit, (self.nesting_level or 0) + 1, self._frozen, counted)

    def stop_call(self) -> None:
        self._running().stop()

    def terminate(self) -> None:
        self.reset_batch_stats()

    def submit(self, func: Any, callback: Callback) -> None:
        self._running().add(func, callback)

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        self._running().abort()

    def _running(self) -> _Traffic:
        assert self._traffic is not None, "joblib says start_call first"
        return self._traffic

    def _slots(self) -> int:
        return self._target().slots

    def _target(self) -> Slots:
        return open_pool() if self._given is None else self._given


class _Traffic:
    def __init__(
        self, pool: Slots, limit: int | None, level: int, frozen: int | None, counted: TaskCounter | None = None
    ) -> None:
        self._pool, self._limit, self._level, self._frozen = pool, limit, level, frozen
        self._counted = counted
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, Callback]] = deque()
        self._sent: set[Future[Any]] = set()
        self._aborted = False
        self._raises = False  # whether a node is to raise what it lacks
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        threading.Thread(target=self._hear, name="skyward-joblib", daemon=True).start()

    def add(self, batch: Any, callback: Callback) -> None:
        if self._counted is not None:
            self._counted.sent(batch)
        with self._lock:
            self._waiting.append((batch, callback))
        self._news.put("added")

    def stop(self) -> None:
        if self._counted is not None:
            self._counted.end()
        self._news.put("stop")

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            self._waiting.clear()
            sent = list(self._sent)
        for future in sent:
            future.cancel()

    def _hear(self) -> None:
        while True:
            news = [self._news.get()]
            while len(news) < _AT_ONCE and not self._news.empty():
                news.append(self._news.get())
            for item in news:
                if item == "stop":
                    return
                if isinstance(item, tuple):
                    self._hear_end(*item)
            while self._send():
                pass

    def _hear_end(self, sent: _Sent, future: Future[Any]) -> None:
        with self._lock:
            self._sent.discard(future)
        lacking = None if future.cancelled() or future.exception() else future.result()
        if isinstance(lacking, Lacking):
            try:
                self._add_packages(lacking.module, sent.paths)
                self.add(sent.batch, sent.callback)
                return
            except Exception as exc:  # joblib raises it where the Parallel was called
                future = _failed(exc)
        if self._counted is not None:
            self._counted.ended(sent.batch, future)
        sent.callback(future)

    def _add_packages(self, module: str, known: Sequence[str]) -> None:
        paths = _added.get(self._pool, ())
        if paths != known:
            return  # another batch has had it added since
        if self._aborted:
            raise CancelledError
        needed = packages_with(module)
        added = tuple(self._pool._add_packages(needed)) if needed else paths  # pyright: ignore[reportPrivateUsage] - not for users
        self._raises = added == paths
        _added[self._pool] = added

    def _send(self) -> bool:
        with self._lock:
            room = _AT_ONCE if self._limit is None else min(_AT_ONCE, self._limit - len(self._sent))
            batches = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if not batches:
            return False
        paths = _added.get(self._pool, ())
        futures = self._submitted([self._call(batch, paths) for batch, _ in batches])
        with self._lock:
            self._sent.update(futures)
            aborted = self._aborted
        for (batch, callback), future in zip(batches, futures, strict=True):
            if aborted:
                future.cancel()  # it was on its way when the rest was
            when_done(future, partial(self._done, _Sent(batch, callback, paths)))
        return True

    def _done(self, sent: _Sent, future: Future[Any]) -> None:
        self._news.put((sent, future))

    def _call(self, batch: Any, paths: Sequence[str]) -> PendingCompute[Any]:
        tasks = Tasks(batch.items, self._level, self._frozen, None if self._raises else paths)
        return PendingCompute(runs(name_of(batch.items[0][0])), (tasks,), chunk=Chunk(len(batch.items)))

    def _submitted(self, calls: list[PendingCompute[Any]]) -> list[Future[Any]]:
        try:
            for call in calls:
                _check_plain(call.args[0])
            return self._pool._send(calls)  # pyright: ignore[reportPrivateUsage] - not for users
        except Exception as exc:  # joblib raises it where the Parallel was called, and stops the rest
            if len(calls) > 1:
                return [future for call in calls for future in self._submitted([call])]
            return [_failed(exc)]


class _Sent(NamedTuple):
    batch: Any
    callback: Callback
    paths: Sequence[str]


_added: WeakKeyDictionary[Slots, Sequence[str]] = WeakKeyDictionary()


def _check_plain(tasks: Tasks) -> None:
    for fn, *_ in tasks.items:
        if isinstance(fn, Compute):
            name = name_of(fn.fn)
            raise InvalidArgument(
                f"Parallel got {name}, a @sky.compute function, which makes a call to be sent and runs nothing. Write "
                f"delayed({name}.local)(...), or without joblib `pool.map({name}, items)`."
            )


def _failed(error: Exception) -> Future[Any]:
    failed: Future[Any] = Future()
    failed.set_exception(error)
    return failed


_default = cast("Any", default_parallel_config["backend"])
_defaults: list[Any] = [_default.default_value]
_defaults_lock = threading.Lock()


@contextmanager
def default_for_threads(backend: SkywardBackend) -> Generator[None]:
    """`parallel_config` covers only its own thread."""
    # Not register_parallel_backend(make_default=True): what prefers threads, as random forests do, would stay here.
    with _defaults_lock:
        _defaults.append(backend)
        _set_default(backend)
    try:
        yield
    finally:
        with _defaults_lock:
            _defaults.remove(backend)
            _set_default(_defaults[-1])


def _set_default(backend: Any) -> None:
    object.__setattr__(_default, "default_value", backend)  # joblib freezes it, and has no other place for all threads


class _Elsewhere(int):
    """Never equals 1: joblib would run a single worker's calls here."""

    def __eq__(self, other: object) -> bool:
        return int(self) != 1 and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


register_parallel_backend("skyward", SkywardBackend)


# How far a Parallel of joblib's is: tasks are counted as their batches end, and how many there are is found out.
#
# joblib reads its tasks from an iterator as it needs them, mostly a generator expression over something of known
# length. That length is looked up, without reading anything ahead; where it cannot be, the total is known once joblib
# has come to the end of the iterator.


_DEEPEST = 5


class TaskCounter:
    def __init__(self, pool: Slots, parallel: Any) -> None:
        self._pool, self._parallel = pool, parallel
        self._counter: Any = None
        self._began = False

    def sent(self, batch: Any) -> None:
        """Called with joblib's lock held."""
        if not self._began:
            self._began = True
            name = name_of(batch.items[0][0])
            self._counter = self._pool._follow_group(name, self._expected())  # pyright: ignore[reportPrivateUsage] - not for users

    def ended(self, batch: Any, future: Future[Any]) -> None:
        if self._counter is None:
            return
        self._look_for_end()
        count = len(batch.items)
        if future.cancelled():
            self._counter.add(0, stopped=count)
        elif future.exception() is not None:
            self._counter.add(0, count)
        else:
            self._counter.add(count)

    def end(self) -> None:
        if self._counter is not None:
            self._look_for_end()
            self._counter.end()

    def _expected(self) -> int | None:
        known = getattr(self._parallel, "n_tasks", None)
        if known is not None:
            return known
        iterator = getattr(self._parallel, "_original_iterator", None)
        ahead: Any = getattr(self._parallel, "_ready_batches", None)
        if iterator is None or ahead is None:
            return None
        taken = self._parallel.n_dispatched_tasks + sum(len(batch) for batch in list(ahead.queue))
        return tasks_in(iterator, taken)

    def _look_for_end(self) -> None:
        parallel = self._parallel
        ahead: Any = getattr(parallel, "_ready_batches", None)
        read = getattr(parallel, "_original_iterator", self) is None and not getattr(parallel, "_aborting", False)
        if read and ahead is not None and ahead.empty():
            self._counter.expect(parallel.n_dispatched_tasks)


def tasks_in(iterator: Any, taken: int, depth: int = 0) -> int | None:
    if depth > _DEEPEST:
        return None
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        if frame is None or not _is_plain(iterator.gi_code):
            return taken if frame is None else None
        return tasks_in(frame.f_locals.get(".0"), taken, depth + 1)
    if isinstance(iterator, enumerate | zip):
        parts = cast("tuple[Any, ...]", iterator.__reduce__()[1])  # type: ignore[index]
        inner = parts[:1] if isinstance(iterator, enumerate) else parts
        found = [tasks_in(part, taken, depth + 1) for part in inner]
        counts = [count for count in found if count is not None]
        return min(counts) if counts and len(counts) == len(found) else None
    if isinstance(iterator, itertools.product):
        referred: list[Any] = gc.get_referents(iterator)  # what is multiplied comes first
        pools: Any = referred[0] if referred else None
        if not isinstance(pools, tuple) or not all(isinstance(pool, tuple) for pool in cast("Any", pools)):
            return None
        return math.prod(map(len, cast("tuple[Any, ...]", pools)))
    if type(iterator).__module__ != "builtins":
        return None  # what the user wrote is not asked
    left = operator.length_hint(iterator, -1)
    return taken + left if left >= 0 else None


def _is_plain(code: CodeType) -> bool:
    if code.co_name != "<genexpr>":
        return False
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    return names.count("FOR_ITER") == 1 and not any("JUMP" in name and "IF" in name for name in names)
