"""Spellings that are nearly right get the right one, before anything is sent."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from tests.support.waiting import until


@sky.compute
def double(n: int) -> int:
    return 2 * n


def plain(n: int) -> int:
    return n


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a plain function's result": (lambda pool: plain(1) >> pool, "decorated with @sky.compute"),
    "a plain result, broadcast": (lambda pool: plain(1) @ pool, "decorated with @sky.compute"),
    "a plain result, later": (lambda pool: plain(1) > pool, "decorated with @sky.compute"),
    "a list of calls": (lambda pool: [double(1)] >> pool, "sky.gather(*calls) >> pool"),
    "gather of a list": (lambda pool: sky.gather([double(1)]) >> pool, "sky.gather(*calls)"),
    "gather of a generator": (lambda pool: sky.gather(double(i) for i in range(2)) >> pool, "sky.gather(*calls)"),
    "the pool on the left": (lambda pool: pool < double(1), "call > pool"),
    "compared before it has run": (lambda pool: double(1) == 2, "has not run"),
    "compared with not": (lambda pool: double(1) != 2, "has not run"),
    "asked for its result": (lambda pool: double(1).result(), "`double(...) >> pool`"),
    "ray's spelling": (lambda pool: double.remote(1), "`double(...) >> pool`"),
    "dask's spelling": (lambda pool: double.delay(1), "`double(...) >> pool`"),
    "an executor's spelling": (lambda pool: pool.submit(double, 1), "pool.submit(double(1))"),
    "an executor's, plain": (lambda pool: pool.submit(plain, 1), "pool.executor.submit(plain, ...)"),
    "run with arguments": (lambda pool: pool.run(double, n=1), "pool.run(double(n=1))"),
    "a future as an argument": (lambda pool: double(double(1) > pool) >> pool, "future.result()"),
    "a pool as an argument": (lambda pool: double(pool) >> pool, "stays in the process"),
    "a function that was not called": (lambda pool: double >> pool, "has not been called"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_leads_to_the_right_spelling(pool: sky.ComputePool, case: str) -> None:
    act, words = CASES[case]
    with pytest.raises((TypeError, AttributeError)) as caught:
        act(pool)
    assert words in str(caught.value)


def test_a_captured_pool_says_why_it_is_not_sent(pool: sky.ComputePool) -> None:
    @sky.compute
    def nested() -> int:
        return double(1) >> pool

    with pytest.raises(sky.errors.NotSerializable, match="a pool stays in the process"):
        nested() >> pool


def test_a_number_alone_is_not_a_pool() -> None:
    with pytest.raises(ValueError, match=r"nodes=4"):
        sky.ComputePool(4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="provider="):
        sky.ComputePool(sky.Local())  # type: ignore[arg-type]


def test_calls_can_still_be_kept_in_sets_and_lists() -> None:
    a, b = double(1), double(1)
    assert a == a
    assert a != b
    assert len({a, b}) == 2
    assert [a, b].index(b) == 1


@sky.compute
def fail() -> None:
    raise LookupError("of a call that nobody waits for")


def test_a_failure_that_nobody_asks_for_is_told(pool: sky.ComputePool, caplog: pytest.LogCaptureFixture) -> None:
    future = fail() > pool
    future.wait()
    del future
    until(lambda: "fail has failed, and nobody has asked for its result: LookupError: of a call that" in caplog.text)


def test_a_failure_that_comes_after_its_future_was_dropped_is_told(
    pool: sky.ComputePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.submit(fail())
    until(lambda: "nobody has asked" in caplog.text)


def test_a_failure_that_was_asked_for_is_not_told_again(
    pool: sky.ComputePool, caplog: pytest.LogCaptureFixture
) -> None:
    for ask in (lambda f: f.exception(), lambda f: f.add_done_callback(print), lambda f: f.cancel()):
        future = fail() > pool
        ask(future)
        future.wait()
        del future
    with pytest.raises(LookupError):
        fail() >> pool
    with pytest.raises(LookupError):
        sky.gather(fail(), fail()) >> pool
    assert double(1) >> pool == 2
    gc.collect()
    assert "nobody has asked" not in caplog.text


def test_a_body_that_asks_the_keyboard_says_what_to_do(pool: sky.ComputePool) -> None:
    @sky.compute
    def ask() -> str:
        return input("name? ")

    @sky.compute
    def stop() -> None:
        breakpoint()

    with pytest.raises(EOFError, match="has no keyboard"):
        ask() >> pool
    with pytest.raises(RuntimeError, match=r"stop\.local|\.local\("):
        stop() >> pool


def test_an_open_file_is_not_sent_as_a_text(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("text")
    with path.open() as file, pytest.raises(sky.errors.NotSerializable, match="Pass the path"):
        double(file) >> pool  # type: ignore[arg-type]
