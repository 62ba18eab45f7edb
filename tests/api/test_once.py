"""`@sky.once`: one value for each process, however many threads ask for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import skyward as sky
from skyward.api.once import arrived
from skyward.errors import InvalidArgument
from skyward.transport.payload import Packer, unpack


def test_the_function_runs_once_and_its_value_stays() -> None:
    runs: list[int] = []

    @sky.once
    def load() -> list[int]:
        """Loads."""
        runs.append(1)
        return [1, 2]

    assert load() is load()
    assert runs == [1]
    assert load.__name__ == "load"
    assert load.__doc__ == "Loads."
    assert "1 kept" in repr(load)
    load.forget()
    load()
    assert runs == [1, 1]


def test_there_is_one_value_for_each_set_of_arguments() -> None:
    @sky.once
    def load(name: str, *, size: int = 1) -> object:
        return object()

    assert load("a") is load("a")
    assert load("a") is not load("b")
    assert load("a", size=2) is load("a", size=2)
    with pytest.raises(TypeError, match="must be hashable"):
        load(["a"])  # type: ignore[arg-type]


def test_many_threads_wait_for_the_one_that_makes_the_value() -> None:
    runs: list[int] = []
    go = threading.Event()

    @sky.once
    def load() -> object:
        runs.append(1)
        go.wait(30)
        return object()

    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(load) for _ in range(8)]
        go.set()
        assert len({id(future.result(30)) for future in futures}) == 1
    assert runs == [1]


def test_a_failure_is_not_kept_and_the_next_one_tries() -> None:
    tries: list[int] = []

    @sky.once
    def load() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not yet")
        return "here"

    with pytest.raises(OSError, match="not yet"):
        load()
    assert load() == "here"


def test_a_function_that_calls_itself_says_so_instead_of_waiting() -> None:
    @sky.once
    def load() -> Any:
        return load()

    with pytest.raises(RuntimeError, match="calls itself"):
        load()


async def coroutine() -> None: ...


def generator() -> Any:
    yield 1


@pytest.mark.parametrize("wrong", [coroutine, generator, 3, int])
def test_what_cannot_be_kept_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument):
        sky.once(wrong)


def test_methods_keep_a_value_for_each_object() -> None:
    class Loader:
        @sky.once
        def load(self) -> object:
            return object()

    one, two = Loader(), Loader()
    assert one.load() is one.load()
    assert one.load() is not two.load()


def test_the_same_definition_that_comes_again_is_the_same_one() -> None:
    @sky.once
    def load() -> object:
        return object()

    head, buffers = Packer().pack(load, "it")
    first = unpack(head, buffers)
    assert unpack(head, buffers) is first
    assert unpack(head, buffers)() is first()


def test_a_definition_that_was_written_again_takes_the_place_of_the_old_one() -> None:
    first = arrived("m", "load", "1", lambda: 1)
    assert arrived("m", "load", "1", lambda: 1) is first
    second = arrived("m", "load", "2", lambda: 2)
    assert second() == 2
    assert arrived("m", "load", "2", lambda: 2) is second
