"""pool.executor is a concurrent.futures.Executor: our own tests, and CPython's where this interpreter has them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib
import os
import threading
import time
import unittest
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import skyward as sky
from skyward.client.gather import PoolExecutor


class Thing:
    def method(self) -> None:
        pass


def make_thing(_: int) -> Thing:
    return Thing()


def captured(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def test_it_is_an_executor_and_its_futures_are_futures(pool: sky.ComputePool) -> None:
    assert isinstance(pool.executor, concurrent.futures.Executor)
    future = pool.executor.submit(pow, 2, 8)
    assert isinstance(future, concurrent.futures.Future)
    assert future.result(45) == 256


def test_any_name_may_be_a_keyword(pool: sky.ComputePool) -> None:
    assert pool.executor.submit(captured, 1, self=2, fn=3).result(45) == ((1,), {"self": 2, "fn": 3})
    with pytest.raises(TypeError):
        pool.executor.submit(fn=captured, arg=1)  # type: ignore[call-arg]


def test_a_compute_function_is_taken_as_the_function_it_is(pool: sky.ComputePool) -> None:
    assert pool.executor.submit(sky.compute(pow), 2, 3).result(45) == 8


def test_map_keeps_order_and_takes_a_chunk_size(pool: sky.ComputePool) -> None:
    assert list(pool.executor.map(pow, range(10), range(10))) == [i**i for i in range(10)]
    assert list(pool.executor.map(pow, range(10), range(10), chunksize=3)) == [i**i for i in range(10)]


def test_map_raises_where_the_failure_lies(pool: sky.ComputePool) -> None:
    results = pool.executor.map(divmod, [1, 1, 1], [2, 0, 5])
    assert next(results) == (0, 1)
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_map_has_a_time_limit(pool: sky.ComputePool) -> None:
    results = pool.executor.map(time.sleep, [0, 60], timeout=2)
    assert next(results) is None
    with pytest.raises(TimeoutError):
        next(results)


def test_shutting_down_waits_and_then_refuses(pool: sky.ComputePool) -> None:
    executor = pool.executor
    futures = [executor.submit(time.sleep, 0.05) for _ in range(6)]
    executor.shutdown()
    assert all(f.done() and not f.cancelled() for f in futures)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(pow, 1, 1)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.map(abs, [1])
    executor.shutdown()
    assert pool.executor.submit(abs, -1).result(45) == 1


def test_it_is_the_same_object_until_it_is_shut_down(pool: sky.ComputePool) -> None:
    future = pool.executor.submit(time.sleep, 0.2)
    assert pool.executor is pool.executor
    pool.executor.shutdown(wait=True)
    assert future.done()


def test_leaving_its_block_waits_and_leaves_the_pool_open(pool: sky.ComputePool) -> None:
    with pool.executor as executor:
        future = executor.submit(time.sleep, 0.1)
    assert future.done()
    assert pool.is_active


def test_shutting_down_with_cancel_keeps_what_runs(pool: sky.ComputePool) -> None:
    executor = pool.executor
    futures = [executor.submit(time.sleep, 0.1) for _ in range(40)]
    executor.shutdown(cancel_futures=True)
    assert all(f.done() for f in futures)
    cancelled = sum(f.cancelled() for f in futures)
    assert 20 <= cancelled < 40
    assert all(f.exception() is None for f in futures if not f.cancelled())


def test_shutting_down_without_waiting_lets_calls_end(pool: sky.ComputePool) -> None:
    executor = pool.executor
    future = executor.submit(time.sleep, 0.1)
    executor.shutdown(wait=False)
    assert future.result(45) is None


def test_an_argument_may_submit_while_it_is_pickled(pool: sky.ComputePool) -> None:
    executor, inner = pool.executor, list[Future[int]]()

    class Submits:
        def __reduce__(self) -> Any:
            inner.append(executor.submit(abs, -2))
            return int, (-1,)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(executor.submit, abs, Submits()).result(45).result(45) == 1
    assert inner[0].result(45) == 2


def test_what_is_sent_while_it_is_shut_down_is_refused_and_stopped() -> None:
    future: Future[Any] = Future()

    def send(_: Sequence[Any]) -> list[Future[Any]]:
        executor.shutdown()  # as another thread may
        return [future]

    executor = PoolExecutor(send)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(abs, -1)
    assert future.cancelled()


def test_it_keeps_no_reference_to_what_it_ran(pool: sky.ComputePool) -> None:
    thing = Thing()
    gone = threading.Event()
    watch = weakref.ref(thing, lambda _: gone.set())
    pool.executor.submit(thing.method)
    del thing
    assert gone.wait(45)
    assert watch() is None


def test_map_keeps_no_reference_to_results(pool: sky.ComputePool) -> None:
    for thing in pool.executor.map(make_thing, range(10)):
        watch = weakref.ref(thing)
        del thing
        gc.collect()
        assert watch() is None


def test_an_event_loop_can_use_it(pool: sky.ComputePool) -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(pool.executor, abs, -i) for i in range(10)))

    assert asyncio.run(main()) == list(range(10))


def test_bodies_run_elsewhere(pool: sky.ComputePool) -> None:
    assert os.getpid() not in pool.executor.map(lambda _: os.getpid(), range(4))


# CPython's own tests. Left out, since they are about the executors of the standard library:
#   test_max_workers_negative (the pool has the workers), test_map_timeout (6 s; the same above in 0.5 s), and those of
#   initializers, of broken process pools and of idle threads (other classes than ExecutorTest).
LEFT_OUT = {"test_max_workers_negative", "test_map_timeout"}


def borrowed() -> Any:
    for name in ("test.test_concurrent_futures.executor", "test.test_concurrent_futures"):
        try:
            return importlib.import_module(name).ExecutorTest
        except (ImportError, AttributeError, unittest.SkipTest):
            continue
    return None


EXECUTOR_TEST: Any = borrowed()


@pytest.mark.skipif(EXECUTOR_TEST is None, reason="this interpreter comes without CPython's own tests")
@pytest.mark.parametrize("name", sorted(n for n in dir(EXECUTOR_TEST) if n.startswith("test_") and n not in LEFT_OUT))
def test_what_cpython_asks_of_an_executor(pool: sky.ComputePool, name: str) -> None:
    class Case(EXECUTOR_TEST, unittest.TestCase):
        worker_count = 2

        def setUp(self) -> None:
            self.executor = pool.executor

        def tearDown(self) -> None:
            self.executor.shutdown(wait=True)

    result = unittest.TestResult()
    Case(name).run(result)
    assert not result.errors, result.errors[0][1]
    assert not result.failures, result.failures[0][1]
