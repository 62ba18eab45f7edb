"""How many tasks an iterator has, told without reading it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("joblib")

from skyward.plugins._joblib_backend import tasks_in


def some() -> Iterator[int]:
    yield from range(10)


@pytest.mark.parametrize(
    ("tasks", "count"),
    [
        (iter([1, 2, 3]), 3),
        ((x for x in range(100)), 100),
        ((x for x in [1, 2, 3]), 3),
        ((x for x in {"a": 1}.items()), 1),
        ((y for y in (x for x in range(7))), 7),
        (((i, x) for i, x in enumerate([1, 2, 3])), 3),
        (((a, b) for a, b in zip([1, 2, 3], "abcd", strict=False)), 3),
        ((pair for pair in itertools.product(range(4), enumerate("abc"))), 12),
        ((x for x in range(100) if x % 2), None),
        ((x + y for x in range(10) for y in range(10)), None),
        ((x if x else 1 for x in range(10)), None),
        (some(), None),
        ((x for x in some()), None),
        (itertools.count(), None),
        (iter(some, None), None),
    ],
)
def test_the_length_of_what_is_read_is_found(tasks: Any, count: int | None) -> None:
    assert tasks_in(tasks, 0) == count


def test_what_was_taken_counts() -> None:
    tasks = (x for x in range(10))
    next(tasks)
    next(tasks)
    assert tasks_in(tasks, 2) == 10
    pairs = (pair for pair in itertools.product(range(4), range(3)))
    next(pairs)
    assert tasks_in(pairs, 1) == 12
    assert next(tasks) == 2, "nothing was read"
