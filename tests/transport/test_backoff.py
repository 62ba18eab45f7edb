"""Pauses between attempts, as a table."""

from __future__ import annotations

from itertools import islice

import pytest

from skyward.transport.backoff import backoff


@pytest.mark.parametrize(
    ("first", "longest", "factor", "pauses"),
    [
        (1.0, 10.0, 2.0, [1, 2, 4, 8, 10, 10]),
        (5.0, 120.0, 2.0, [5, 10, 20, 40, 80, 120, 120]),
        (0.25, 1.0, 1.5, [0.25, 0.375, 0.5625, 0.84375, 1, 1]),
        (3.0, 3.0, 2.0, [3, 3]),
        (7.0, 3.0, 2.0, [3, 3]),
        (0.5, 60.0, 1.0, [0.5, 0.5, 0.5]),
    ],
)
def test_each_pause_is_longer_than_the_last_up_to_a_limit(
    first: float, longest: float, factor: float, pauses: list[float]
) -> None:
    assert list(islice(backoff(first, longest, factor), len(pauses))) == pauses


def test_jitter_shortens_a_pause_and_leaves_the_next_one_as_it_would_be() -> None:
    jitter = iter([1.0, 0.0, 0.5, 0.25]).__next__
    assert list(islice(backoff(1.0, 4.0, jitter=jitter), 4)) == [1, 0, 2, 1]


def test_pauses_do_not_overflow_however_many_attempts_there_are() -> None:
    assert next(islice(backoff(0.1, 2.0), 5000, None)) == 2.0
