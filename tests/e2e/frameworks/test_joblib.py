"""joblib on a real pool: what n_jobs means, results, failures, what travels, and what is restored."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator
from multiprocessing import TimeoutError as ParallelTimeout

import joblib
import numpy as np
import pytest
from joblib import Parallel, delayed, parallel_config
from joblib.parallel import get_active_backend

import skyward as sky
from skyward.errors import InvalidArgument, NotSerializable
from skyward.events import GroupProgress


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.integrations.JoblibPool(nodes=2, concurrency=2, console=False) as opened:
        yield opened


def square(x: int) -> int:
    return x * x


def pid(_: object = None) -> int:
    return os.getpid()


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def fail_at(number: int, bad: int) -> int:
    if number == bad:
        raise KeyError(f"number {number}")
    time.sleep(0.01)
    return number


def fail_late(seconds: float) -> None:
    time.sleep(seconds)
    raise KeyError("too late")


def about(array: np.ndarray) -> tuple[bool, float, int]:
    return array.flags.writeable, float(array.sum()), os.getpid()


def test_a_hundred_squares_come_back_in_order(pool: sky.ComputePool) -> None:
    """S0-38, S0-40, S0-43."""
    assert Parallel(n_jobs=-1)(delayed(square)(i) for i in range(100)) == [i * i for i in range(100)]


def test_calls_run_in_the_processes_of_the_nodes(pool: sky.ComputePool) -> None:
    """S0-37, S0-44: n_jobs=-1 uses every slot, each a process of its own, none of them here."""
    pids = Parallel(n_jobs=-1, batch_size=1)(delayed(lambda: (time.sleep(0.1), os.getpid())[1])() for _ in range(12))
    assert len(set(pids)) == 4
    assert os.getpid() not in pids


def test_n_jobs_means_what_joblib_says(pool: sky.ComputePool) -> None:
    """S0-45, T9."""
    wanted = {-1: 4, -2: 3, -9: 1, 3: 3, 1: 1, None: 1, 100: 4}
    assert {n: joblib.effective_n_jobs(n) for n in wanted} == wanted
    with pytest.raises(ValueError, match="n_jobs == 0"):
        Parallel(n_jobs=0)(delayed(square)(i) for i in range(3))


def test_one_job_or_none_said_runs_here(pool: sky.ComputePool) -> None:
    """T9: joblib promises a plain loop for n_jobs=1, and that None is 1 unless the context says otherwise."""
    assert set(Parallel(n_jobs=1)(delayed(pid)() for _ in range(3))) == {os.getpid()}
    assert set(Parallel()(delayed(pid)() for _ in range(3))) == {os.getpid()}
    with parallel_config(n_jobs=-1):
        assert os.getpid() not in Parallel()(delayed(pid)() for _ in range(3))


def test_no_more_than_n_jobs_run_at_a_time(pool: sky.ComputePool) -> None:
    """T9: three jobs on four slots, although joblib hands out twice as many batches ahead."""

    def span() -> tuple[float, float]:
        began = time.time()
        time.sleep(0.05)
        return began, time.time()

    spans = Parallel(n_jobs=3, batch_size=1, pre_dispatch="all")(delayed(span)() for _ in range(12))
    most = max(sum(a <= began < b for a, b in spans) for began, _ in spans)
    assert 2 <= most <= 3


def test_an_exception_keeps_its_type_and_says_where(pool: sky.ComputePool) -> None:
    with pytest.raises(KeyError, match="number 3") as caught:
        Parallel(n_jobs=-1)(delayed(fail_at)(i, 3) for i in range(20))
    assert any("on node" in note and "fail_at" in note for note in caught.value.__notes__)


def test_a_failure_cancels_what_is_still_to_run(pool: sky.ComputePool) -> None:
    """T9: abort stops bodies that run and batches that wait; the pool takes the next calls."""
    began = time.monotonic()
    with pytest.raises(KeyError):
        Parallel(n_jobs=-1, batch_size=1, pre_dispatch="all")(
            [delayed(fail_late)(0.5), *(delayed(nap)(90) for _ in range(10))]  # the first has a slot for sure
        )
    assert Parallel(n_jobs=-1)(delayed(square)(i) for i in range(8)) == [i * i for i in range(8)]
    assert time.monotonic() - began < 80  # nobody slept to the end


def test_a_time_limit_ends_a_parallel(pool: sky.ComputePool) -> None:
    assert Parallel(n_jobs=2, timeout=20)(delayed(nap)(0.01) for _ in range(4)) == [0.01] * 4
    with pytest.raises(ParallelTimeout):
        Parallel(n_jobs=2, timeout=0.2)(delayed(nap)(20) for _ in range(4))


def test_results_can_be_taken_one_by_one(pool: sky.ComputePool) -> None:
    ordered = Parallel(n_jobs=2, return_as="generator")(delayed(nap)(s) for s in (0.3, 0.01, 0.02))
    assert list(ordered) == [0.3, 0.01, 0.02]
    fastest = Parallel(n_jobs=2, return_as="generator_unordered", batch_size=1)(delayed(nap)(s) for s in (0.5, 0.01))
    assert list(fastest) == [0.01, 0.5]


def test_a_generator_that_is_dropped_cancels_the_rest(pool: sky.ComputePool) -> None:
    results = Parallel(n_jobs=2, return_as="generator", batch_size=1)(delayed(nap)(s) for s in (0.01, 20, 20))
    assert next(results) == 0.01
    with pytest.warns(UserWarning, match="cancelled"):
        del results
    assert Parallel(n_jobs=2)(delayed(square)(i) for i in range(3)) == [0, 1, 4]


def test_two_generators_at_a_time_do_not_disturb_each_other(pool: sky.ComputePool) -> None:
    first = Parallel(n_jobs=2, return_as="generator")(delayed(nap)(0.02) for _ in range(6))
    second = Parallel(n_jobs=2, return_as="generator")(delayed(square)(i) for i in range(6))
    assert list(second) == [i * i for i in range(6)]
    assert list(first) == [0.02] * 6


def test_tasks_are_read_only_as_far_ahead_as_said(pool: sky.ComputePool) -> None:
    taken: list[int] = []

    def tasks() -> Iterator[object]:
        for i in range(20):
            taken.append(i)
            yield delayed(nap)(0.05)

    results = Parallel(n_jobs=2, batch_size=1, pre_dispatch=3, return_as="generator")(tasks())
    assert len(taken) == 3
    assert len(list(results)) == 20


def test_an_iterator_of_tasks_may_use_the_pool_and_may_raise(pool: sky.ComputePool) -> None:
    """It is read in a thread of ours, never in the engine's."""

    def tasks() -> Iterator[object]:
        for i in range(12):
            yield delayed(square)(sky.compute(square)(i) >> pool)

    assert Parallel(n_jobs=2, batch_size=1)(tasks()) == [i**4 for i in range(12)]

    def broken() -> Iterator[object]:
        yield from (delayed(nap)(0.01) for _ in range(10))
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        Parallel(n_jobs=2)(broken())


def test_a_parallel_can_be_used_again_after_it_failed(pool: sky.ComputePool) -> None:
    """What one call left behind when it was aborted takes no room from the next."""
    with Parallel(n_jobs=2, batch_size=1) as parallel:
        for _ in range(10):
            with pytest.raises(KeyError):
                parallel(delayed(fail_at)(i, 1) for i in range(8))
            assert parallel(delayed(square)(i) for i in range(8)) == [i * i for i in range(8)]


def first_then_fail(i: int) -> int:
    if i:
        time.sleep(0.3 if i == 1 else 30)
        raise KeyError(i)
    return i


def test_tasks_of_a_call_that_failed_are_not_run_in_the_next(pool: sky.ComputePool) -> None:
    """joblib cuts tasks into batches ahead of time and keeps them; with loky the next call returns one result more."""
    with Parallel(n_jobs=2, batch_size=1) as parallel:
        with pytest.raises(KeyError):
            parallel(delayed(first_then_fail)(i) for i in range(8))
        assert parallel(delayed(square)(i) for i in range(3)) == [0, 1, 4]


def test_many_short_calls_travel_in_few_batches(pool: sky.ComputePool) -> None:
    parallel = Parallel(n_jobs=-1, batch_size="auto")
    assert sum(parallel(delayed(square)(i) for i in range(2000))) == sum(i * i for i in range(2000))
    assert parallel.n_dispatched_batches < 400
    fixed = Parallel(n_jobs=-1, batch_size=50)
    fixed(delayed(square)(i) for i in range(2000))
    assert 40 <= fixed.n_dispatched_batches < 400


def test_progress_is_shown(pool: sky.ComputePool, capsys: pytest.CaptureFixture[str]) -> None:
    Parallel(n_jobs=2, verbose=11)(delayed(square)(i) for i in range(4))
    shown = capsys.readouterr().err
    assert "SkywardBackend with 2 concurrent workers" in shown
    assert "Done   4 out of   4" in shown


class Heard:
    """How far groups of a pool are."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self.events: list[GroupProgress] = []
        self.stop = pool.on_event(lambda event: isinstance(event, GroupProgress) and self.events.append(event))


@pytest.mark.parametrize("tasks", ["generator", "list", "all", "unknown"])
def test_a_parallel_says_how_far_it_is(pool: sky.ComputePool, tasks: str) -> None:
    heard = Heard(pool)
    calls = (delayed(nap)(0.02) for i in range(80))
    if tasks == "unknown":
        calls = (call for call in calls if call)
    before = "all" if tasks == "all" else "2*n_jobs"
    Parallel(n_jobs=-1, pre_dispatch=before, batch_size=1)(list(calls) if tasks == "list" else calls)
    heard.stop()
    assert len({event.group for event in heard.events}) == 1
    first, last = heard.events[0], heard.events[-1]
    assert (last.name, last.done, last.total, last.over) == ("nap", 80, 80, True)
    assert [event.done for event in heard.events] == sorted(event.done for event in heard.events)
    if tasks in ("generator", "list"):
        assert first.total == 80
        assert first.left is not None
    elif tasks == "unknown":
        assert first.total is None


def test_a_parallel_that_fails_is_over_for_those_who_watch(pool: sky.ComputePool) -> None:
    heard = Heard(pool)
    with pytest.raises(KeyError):
        Parallel(n_jobs=-1, batch_size=1)(delayed(fail_at)(i, 5) for i in range(100))
    heard.stop()
    assert heard.events[-1].over
    assert heard.events[-1].failed >= 1
    assert heard.events[-1].done < 99


def test_progress_of_a_parallel_can_be_silenced(pool: sky.ComputePool) -> None:
    heard = Heard(pool)
    with sky.integrations.joblib_backend(pool, progress=False):
        Parallel(n_jobs=-1)(delayed(nap)(0.01) for _ in range(8))
    with parallel_config("skyward", progress=False):
        Parallel(n_jobs=-1)(delayed(nap)(0.01) for _ in range(8))
    heard.stop()
    assert heard.events == []


def test_a_grid_search_says_how_far_it_is(pool: sky.ComputePool) -> None:
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GridSearchCV

    heard = Heard(pool)
    numbers = np.arange(40.0).reshape(20, 2)
    GridSearchCV(Ridge(), {"alpha": [0.1, 1.0, 10.0, 100.0]}, cv=5, n_jobs=-1).fit(numbers, numbers[:, 0])
    heard.stop()
    assert heard.events[-1].over
    assert (heard.events[-1].done, heard.events[-1].total) == (20, 20)


def test_a_parallel_inside_a_task_runs_there_one_by_one(pool: sky.ComputePool) -> None:
    def inner() -> tuple[set[int], int, str, int]:
        pids = set(Parallel(n_jobs=4)(delayed(os.getpid)() for _ in range(4)))
        named = set(Parallel(n_jobs=4, backend="skyward")(delayed(os.getpid)() for _ in range(4)))
        return pids | named, os.getpid(), type(get_active_backend()[0]).__name__, joblib.effective_n_jobs(-1)

    for pids, own, backend, jobs in Parallel(n_jobs=-1)(delayed(inner)() for _ in range(4)):
        assert (pids, backend, jobs) == ({own}, "SequentialBackend", 1)


def test_a_large_array_travels_once_and_arrives_read_only(pool: sky.ComputePool) -> None:
    """Twelve tasks, one blob; as with joblib's memory maps a small array can be written, a large one not."""
    blobs = pool._store._index._blobs
    held = set(blobs)
    large, small = np.arange(500_000.0), np.ones(10)
    got = Parallel(n_jobs=-1, batch_size=1)(delayed(about)(large) for _ in range(12))
    assert {(writeable, total) for writeable, total, _ in got} == {(False, large.sum())}
    assert [blobs[name][1] for name in set(blobs) - held] == [large.nbytes]
    assert {w for w, _, _ in Parallel(n_jobs=2)(delayed(about)(small) for _ in range(3))} == {True}
    assert {w for w, _, _ in Parallel(n_jobs=2, mmap_mode="c")(delayed(about)(large) for _ in range(3))} == {True}
    assert {w for w, _, _ in Parallel(n_jobs=2, max_nbytes=None)(delayed(about)(large) for _ in range(3))} == {True}


def test_what_cannot_travel_is_named_and_nothing_hangs(pool: sky.ComputePool) -> None:
    lock = threading.Lock()
    with pytest.raises(NotSerializable, match="lock"):
        Parallel(n_jobs=2)(delayed(square)(lock) for _ in range(3))
    later = (delayed(square)(i if i < 9 else lock) for i in range(12))
    with pytest.raises(NotSerializable, match="lock"):
        Parallel(n_jobs=2, batch_size=1)(later)


def test_settings_of_other_backends_are_refused(pool: sky.ComputePool) -> None:
    with pytest.raises(InvalidArgument, match="initializer"):
        Parallel(n_jobs=2, initializer=print)(delayed(square)(i) for i in range(3))


def test_filters_for_warnings_stay_as_they_are(pool: sky.ComputePool) -> None:
    """T9: filters were once removed for good; here they travel, and a class that a node lacks does no harm."""
    from skyward.plugins._joblib import _warning

    before = list(warnings.filters)
    Parallel(n_jobs=2)(delayed(square)(i) for i in range(4))
    assert warnings.filters == before
    assert _warning("numpy.exceptions", "ComplexWarning") is np.exceptions.ComplexWarning
    assert issubclass(_warning("not_installed_anywhere", "SomeWarning"), Warning)
