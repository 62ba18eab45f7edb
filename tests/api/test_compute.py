"""The lazy call and its operators, sent to a target that only writes down what it gets."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import pickle
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Future
from types import MethodType
from typing import Any

import cloudpickle
import pytest

import skyward as sky
from skyward.api.compute import Compute, as_compute, enter_target, leave_target, resolve
from skyward.client.packing import streamed_parameters
from skyward.pool.sending import Sender


class Notebook:
    """A target that notes what is sent to it."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda sent: self.noted.append((name, sent)) or name


@sky.compute
def add(a: int, b: int = 1) -> int:
    return a + b


@sky.compute(timeout=5, retries=2)
def limited(x: int) -> int:
    return x


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @sky.compute
    def times(self, x: int) -> int:
        return self.factor * x

    @staticmethod
    @sky.compute
    def twice(x: int) -> int:
        return 2 * x

    @classmethod
    @sky.compute
    def named(cls, x: int) -> str:
        return f"{cls.__name__} {x}"

    @sky.compute(timeout=9)
    @classmethod
    def called(cls, x: int) -> str:
        return f"{cls.__name__} {x}"

    @sky.compute
    @staticmethod
    def thrice(x: int) -> int:
        return 3 * x


class Larger(Scale):
    pass


def test_a_call_is_a_value_and_runs_nothing() -> None:
    """S0-11."""
    ran: list[int] = []
    call = sky.compute(ran.append)(1)
    assert isinstance(call, sky.PendingCompute)
    assert ran == []
    call = add(1, b=2)
    assert (call.fn(*call.args, **call.kwargs), call.timeout, call.retries) == (3, None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        call.timeout = 3  # type: ignore[misc]


def test_options_of_the_function_are_those_of_its_calls() -> None:
    call = limited(1)
    assert (call.timeout, call.retries) == (5.0, 2)
    assert (add.timeout, add.retries) == (None, None)


def test_another_limit_makes_another_call() -> None:
    call = limited(1)
    assert call.with_timeout(7).timeout == 7.0
    assert call.with_retries(0).retries == 0
    assert (call.timeout, call.retries) == (5.0, 2)


@pytest.mark.parametrize("endless", [None, math.inf, 10**400])
def test_a_call_without_a_limit_has_none_whatever_the_limit_of_its_pool(endless: Any) -> None:
    nothing: Any = None
    sender = Sender(nothing, nothing, nothing, retries=0, timeout=3.0)
    assert sender.limited(add(1)).timeout == 3.0
    assert sender.limited(add(1).with_timeout(endless)).timeout == math.inf
    assert sender.limited(limited(1).with_timeout(endless)).timeout == math.inf
    group = (add(1) & limited(2)).with_timeout(endless)
    assert [sender.limited(call).timeout for call in group.calls()] == [math.inf, 5.0]


def test_a_function_can_say_that_its_calls_have_no_limit() -> None:
    assert sky.compute(timeout=math.inf)(len)([]).timeout == math.inf


@pytest.mark.parametrize("wrong", [0, -1, "5", True, float("nan"), [1]])
def test_a_time_limit_is_a_positive_number(wrong: Any) -> None:
    for make in (
        lambda: add(1).with_timeout(wrong),
        lambda: sky.compute(timeout=wrong),
        lambda: (add(1) & add(2)).with_timeout(wrong),
    ):
        with pytest.raises(sky.errors.InvalidArgument, match="timeout"):
            make()


@pytest.mark.parametrize("wrong", [-1, 1.5, "2", True, None])
def test_retries_are_a_whole_number(wrong: Any) -> None:
    with pytest.raises(sky.errors.InvalidArgument, match="retries"):
        add(1).with_retries(wrong)


def test_each_operator_is_one_method_of_the_target() -> None:
    book = Notebook()
    call, group = add(1), add(1) & add(2)
    stream = sky.gather(add(1), stream=True, ordered=False)
    assert [call >> book, call @ book, call > book] == ["run", "broadcast", "submit"]
    assert [group >> book, group > book, stream >> book] == ["run_parallel", "submit_parallel", "stream_parallel"]
    assert [sent for _, sent in book.noted] == [call, call, call, group, group, stream]
    assert stream.ordered is False


def test_groups_keep_their_order_and_their_limit() -> None:
    group = (add(1) & limited(2) & add(3)).with_timeout(9)
    assert [call.args for call in group.items] == [(1,), (2,), (3,)]
    assert [call.timeout for call in group.calls()] == [9.0, 5.0, 9.0]
    assert (group & add(4)).timeout == 9.0
    assert [call.args for call in sky.gather(*(add(i) for i in range(6))).items] == [(i,) for i in range(6)]


def test_a_call_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match="has not run"):
        bool(add(1))
    with pytest.raises(TypeError, match="has not run"):
        add(1) and add(2)


@pytest.mark.parametrize("act", [lambda: add >> 1, lambda: add @ 1, lambda: add > 1, lambda: add & add(1)])
def test_a_function_that_was_not_called_says_so(act: Any) -> None:
    with pytest.raises(TypeError, match="add parentheses"):
        act()


@pytest.mark.parametrize("act", [lambda: add(1) & add, lambda: sky.gather(add(1), add)])
def test_a_group_of_calls_and_functions_says_what_is_missing(act: Any) -> None:
    with pytest.raises(TypeError, match="add parentheses"):
        act()


def test_a_group_wants_calls() -> None:
    with pytest.raises(TypeError, match="parentheses around a group"):
        add(1) & 3  # type: ignore[operator]
    with pytest.raises(TypeError, match="cannot be broadcast"):
        (add(1) & add(2)) @ Notebook()


@pytest.mark.parametrize("target", [3, None, "pool", json, sky.ComputePool])
def test_a_wrong_target_is_named(target: Any) -> None:
    with pytest.raises(TypeError, match="a call is sent to a"):
        add(1) >> target


def test_wrong_arguments_are_found_when_the_call_is_made() -> None:
    with pytest.raises(TypeError, match=r"add\(\).*'a'"):
        add()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"add\(\).*unexpected"):
        add(1, c=2)  # type: ignore[call-arg]


def test_the_module_and_its_double_mean_the_innermost_target() -> None:
    outer, inner = Notebook(), Notebook()
    with pytest.raises(sky.errors.PoolClosed, match="no pool is open"):
        add(1) >> sky
    enter_target(outer)
    enter_target(inner)
    try:
        assert add(1) >> sky == "run"
        assert add(2) @ sky.sky == "broadcast"
        assert resolve(sky) is inner
        leave_target(inner)
        assert (add(3) > sky.sky) == "submit"
    finally:
        leave_target(inner)
        leave_target(outer)
    assert [sent.args for _, sent in inner.noted] == [(1,), (2,)]
    assert [sent.args for _, sent in outer.noted] == [(3,)]
    with pytest.raises(sky.errors.PoolClosed):
        sky.sky.run(add(1))


def test_methods_take_their_object_along() -> None:
    call = Scale(3).times(5)
    assert call.fn(*call.args) == 15
    assert call.name == "Scale.times"
    assert Scale.times.local(Scale(2), 4) == 8
    assert Scale.twice(4).fn(4) == 8
    named = Scale.named(1)
    assert named.fn(*named.args) == "Scale 1"


def test_functions_of_every_kind_can_be_run_here() -> None:
    async def later(x: int) -> int:
        return x + 1

    def count(n: int) -> Iterator[int]:
        yield from range(n)

    assert add.local(1, b=4) == 5
    assert sky.compute(later).local(1) == 2
    assert list(sky.compute(count).local(3)) == [0, 1, 2]
    assert sky.compute(functools.partial(add.fn, 1)).local(b=5) == 6


def test_the_function_stays_recognisable() -> None:
    assert add.__name__ == "add"
    assert add.__wrapped__ is add.fn  # type: ignore[attr-defined]
    assert repr(add) == "<compute add>"
    assert repr(add(1, b="x" * 100)).startswith("<PendingCompute add(1, b='xxx")
    assert len(repr(add(1, b="x" * 100))) < 120

    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError

    assert "Rude" in repr(sky.compute(print)(Rude()))


def test_names_are_short_and_always_there() -> None:
    assert sky.compute(functools.partial(functools.partial(add.fn, 1), 2))().name == "add"
    assert sky.compute(Scale)(1).name == "Scale"

    class Callable:
        def __call__(self) -> None:
            pass

    assert sky.compute(Callable())().name == "Callable"


@pytest.mark.parametrize("wrong", [3, "f", [len]])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    with pytest.raises(sky.errors.InvalidArgument, match="takes a function"):
        sky.compute(wrong)


def test_a_second_decorator_is_refused() -> None:
    with pytest.raises(sky.errors.InvalidArgument, match="already"):
        sky.compute(add)


def test_methods_of_a_class_may_stand_below_compute() -> None:
    """In this order they work on every Python."""
    for owner in (Scale, Scale(1)):
        assert owner.called.local(2) == "Scale 2"
        assert owner.thrice.local(2) == 6
    call = Larger.called(3)
    assert (call.fn(*call.args), call.timeout) == ("Larger 3", 9.0)
    again = pickle.loads(cloudpickle.dumps(Scale.__dict__["called"]))
    assert again.__get__(None, Larger).local(4) == "Larger 4"


def test_a_class_method_above_compute_is_one_where_python_binds_it_itself() -> None:
    """As from 3.13 on: it is a method whose function is the compute function."""
    given: Any = MethodType(Scale.__dict__["named"].__func__, Larger)
    bound = as_compute(given)
    assert isinstance(bound, Compute)
    assert bound.local(2) == "Larger 2"
    call = given(3)
    assert call.fn(*call.args) == "Larger 3"
    assert as_compute(add) is add
    with pytest.raises(TypeError, match=r"put @sky\.compute above @classmethod"):
        given.local(2)


def test_an_async_generator_is_read_here_with_for_and_with_async_for() -> None:
    left: list[int] = []

    @sky.compute
    async def ticks(n: int) -> AsyncIterator[int]:
        try:
            for number in range(n):
                await asyncio.sleep(0)
                yield number
        finally:
            left.append(n)

    assert list(ticks.local(3)) == [0, 1, 2]
    items: Any = ticks.local(4)
    assert next(items) == 0
    items.close()
    with pytest.raises(StopIteration):
        next(items)

    async def program() -> list[int]:
        given: Any = ticks.local(5)
        return [item async for item in given]

    assert asyncio.run(program()) == [0, 1, 2, 3, 4]
    assert left == [3, 4, 5]


def test_a_compute_function_can_travel() -> None:
    again = pickle.loads(pickle.dumps(sky.compute(timeout=3, retries=1)(len)))
    assert (again.fn, again.timeout, again.retries) == (len, 3.0, 1)


def reads(items: Iterator[int], more: Iterable[str], plain: list[int], other: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs", "positions", "names"),
    [
        ((iter([1]), ["a"], [1]), {}, {0}, set()),
        (([1], iter("a"), [1]), {}, {0, 1}, set()),
        ((iter([1]),), {"more": iter("a"), "plain": [1]}, {0}, {"more"}),
        ((), {"items": iter([1]), "more": ("a",), "plain": [1], "other": iter("")}, set(), {"items"}),
    ],
)
def test_annotated_iterators_travel_as_streams(
    args: tuple[Any, ...], kwargs: dict[str, Any], positions: set[int], names: set[str]
) -> None:
    """A list stays a list where an Iterable will do, and becomes an iterator where an Iterator is wanted."""
    assert streamed_parameters(sky.PendingCompute(reads, args, kwargs)) == (positions, names)


def test_every_argument_of_a_starred_parameter_is_what_its_annotation_says() -> None:
    def after(*args: Any, it: Iterator[int]) -> None: ...
    def all_of(first: int, *rest: Iterator[int], **others: Iterator[int]) -> None: ...

    lists = ([1], [2], [3])
    assert streamed_parameters(sky.PendingCompute(after, lists, {"it": [4]})) == (set(), {"it"})
    given = sky.PendingCompute(all_of, (1, *lists), {"a": [5], "rest": [6]})
    assert streamed_parameters(given) == ({1, 2, 3}, {"a", "rest"})


def test_functions_without_such_parameters_have_no_streams() -> None:
    assert streamed_parameters(add(1)) == (set(), set())
    assert streamed_parameters(sky.PendingCompute(len, ([1],))) == (set(), set())
    assert streamed_parameters(sky.PendingCompute(print, (iter([]),))) == (set(), set())


def test_the_future_of_a_call_is_whatever_the_target_gives() -> None:
    class Later(Notebook):
        def submit(self, call: sky.PendingCompute[Any]) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(call.fn(*call.args, **call.kwargs))
            return future

    assert (add(20, b=22) > Later()).result() == 42
