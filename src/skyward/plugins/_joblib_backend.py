"""The joblib backend itself; only this file imports joblib at its top, and only the other half imports this file.

    joblib's thread   submit -> waiting -> at most `n_jobs` batches on the pool
    engine's thread   a batch is done -> queue
    our thread        queue -> joblib's callback: takes the result, reads the user's iterator, submits more

The engine's own thread reads all links, so nothing of the user's runs there: an iterator of tasks may block.
"""

# joblib has no types, and its base class returns None where it means a number:
# pyright: reportIncompatibleMethodOverride=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
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

from skyward.api.compute import Chunk, PendingCompute, name_of
from skyward.api.image import check_number
from skyward.client.callbacks import when_done
from skyward.errors import InvalidArgument
from skyward.plugins._joblib import Lacking, Slots, Tasks, open_pool, packages_with, runs
from skyward.plugins._joblib_progress import TaskCounter

__all__ = ["SkywardBackend", "default_for_threads", "parallel_config"]

Callback = Callable[[Any], None]
_News = tuple["_Sent", Future[Any]] | Literal["added", "stop"]

_STEP = 8
_AT_ONCE = 16
# What joblib hands to every backend; those that concern the temporary files of its own process pool mean nothing here.
_SETTINGS = {"temp_folder", "max_nbytes", "mmap_mode", "prefer", "require", "verbose", "context"}


class SkywardBackend(AutoBatchingMixin, ParallelBackendBase):
    """Sends joblib's batches to the slots of a pool: the one given, or the one opened last.

    The instance in joblib's configuration sends nothing itself: every Parallel gets a copy with its own batch sizes and
    its own calls to abort.
    """

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
        """How many batches run at a time: joblib's meaning, with the pool's slots in the place of cores."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None or n_jobs == 1:
            return 1
        slots = self._slots()
        count = min(n_jobs, slots) if n_jobs > 0 else max(slots + 1 + n_jobs, 1)
        return _Elsewhere(count) if self.parallel is not None else count

    def configure(self, n_jobs: int = 1, parallel: Any = None, **settings: Any) -> int:
        """Prepares for the calls of one Parallel, which gets a backend of its own."""
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
        """What joblib would use inside a task; nodes make their own, see `_Runs`."""
        return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None

    def compute_batch_size(self) -> int:
        """How many calls the next batch has; where calls are very short, joblib's doubling would take many rounds."""
        if 0 < self._smoothed_batch_duration < self.MIN_IDEAL_BATCH_DURATION / _STEP:
            self._effective_batch_size *= _STEP // 2
            self._smoothed_batch_duration *= _STEP // 2
        return super().compute_batch_size()

    def start_call(self) -> None:
        """A Parallel is called: its batches have a thread of their own."""
        # joblib cuts tasks into batches ahead of time. After a call that failed it would run the rest in the next one.
        ahead: Any = getattr(self.parallel, "_ready_batches", None)
        while ahead is not None and not ahead.empty():
            ahead.get_nowait()
        counted = TaskCounter(self._target(), self.parallel) if self._progress else None
        self._traffic = _Traffic(self._target(), self._limit, (self.nesting_level or 0) + 1, self._frozen, counted)

    def stop_call(self) -> None:
        """The call is over."""
        self._running().stop()

    def terminate(self) -> None:
        """Forgets the batch sizes of this Parallel; the pool is not ours to close."""
        self.reset_batch_stats()

    def submit(self, func: Any, callback: Callback) -> None:
        """Takes a batch, to be sent as soon as fewer than `n_jobs` are out."""
        self._running().add(func, callback)

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """The results of a finished batch, or its exception."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancels what this Parallel has on the pool; bodies that run are stopped there."""
        self._running().abort()

    def _running(self) -> _Traffic:
        assert self._traffic is not None, "joblib says start_call first"
        return self._traffic

    def _slots(self) -> int:
        return self._target().slots

    def _target(self) -> Slots:
        return open_pool() if self._given is None else self._given


class _Traffic:
    """The batches of one call of a Parallel, with the thread that sends them and hears of their end."""

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
        """Has a batch sent when there is room for it."""
        if self._counted is not None:
            self._counted.sent(batch)
        with self._lock:
            self._waiting.append((batch, callback))
        self._news.put("added")

    def stop(self) -> None:
        """Ends the thread when it has heard of what is done."""
        if self._counted is not None:
            self._counted.end()
        self._news.put("stop")

    def abort(self) -> None:
        """Drops what waits and cancels what is out."""
        with self._lock:
            self._aborted = True
            self._waiting.clear()
            sent = list(self._sent)
        for future in sent:
            future.cancel()

    def _hear(self) -> None:
        """Calls back for every batch that is done, and sends what waits: several batches in one go."""
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
        """Puts on the nodes what a batch needs there; if that cannot be known, the batch will raise its own error."""
        paths = _added.get(self._pool, ())
        if paths != known:
            return  # another batch has had it added since
        if self._aborted:
            raise CancelledError
        added = tuple(self._pool.add_packages(packages_with(module))) if packages_with(module) else paths
        self._raises = added == paths
        _added[self._pool] = added

    def _send(self) -> bool:
        """Sends some of the batches that wait, as the limit allows; False when there were none."""
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
            return self._pool.submit_all(calls)
        except Exception as exc:  # joblib raises it where the Parallel was called, and stops the rest
            if len(calls) > 1:
                return [future for call in calls for future in self._submitted([call])]
            return [_failed(exc)]


class _Sent(NamedTuple):
    """A batch that is with the nodes, and the paths of added packages that it was told of."""

    batch: Any
    callback: Callback
    paths: Sequence[str]


_added: WeakKeyDictionary[Slots, Sequence[str]] = WeakKeyDictionary()
"""Where the nodes of a pool have packages that calls of joblib needed and its image did not name."""


def _failed(error: Exception) -> Future[Any]:
    failed: Future[Any] = Future()
    failed.set_exception(error)
    return failed


_default = cast("Any", default_parallel_config["backend"])
_defaults: list[Any] = [_default.default_value]
_defaults_lock = threading.Lock()


@contextmanager
def default_for_threads(backend: SkywardBackend) -> Generator[None]:
    """Has every thread use `backend` that has chosen none itself: `parallel_config` speaks for its own thread only."""
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
    """A number of workers that is never equal to 1: joblib would run the calls of one worker in this process."""

    def __eq__(self, other: object) -> bool:
        return int(self) != 1 and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


register_parallel_backend("skyward", SkywardBackend)
