"""Sweeps that lose nothing: failures in their places, and what had finished when the first one came."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

import pytest

import skyward as sky
from tests.support.waiting import until


class Bad(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return f"bad {self.number}"


@sky.compute
def inverse(n: int, *, scale: float = 1.0) -> float:
    if n == 3:
        raise Bad(n)
    return scale / n


@sky.compute
def killed(n: int) -> int:
    if n == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return n


@sky.compute
def slow(n: int) -> int:
    import time

    time.sleep(60)
    return n


@sky.compute(timeout=0.5)
def limited(n: int) -> int:
    import time

    time.sleep(60)
    return n


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_failures_stand_in_their_places(pool: sky.ComputePool) -> None:
    results = sky.gather(*(inverse(n) for n in (1, 2, 3, 4)), return_exceptions=True) >> pool
    assert (results[0], results[1], results[3]) == (1.0, 0.5, 0.25)
    assert isinstance(results[2], Bad)
    assert results[2].number == 3
    assert "remote traceback" in notes(results[2])
    assert "call 2 of 4: inverse(3)" in notes(results[2])


def test_a_process_that_dies_costs_its_own_call_only(pool: sky.ComputePool) -> None:
    results = sky.gather(*(killed(n) for n in range(4)), return_exceptions=True) >> pool
    assert [results[0], *results[2:]] == [0, 2, 3]
    assert isinstance(results[1], sky.errors.TaskCrashed)
    assert "call 1 of 4: killed(1)" in notes(results[1])


def test_a_map_says_which_item_a_process_died_or_ran_out_of_time_with(pool: sky.ComputePool) -> None:
    found = pool.map(killed, [0, 1], return_exceptions=True)
    assert isinstance(found[1], sky.errors.TaskCrashed)
    assert "item 1: killed(1)" in notes(found[1])
    (late,) = pool.map(limited, [7], return_exceptions=True)
    assert isinstance(late, sky.errors.TaskTimeout)
    assert "item 0: limited(7)" in notes(late)


def test_a_future_of_a_group_has_failures_in_their_places(pool: sky.ComputePool) -> None:
    first, second = (sky.gather(inverse(3), inverse(4), return_exceptions=True) > pool).result(timeout=60)
    assert isinstance(first, Bad)
    assert second == 0.25


def test_a_stream_goes_on_after_a_failure(pool: sky.ComputePool) -> None:
    calls = [inverse(n) for n in (3, 1, 2)]
    for ordered in (True, False):
        found = list(sky.gather(*calls, stream=True, ordered=ordered, return_exceptions=True) >> pool)
        assert sorted(str(item) for item in found) == ["0.5", "1.0", "bad 3"]
    assert isinstance(next(sky.gather(*calls, stream=True, return_exceptions=True) >> pool), Bad)


def test_a_map_has_failures_in_their_places(pool: sky.ComputePool) -> None:
    found = pool.map(inverse, [*range(1, 200)], return_exceptions=True)
    assert [index for index, item in enumerate(found) if isinstance(item, BaseException)] == [2]
    error = found[2]
    assert isinstance(error, Bad)
    assert error.number == 3
    assert "item 2: inverse(3)" in notes(error)
    assert "remote traceback" in notes(error)


def test_the_first_failure_brings_what_had_finished(pool: sky.ComputePool) -> None:
    done = [inverse(1) > pool, inverse(2) > pool]
    until(lambda: all(future.done() for future in done))
    with pytest.raises(Bad) as caught:
        sky.gather(inverse(1), inverse(2, scale=4.0), slow(7), inverse(3, scale=2.0)) >> pool
    assert caught.value.partial.items() <= {0: 1.0, 1: 2.0}.items()  # type: ignore[attr-defined]
    text = notes(caught.value)
    assert "call 3 of 4: inverse(3, scale=2.0)" in text
    assert f"{len(caught.value.partial)} of 4 calls had finished" in text  # type: ignore[attr-defined]


def test_a_map_that_fails_brings_what_had_finished(pool: sky.ComputePool) -> None:
    with pytest.raises(Bad) as caught:
        pool.map(inverse, [5, 4, 2, 3])
    partial = caught.value.partial  # type: ignore[attr-defined]
    assert partial.items() <= {0: 0.2, 1: 0.25, 2: 0.5}.items()
    assert "item 3: inverse(3)" in notes(caught.value)


def test_an_argument_whose_name_looks_like_a_secret_is_not_shown(pool: sky.ComputePool) -> None:
    """SEC-9."""

    @sky.compute
    def log_in(*, token: str) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        sky.gather(log_in(token="canary-1"), inverse(1)) >> pool
    assert "log_in(token=***)" in notes(caught.value)
    assert "canary-1" not in notes(caught.value)


def test_a_stream_that_fails_says_which_call_it_was(pool: sky.ComputePool) -> None:
    with pytest.raises(Bad) as caught:
        list(sky.gather(inverse(1), inverse(3), stream=True) >> pool)
    assert "call 1 of 2: inverse(3)" in notes(caught.value)


def test_large_arguments_are_shortened(pool: sky.ComputePool) -> None:
    @sky.compute
    def refuse(values: list[int], name: str) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        sky.gather(refuse([*range(100_000)], "x" * 10_000), inverse(1)) >> pool
    note = next(note for note in caught.value.__notes__ if note.startswith("call 0 of 2"))
    assert len(note) < 250


INTERRUPTED = """
import os, signal, threading, time
import skyward as sky

@sky.compute
def work(n):
    time.sleep(600 if n > 1 else 0)
    return 10 * n

pool = sky.ComputePool(nodes=2, concurrency=2, console=False, grace=1)
ended = []
pool.on_event(lambda event: isinstance(event, sky.events.CallEnded) and ended.append(event))

def interrupt():
    while len(ended) < 2:
        time.sleep(0.01)
    work(1) >> pool  # its result comes after theirs
    os.kill(os.getpid(), signal.SIGINT)

with pool:
    threading.Thread(target=interrupt).start()
    try:
        sky.gather(*map(work, range(4))) >> pool
    except KeyboardInterrupt as error:
        print(error.partial, error.__notes__[-1])
"""


def test_ctrl_c_has_what_had_finished(script: Callable[..., subprocess.Popen[str]]) -> None:
    out, err = script(INTERRUPTED).communicate(timeout=120)
    assert out.splitlines() == [
        "{0: 0, 1: 10} 2 of 4 calls had finished: see `partial` of this exception, results by index.",
    ], err
