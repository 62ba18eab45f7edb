"""Keys of shared collections: equal keys are one text, others are refused in words."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.errors import InvalidArgument, SharedTooLarge
from skyward.node.shared.protocol import joined_keys, read_key, split_keys, written_key


class Colour(enum.IntEnum):
    RED = 1


KEYS = ["a", "1", "", "quote \"' and \n", 1, -5, 0, 2.5, 1e-300, b"a", None, (1, "a"), ((), (None, 2.5)), "'a'", "None"]


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_a_key_comes_back_as_it_was(key: Any) -> None:
    assert read_key(written_key(key)) == key
    assert type(read_key(written_key(key))) is type(key)


@pytest.mark.parametrize("one", KEYS, ids=repr)
def test_different_keys_are_different_texts(one: Any) -> None:
    assert [written_key(one) == written_key(other) for other in KEYS].count(True) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (1, np.int64(1)), (1, Colour.RED), (2.5, np.float64(2.5)), ((1, "a"), (1.0, "a")), (0, -0.0)],
    ids=repr,
)
def test_keys_that_python_calls_equal_are_one_key(one: Any, other: Any) -> None:
    assert one == other
    assert written_key(one) == written_key(other)


@pytest.mark.parametrize("key", [[1], {"a": 1}, object(), float("nan"), float("inf"), (1, [2]), 1j], ids=repr)
def test_what_cannot_be_a_key_is_named(key: Any) -> None:
    with pytest.raises(InvalidArgument, match="cannot be a key of a shared collection"):
        written_key(key)


PLAIN = st.none() | st.text() | st.binary() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)


@given(keys=st.lists(st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)))
def test_whatever_is_taken_as_a_key_comes_back_alone_and_among_many(keys: list[Any]) -> None:
    texts = [written_key(key) for key in keys]
    assert [read_key(text) for text in texts] == keys
    assert split_keys(joined_keys(texts)) == texts


def test_keys_at_the_limits_come_back_and_beyond_them_are_refused_in_words() -> None:
    deep: Any = ()
    for _ in range(19):
        deep = (deep,)
    for key in (deep, 2**8192 - 1, "x" * ((1 << 20) - 2)):
        assert read_key(written_key(key)) == key
    for key in ((deep,), 2**8192, 10**5000):
        with pytest.raises(InvalidArgument, match="key"):
            written_key(key)
    with pytest.raises(SharedTooLarge, match="keys have up to"):
        written_key("x" * (1 << 20))
