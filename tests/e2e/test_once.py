"""`@sky.once` on nodes: loaded once in each process, used by all calls that come to it."""

from __future__ import annotations

import os

import skyward as sky


@sky.once
def model() -> tuple[int, object]:
    return os.getpid(), object()


@sky.compute
def identity() -> tuple[int, int]:
    process, loaded = model()
    assert process == os.getpid()
    return process, id(loaded)


def test_a_value_is_made_once_in_each_process(pool: sky.ComputePool) -> None:
    seen = sky.gather(*(identity() for _ in range(40))) >> pool
    assert len({process for process, _ in seen}) == 2
    assert len(set(seen)) == 2


def test_a_value_stays_for_later_calls_and_other_functions(pool: sky.ComputePool) -> None:
    @sky.compute
    def other() -> tuple[int, int]:
        return os.getpid(), id(model()[1])

    assert set(identity() @ pool) == set(other() @ pool)


def test_concurrent_calls_of_a_process_share_one_value() -> None:
    with sky.ComputePool(concurrency=8, console=False) as pool:
        assert len(set(sky.gather(*(identity() for _ in range(32))) >> pool)) == 1


def test_a_function_written_again_is_loaded_again(pool: sky.ComputePool) -> None:
    def made(text: str) -> sky.Once[[], str]:
        @sky.once
        def load() -> str:
            return text

        return load

    def read(load: sky.Once[[], str]) -> sky.PendingCompute[str]:
        return sky.compute(lambda: load())()

    assert read(made("old")) @ pool == ["old", "old"]
    assert read(made("new")) @ pool == ["new", "new"]
