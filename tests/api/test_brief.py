"""Values as short texts: whatever is sent, no text as long as it is made."""

from __future__ import annotations

import collections
import dataclasses
import functools
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from skyward.api.brief import brief, described, glance
from skyward.api.secret import Secret

LARGE = 4_000_000


class Text(str):
    pass


class Bytes(bytes):
    pass


class Rows(list[Any]):
    pass


@dataclasses.dataclass
class Batch:
    data: Any
    token: str = dataclasses.field(default="hidden", repr=False)


class Pair(NamedTuple):
    first: Any
    second: Any


class Spoken(list[Any]):
    def __repr__(self) -> str:
        return f"{len(self)} rows"


MAKERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda data: data,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "bytes of a class": Bytes,
    "text": lambda data: data.decode(),
    "text of a class": lambda data: Text(data.decode()),
    "user string": lambda data: collections.UserString(data.decode()),
    "list": lambda data: [[data]],
    "tuple": lambda data: (1, data),
    "dictionary": lambda data: {"a": {data: data}},
    "set": lambda data: {data},
    "frozenset": lambda data: frozenset([data]),
    "list of a class": lambda data: Rows([data]),
    "deque": lambda data: collections.deque([data]),
    "defaultdict": lambda data: collections.defaultdict(list, {"a": [data]}),
    "OrderedDict": lambda data: collections.OrderedDict(a=data),
    "Counter": lambda data: collections.Counter([data]),
    "mapping proxy": lambda data: MappingProxyType({"a": data}),
    "dataclass": lambda data: Batch(Batch(data)),
    "named tuple": lambda data: Pair(data, [data]),
    "namespace": lambda data: SimpleNamespace(a=data),
    "exception": ValueError,
    "partial": lambda data: functools.partial(print, data),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_no_text_is_as_long_as_the_value(make: Callable[[Any], Any]) -> None:
    value = make(b"\0" * LARGE)
    tracemalloc.start()
    try:
        texts = [brief(value), glance((value,), {"a": value}), described("f", (value,), {"a": value})]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < LARGE / 10
    assert max(map(len, texts)) <= 170


def test_many_items_are_not_looked_at() -> None:
    class Item:
        shown = 0

        def __repr__(self) -> str:
            Item.shown += 1
            return "item"

        def __lt__(self, other: object) -> bool:
            pytest.fail("thousands of items would be sorted")

    for value in ([Item() for _ in range(1000)], {Item() for _ in range(1000)}, {Item(): 1 for _ in range(1000)}):
        assert "item, ..." in brief(value) or "item: 1, ..." in brief(value)
    assert Item.shown < 30


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"ab", "b'ab'"),
        (bytearray(b"ab"), "bytearray(b'ab')"),
        (b"a" * 50, "b'" + "a" * 40 + "'..."),
        ({"b": 1, "a": [2]}, "{'b': 1, 'a': [2]}"),
        (set(), "set()"),
        ({1}, "{1}"),
        (frozenset(), "frozenset()"),
        (Batch(3), "Batch(data=3)"),
        (Pair(1, "x"), "Pair(first=1, second='x')"),
        (Spoken([1, 2]), "2 rows"),
        (Rows([1]), "Rows([1])"),
        (collections.OrderedDict(a=1), "OrderedDict({'a': 1})"),
        (collections.UserList([1]), "UserList([1])"),
        (collections.UserDict(a=1), "UserDict({'a': 1})"),
        (collections.Counter("aa"), "Counter({'a': 2})"),
        (collections.ChainMap({"a": 1}), "ChainMap({'a': 1})"),
        (range(10**9), "range(0, 1000000000)"),
        (ValueError("x"), "ValueError('x')"),
        (10**5000, "<int of 16610 bits>"),
        (-5, "-5"),
        (None, "None"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_what_a_short_text_looks_like(value: Any, text: str) -> None:
    assert brief(value) == text


class LazyRows(Sequence[int]):
    def __len__(self) -> int:
        pytest.fail("the data set is opened")

    def __getitem__(self, index: Any) -> Any:
        pytest.fail("an item is read")


class LazyColumns(Mapping[str, int]):
    def __len__(self) -> int:
        pytest.fail("the data set is opened")

    def __iter__(self) -> Any:
        pytest.fail("the columns are read")

    def __getitem__(self, key: str) -> int:
        pytest.fail("a column is read")


class LazyList(list[int]):
    def __iter__(self) -> Any:
        pytest.fail("an item is read")


@pytest.mark.parametrize("kind", [LazyRows, LazyColumns, LazyList])
def test_items_that_code_of_the_user_fetches_are_not_read(kind: type) -> None:
    assert kind.__name__ in brief(kind())
    assert kind.__name__ in brief([kind()])
    assert "object" in brief(kind())


def test_a_repr_that_raises_hides_no_message() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ValueError

    assert "Broken" in brief(Broken())
    assert "Broken" in brief([Broken()])


@pytest.mark.parametrize("length", [12, 59, 60, 64, 300, 4000])
def test_a_secret_in_the_clear_is_masked_before_the_text_is_shortened(length: int) -> None:
    """SEC-9: what is left of a value that was cut is not recognised any more; it was kept in the history."""
    value = ("c4n4ry" * length)[:length]
    secret = Secret(value)
    texts = [value, f"Bearer {value}", f"{'x' * 50}{value}", f"{value}{'x' * LARGE}", f"{'x' * LARGE}{value}"]
    for given in (*texts, Text(value), *(text.encode() for text in texts), bytearray(value.encode())):
        for shown in (brief(given), glance((given,), {"rate": given}), described("f", (given,), {})):
            assert "c4n" not in shown
            assert "n4ry" not in shown
    assert brief([value]) == brief([secret]).replace(repr(secret), "'***'")
    assert brief(bytearray(b"abc")) == "bytearray(b'abc')"
