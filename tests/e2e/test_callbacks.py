"""Done-callbacks and event listeners of users in a real pool: they may make calls, block and raise."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

import skyward as sky
from skyward.errors import PoolClosed
from skyward.events import CallEnded, Event, Output


@sky.compute
def double(x: int) -> int:
    print(f"double {x}")
    return 2 * x


@sky.compute
def fail() -> None:
    raise ValueError("on purpose")


def ours() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name in ("skyward-callbacks", "skyward-events")}


def test_a_callback_may_make_calls(pool: sky.ComputePool) -> None:
    results: Future[int] = Future()

    def callback(future: Future[int]) -> None:
        results.set_result(double(future.result()) >> pool)

    pool.submit(double(5)).add_done_callback(callback)
    assert results.result(30) == 20


def test_a_callback_of_a_failed_and_of_a_cancelled_call_and_of_a_group_may_make_calls(pool: sky.ComputePool) -> None:
    results: list[int] = []
    ended = threading.Semaphore(0)

    def callback(_: Future[Any]) -> None:
        results.append(double(len(results)) >> pool)
        ended.release()

    pool.submit(fail()).add_done_callback(callback)
    waiting = pool.submit(sky.compute(time.sleep)(60))
    waiting.add_done_callback(callback)
    waiting.cancel()
    pool.submit_parallel(sky.gather(double(1), double(2))).add_done_callback(callback)
    for _ in range(3):
        assert ended.acquire(timeout=30)
    assert results == [0, 2, 4]


def test_a_listener_may_make_calls(pool: sky.ComputePool) -> None:
    results: Future[int] = Future()

    def listener(event: Event) -> None:
        if isinstance(event, CallEnded) and event.name == "double" and not results.done():
            remove()
            results.set_result(double(50) >> pool)

    remove = pool.on_event(listener)
    assert double(1) >> pool == 2
    assert results.result(30) == 100


def test_callbacks_and_listeners_that_block_or_raise_stop_nothing(gate: threading.Event, quiet: None) -> None:
    def bad(_: object) -> None:
        raise SystemExit("on purpose")

    began = time.monotonic()
    with sky.ComputePool(nodes=2, console=False) as pool:
        pool.on_event(bad)
        assert double(1) >> pool == 2
        pool.on_event(lambda _: gate.wait() and None)
        for act in (bad, lambda _: gate.wait()):
            pool.submit(double(1)).add_done_callback(act)
        called = threading.Event()
        pool.submit(double(1)).add_done_callback(lambda _: called.set())
        assert sky.gather(*(double(i) for i in range(50))) >> pool == tuple(2 * i for i in range(50))
        assert [double(i) >> pool for i in range(20)] == [2 * i for i in range(20)]
        assert double(3) @ pool == [6, 6]
        assert pool.map(abs, range(-3, 0)) == [3, 2, 1]
        with pytest.raises(ValueError, match="on purpose"):
            fail() >> pool
        assert called.wait(30)
        closing = time.monotonic()
    assert time.monotonic() - closing < 15
    assert time.monotonic() - began < 60


def test_threads_for_callbacks_and_listeners_exist_only_while_they_are_needed(pool: sky.ComputePool) -> None:
    before = ours()  # of a pool of other tests
    with sky.ComputePool(console=False, nodes=1) as mine:
        assert double(1) >> mine == 2
        assert ours() == before
        remove = mine.on_event(lambda _: None)
        called = threading.Event()
        mine.submit(double(1)).add_done_callback(lambda _: called.set())
        assert called.wait(30)
        assert ours() == {"skyward-callbacks", "skyward-events"}
        remove()
    assert ours() == before


def test_lines_are_heard_before_the_result_by_every_way_to_ask_for_it(pool: sky.ComputePool) -> None:
    heard: list[str] = []
    remove = pool.on_event(lambda e: heard.append(e.text) if isinstance(e, Output) else None)
    ways = {
        "run": lambda x: double(x) >> pool,
        "broadcast": lambda x: double(x) @ pool,
        "gather": lambda x: sky.gather(double(x), double(x)) >> pool,
        "submit": lambda x: pool.submit(double(x)).result(),
        "submit_parallel": lambda x: pool.submit_parallel(sky.gather(double(x))).result(),
        "exception": lambda x: pool.submit(double(x)).exception(),
        "stream": lambda x: list(sky.gather(double(x), stream=True, ordered=False) >> pool),
    }
    try:
        for i in range(20):
            for name, way in ways.items():
                heard.clear()
                way(i)
                assert f"double {i}" in heard, name
    finally:
        remove()


def test_a_listener_may_close_the_pool() -> None:
    with sky.ComputePool(nodes=1, console=False) as pool:
        pool.on_event(lambda event: pool.close() if isinstance(event, CallEnded) else None)
        assert double(1) >> pool == 2
        deadline = time.monotonic() + 30
        while pool.is_active and time.monotonic() < deadline:
            time.sleep(0.01)
    with pytest.raises(PoolClosed):
        double(1) >> pool
