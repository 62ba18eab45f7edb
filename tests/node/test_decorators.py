"""A decorated body runs inside its context, whatever kind of function it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from skyward.node.decorators import inside

depth = 0


@contextmanager
def entered() -> Iterator[None]:
    global depth
    depth += 1
    try:
        yield
    finally:
        depth -= 1


class Again:
    """A context that can be entered many times, as a Route can."""

    def __enter__(self) -> None:
        global depth
        depth += 1

    def __exit__(self, *error: object) -> None:
        global depth
        depth -= 1


def plain() -> int:
    return depth


async def waiting() -> int:
    await asyncio.sleep(0)
    return depth


def items() -> Generator[int, Any, str]:
    try:
        got = yield depth
    except ValueError:
        got = "thrown"
    try:
        yield depth
    finally:
        assert depth == 1
    return got


async def items_async() -> AsyncGenerator[int, Any]:
    try:
        got = yield depth
    except ValueError:
        got = 7
    assert got in (None, 7)
    yield depth


def test_functions_and_coroutines_run_inside() -> None:
    assert inside(plain, entered, "it")() == 1
    assert asyncio.run(inside(waiting, entered, "it")()) == 1
    assert depth == 0


@pytest.mark.parametrize(("enter", "each_step", "between"), [(entered, False, 1), (Again, True, 0)])
def test_a_generator_is_inside_until_its_end_or_at_each_step(
    enter: Callable[[], Any], each_step: bool, between: int
) -> None:
    generator = inside(items, enter, "it", each_step=each_step)()
    assert (next(generator), depth) == (1, between)
    assert (generator.throw(ValueError()), depth) == (1, between)
    with pytest.raises(StopIteration) as end:
        next(generator)
    assert (end.value.value, depth) == ("thrown", 0)


@pytest.mark.parametrize(("enter", "each_step", "between"), [(entered, False, 1), (Again, True, 0)])
def test_so_is_an_asynchronous_one(enter: Callable[[], Any], each_step: bool, between: int) -> None:
    async def use() -> None:
        generator = inside(items_async, enter, "it", each_step=each_step)()
        assert (await anext(generator), depth) == (1, between)
        assert (await generator.athrow(ValueError()), depth) == (1, between)
        assert [item async for item in generator] == []

    asyncio.run(use())
    assert depth == 0


@pytest.mark.parametrize(("enter", "each_step"), [(entered, False), (Again, True)])
def test_a_generator_that_is_closed_cleans_up_inside(enter: Callable[[], Any], each_step: bool) -> None:
    generator = inside(items, enter, "it", each_step=each_step)()
    next(generator)
    next(generator)
    generator.close()  # its `finally` asserts that it is inside
    assert depth == 0
