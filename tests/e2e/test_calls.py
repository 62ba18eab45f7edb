"""Calls on a real pool: what each operator returns, and what may be called."""

from __future__ import annotations

import asyncio
import functools
import importlib
import operator
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import pytest

import skyward as sky
from tests.support.waiting import until


@sky.compute
def double(x: int) -> int:
    return 2 * x


@sky.compute
def where() -> tuple[int, int]:
    info = sky.instance_info()
    assert info is not None
    return info.node, os.getpid()


@sky.compute
def mark_and_wait(path: str, seconds: float = 8) -> str:
    """Leaves a file while it runs, and another when it is stopped."""
    Path(path).write_text("running")
    try:
        time.sleep(seconds)
        return "slept"
    finally:
        Path(path).write_text("left")


@sky.compute
def fail(text: str) -> int:
    raise KeyError(text)


@sky.compute
async def later(x: int) -> int:
    await asyncio.sleep(0.001)
    return x + 1


@sky.compute
def everything(a: int, /, b: int, *rest: int, c: int = 3, d: int, **more: int) -> tuple[Any, ...]:
    return a, b, rest, c, d, more


@sky.compute
def any_names(**names: int) -> dict[str, int]:
    return names


def square(x: int) -> int:
    return x * x


@pytest.fixture
def own() -> Iterator[sky.ComputePool]:
    """A pool for a test whose failure would leave a node stuck."""
    with sky.ComputePool(nodes=2, console=False) as opened:
        yield opened


def has_text(path: Path, text: str) -> Callable[[], bool]:
    return lambda: path.exists() and path.read_text() == text


# operators and methods


def test_one_node_runs_a_call(pool: sky.ComputePool) -> None:
    assert double(21) >> pool == 42


def test_a_broadcast_gives_one_result_a_node_in_node_order(pool: sky.ComputePool) -> None:
    """S1-01."""
    results = where() @ pool
    assert [node for node, _ in results] == [0, 1]
    assert len({pid for _, pid in results} | {os.getpid()}) == 3


def test_a_group_gives_a_tuple(pool: sky.ComputePool) -> None:
    assert (double(1) & double(2) & double(3)) >> pool == (2, 4, 6)


def test_a_later_call_gives_a_real_future(pool: sky.ComputePool) -> None:
    future = double(4) > pool
    assert isinstance(future, Future)
    assert future.result(45) == 8
    assert future.done()
    assert not future.cancel()
    assert future.exception() is None


def test_a_group_sent_later_gives_a_future_of_the_tuple(pool: sky.ComputePool) -> None:
    assert ((double(1) & double(2)) > pool).result(45) == (2, 4)


def test_gather_keeps_the_order_of_its_calls(pool: sky.ComputePool) -> None:
    assert sky.gather(*(double(i) for i in range(20))) >> pool == tuple(range(0, 40, 2))


def test_gather_of_one_is_a_tuple_of_one(pool: sky.ComputePool) -> None:
    assert sky.gather(double(1)) >> pool == (2,)


def test_an_empty_group_gives_an_empty_tuple(pool: sky.ComputePool) -> None:
    assert sky.gather() >> pool == ()
    assert (sky.gather() > pool).result(45) == ()
    assert list(sky.gather(stream=True) >> pool) == []
    assert list(sky.gather(stream=True, ordered=False) >> pool) == []


def test_a_streamed_gather_yields_in_order(pool: sky.ComputePool) -> None:
    assert list(sky.gather(*(double(i) for i in range(50)), stream=True) >> pool) == list(range(0, 100, 2))


def test_an_unordered_gather_yields_what_is_ready_first(pool: sky.ComputePool, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")

    @sky.compute
    def held(wanted: bool) -> str:
        while wanted and not os.path.exists(gate):
            time.sleep(0.01)
        return "held" if wanted else "free"

    results = sky.gather(held(True), held(False), stream=True, ordered=False) >> pool
    assert next(results) == "free"
    Path(gate).touch()
    assert list(results) == ["held"]


def test_a_streamed_gather_raises_the_failure_of_a_call(pool: sky.ComputePool) -> None:
    results = sky.gather(double(1), fail("second"), double(3), stream=True) >> pool
    assert next(results) == 2
    with pytest.raises(KeyError, match="second"):
        next(results)


def test_the_methods_say_the_same_as_the_operators(pool: sky.ComputePool) -> None:
    assert pool.run(double(1)) == 2
    assert pool.submit(double(2)).result(45) == 4
    assert pool.broadcast(double(4)) == [8, 8]
    assert pool.run_parallel(double(5) & double(6)) == (10, 12)


def test_a_deprecated_method_works_and_warns_at_the_line_that_calls_it(pool: sky.ComputePool) -> None:
    with pytest.warns(
        DeprecationWarning, match=r"removed in Skyward 0\.3\. Write `pool\.submit\(call\)` instead"
    ) as told:
        assert pool.run_async(double(3)).result(45) == 6
    with pytest.warns(DeprecationWarning, match=r"Write `\[call > pool for call in calls\]` instead"):
        assert [future.result(45) for future in pool.submit_all([double(1), double(2)])] == [2, 4]
    assert [warning.filename for warning in told] == [__file__]


def test_the_module_stands_for_the_innermost_pool() -> None:
    with sky.ComputePool(console=False):
        assert double(4) >> sky == 8
        assert double(4) @ sky == [8]
        assert (double(4) > sky).result(45) == 8
        assert (double(1) & double(2)) >> sky == (2, 4)
        assert double(5) >> sky.sky == 10
        assert double(5) @ sky.sky == [10]
        assert list(sky.gather(double(1), double(2), stream=True) >> sky.sky) == [2, 4]


def test_the_innermost_of_two_pools_is_meant(pool: sky.ComputePool) -> None:
    assert len(where() @ sky) == 2
    with sky.ComputePool(console=False):
        assert len(where() @ sky) == 1
    assert len(where() @ sky) == 2


def test_without_a_pool_the_module_is_no_target() -> None:
    code = "import skyward as sky\ntry:\n    sky.compute(abs)(-1) >> sky\nexcept RuntimeError as e:\n    print(e)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "no pool is open" in said


def test_a_closed_pool_refuses_calls() -> None:
    with sky.ComputePool(console=False) as closed:
        pass
    for send in (closed.run, closed.submit, closed.broadcast):
        with pytest.raises(RuntimeError, match="closed"):
            send(double(1))
    with pytest.raises(RuntimeError, match="closed"):
        closed.map(square, [1])
    with pytest.raises(RuntimeError, match="closed"):
        _ = closed.executor


def test_a_pool_that_is_not_open_yet_says_so() -> None:
    with pytest.raises(RuntimeError, match="not open yet"):
        double(1) >> sky.ComputePool(console=False)


# what is said when it is used wrongly


@pytest.mark.parametrize("act", [operator.rshift, operator.matmul, operator.gt], ids=[">>", "@", ">"])
def test_missing_parentheses_are_named(pool: sky.ComputePool, act: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"double\(|parenthes"):
        act(double, pool)


@pytest.mark.parametrize("target", [None, 3, "pool", os, sky.ComputePool, double], ids=str)
@pytest.mark.parametrize("act", [operator.rshift, operator.matmul, operator.gt], ids=[">>", "@", ">"])
def test_a_wrong_target_is_named(act: Callable[[Any, Any], Any], target: Any) -> None:
    with pytest.raises(TypeError, match=r"sky.ComputePool|to a pool"):
        act(double(1), target)


def test_a_group_without_parentheses_is_explained(pool: sky.ComputePool) -> None:
    with pytest.raises(TypeError, match="parentheses"):
        double(1) & double(2) >> pool


def test_joining_uncalled_functions_is_explained() -> None:
    with pytest.raises(TypeError, match="double"):
        double(1) & double  # type: ignore[operator]
    with pytest.raises(TypeError, match="double"):
        double & double(1)  # type: ignore[operator]
    with pytest.raises(TypeError, match="calls"):
        sky.gather([double(1)])  # type: ignore[call-overload]


def test_a_group_is_not_broadcast(pool: sky.ComputePool) -> None:
    with pytest.raises(TypeError, match="one by one"):
        (double(1) & double(2)) @ pool


@pytest.mark.parametrize("method", ["run", "submit", "broadcast", "run_parallel"])
@pytest.mark.parametrize(
    "value", [square, double, 3, None, [double(1)]], ids=["function", "compute", "3", "None", "[]"]
)
def test_a_method_that_gets_no_call_says_what_it_wants(pool: sky.ComputePool, method: str, value: Any) -> None:
    with pytest.raises(TypeError, match="call"):
        getattr(pool, method)(value)


def test_map_that_gets_no_function_says_so(pool: sky.ComputePool) -> None:
    with pytest.raises(ValueError, match="function"):
        pool.map(3, [1])  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match=r"function|call"):
        pool.map(double(1), [1])  # type: ignore[arg-type]


def test_a_wrong_number_of_arguments_is_found_before_anything_is_sent() -> None:
    for call in (lambda: double(), lambda: double(1, 2), lambda: double(y=1), lambda: everything(1, 2)):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"double\(\)|everything\(\)"):
            call()


@pytest.mark.parametrize("retries", [-1, 1.5, "3", True])
def test_retries_are_checked_when_the_function_is_made(retries: Any) -> None:
    with pytest.raises(ValueError, match="retries"):
        sky.compute(retries=retries)(square)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "3", True])
def test_time_limits_are_checked_when_they_are_given(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout"):
        sky.compute(timeout=timeout)
    with pytest.raises(ValueError, match="timeout"):
        double(1).with_timeout(timeout)


# time limits and futures


def test_a_call_past_its_time_limit_is_stopped(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "mark"
    with pytest.raises(TimeoutError, match="mark_and_wait"):
        mark_and_wait(str(path)).with_timeout(0.3) >> pool
    assert path.read_text() == "left"
    assert double(1) >> pool == 2


def test_the_limit_of_a_function_holds_for_its_calls(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.errors.TaskTimeout) as caught:
        sky.compute(timeout=0.2)(time.sleep)(30) >> pool
    assert caught.value.seconds == 0.2


def test_cancelling_a_future_stops_the_body(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "mark"
    future = mark_and_wait(str(path)) > pool
    until(has_text(path, "running"))
    assert future.running()
    assert future.cancel()
    assert future.cancelled()
    with pytest.raises(CancelledError):
        future.result(45)
    until(has_text(path, "left"))
    assert [double(i) >> pool for i in range(4)] == [0, 2, 4, 6]


def test_a_cancel_that_comes_too_late_leaves_the_nodes_working(own: sky.ComputePool) -> None:
    for n in range(60):
        future = sky.compute(time.sleep)(0.002) > own
        time.sleep(0.0005 * (n % 8))
        future.cancel()
        if n % 10 == 9:
            for after in [double(i) > own for i in range(4)]:
                after.result(45)


def test_cancelling_a_call_sent_ahead_never_starts_it(own: sky.ComputePool, tmp_path: Path) -> None:
    sky.gather(*(double(i) for i in range(200))) >> own  # nodes learn that calls are short, and get some ahead
    held = [mark_and_wait(str(tmp_path / f"held{i}"), 1) > own for i in range(2)]
    ahead = [mark_and_wait(str(tmp_path / f"ahead{i}"), 0) > own for i in range(8)]
    for future in ahead:
        future.cancel()
    wait(held)
    assert double(1) @ own == [2, 2]
    assert list(tmp_path.glob("ahead*")) == []


def test_cancelling_a_call_that_waits_never_starts_it(pool: sky.ComputePool, tmp_path: Path) -> None:
    held = [mark_and_wait(str(tmp_path / f"held{i}")) > pool for i in range(2)]
    waiting = mark_and_wait(str(tmp_path / "waiting")) > pool
    until(lambda: len(list(tmp_path.glob("held*"))) == 2)
    assert waiting.cancel()
    for future in held:
        future.cancel()
    until(lambda: all(has_text(tmp_path / f"held{i}", "left")() for i in range(2)))
    assert double(1) @ pool == [2, 2]
    assert not (tmp_path / "waiting").exists()


def test_cancelling_the_future_of_a_group_stops_its_bodies(pool: sky.ComputePool, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    future = (mark_and_wait(str(paths[0])) & mark_and_wait(str(paths[1]))) > pool
    until(lambda: all(has_text(p, "running")() for p in paths))
    assert future.cancel()
    until(lambda: all(has_text(p, "left")() for p in paths))


def test_a_failing_call_of_a_group_stops_the_others(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "mark"

    @sky.compute
    def fail_when(path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)
        raise KeyError("second")

    with pytest.raises(KeyError, match="second"):
        (mark_and_wait(str(path)) & fail_when(str(path))) >> pool
    until(has_text(path, "left"))


def test_leaving_a_streamed_gather_stops_what_still_runs(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "mark"
    results = sky.gather(double(1), mark_and_wait(str(path)), stream=True) >> pool
    assert next(results) == 2
    until(has_text(path, "running"))
    results.close()  # type: ignore[attr-defined]
    until(has_text(path, "left"))


def test_futures_work_with_the_standard_functions(pool: sky.ComputePool) -> None:
    futures = [double(i) > pool for i in range(10)]
    assert sorted(f.result() for f in as_completed(futures, 20)) == list(range(0, 20, 2))
    assert wait(futures, 5).not_done == set()
    seen: list[int] = []
    futures[3].add_done_callback(lambda f: seen.append(f.result()))
    assert seen == [6]


def test_the_standard_functions_count_a_cancelled_future_as_done(pool: sky.ComputePool) -> None:
    future = mark_and_wait(os.devnull) > pool
    assert future.cancel()
    assert wait([future], 5).done == {future}
    assert list(as_completed([future], 5)) == [future]


def test_a_callback_may_send_the_next_call_and_wait_for_it_elsewhere(pool: sky.ComputePool) -> None:
    chained: Future[Future[int]] = Future()
    (double(1) > pool).add_done_callback(lambda f: chained.set_result(double(f.result()) > pool))
    assert chained.result(45).result(45) == 4


def test_a_future_can_be_awaited(pool: sky.ComputePool) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(
            *(asyncio.wrap_future(double(i) > pool) for i in range(20)),
            asyncio.wrap_future((double(1) & double(2)) > pool),
        )

    assert asyncio.run(main()) == [*range(0, 40, 2), (2, 4)]


def test_an_awaited_failure_is_raised(pool: sky.ComputePool) -> None:
    async def main() -> None:
        await asyncio.wrap_future(fail("here") > pool)

    with pytest.raises(KeyError, match="here"):
        asyncio.run(main())


def test_cancelling_the_awaiting_task_stops_the_body(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "mark"

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(mark_and_wait(str(path)) > pool), 0.5)

    asyncio.run(main())
    until(lambda: not path.exists() or path.read_text() == "left")


def only_there(pid: int) -> str:
    if os.getpid() == pid:
        raise ImportError("this exists only on the node")
    return "there"


class Homesick:
    """Can be packed on a node but not unpacked on the client."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        return only_there, (self.pid,)


@sky.compute
def homesick(pid: int) -> Homesick:
    return Homesick(pid)


def test_a_result_that_cannot_be_rebuilt_fails_each_way_of_asking(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.errors.ResultNotSerializable, match="homesick"):
        homesick(os.getpid()) >> pool
    future = homesick(os.getpid()) > pool
    for _ in range(2):
        with pytest.raises(sky.errors.ResultNotSerializable, match="homesick"):
            future.result(45)
    assert isinstance(future.exception(), sky.errors.ResultNotSerializable)
    with pytest.raises(sky.errors.ResultNotSerializable):
        ((double(1) & homesick(os.getpid())) > pool).result(45)


def test_awaiting_a_result_that_cannot_be_rebuilt_does_not_hang(pool: sky.ComputePool) -> None:
    async def main() -> None:
        await asyncio.wait_for(asyncio.wrap_future(homesick(os.getpid()) > pool), 5)

    with pytest.raises(sky.errors.ResultNotSerializable):
        asyncio.run(main())


# what may be called


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    @sky.compute
    def add(self, n: int) -> int:
        self.value += n
        return self.value

    def plain(self, n: int) -> int:
        self.value += n
        return self.value

    @staticmethod
    @sky.compute
    def static(n: int) -> int:
        return n + 1

    @classmethod
    @sky.compute
    def named(cls, n: int) -> tuple[str, int]:
        return cls.__name__, n

    @sky.compute
    @classmethod
    def called(cls, n: int) -> tuple[str, int]:
        return cls.__name__, n


def test_methods_run_elsewhere(pool: sky.ComputePool) -> None:
    counter = Counter(10)
    assert counter.add(5) >> pool == 15
    assert Counter.add(counter, 5) >> pool == 15
    assert Counter.static(1) >> pool == 2
    assert Counter.named(3) >> pool == ("Counter", 3)
    assert Counter.called(3) >> pool == ("Counter", 3)
    assert pool.map(Counter.called, [1, 2]) == [("Counter", 1), ("Counter", 2)]
    as_from_313: Any = MethodType(Counter.__dict__["named"].__func__, Counter)  # as `Counter.named` is there
    assert pool.map(as_from_313, [1, 2]) == [("Counter", 1), ("Counter", 2)]
    assert pool.executor.submit(as_from_313, 4).result(45) == ("Counter", 4)
    assert counter.value == 10
    assert counter.add.local(1) == 11


def test_what_a_method_does_to_its_object_is_forgotten(pool: sky.ComputePool) -> None:
    counter = Counter(10)
    assert [counter.add(1) >> pool for _ in range(6)] == [11] * 6
    assert [pool.executor.submit(counter.plain, 1).result() for _ in range(6)] == [11] * 6


def test_partials_lambdas_and_nested_functions_run(pool: sky.ComputePool) -> None:
    offset = 100

    def nested(x: int) -> int:
        return inner(x) + offset

    def inner(x: int) -> int:
        return 0 if x == 0 else 1 + inner(x - 1)

    assert sky.compute(functools.partial(pow, 2))(5) >> pool == 32
    assert sky.compute(functools.partial(square, x=7))() >> pool == 49
    assert sky.compute(lambda x, y=2: x * y)(4) >> pool == 8
    assert sky.compute(nested)(3) >> pool == 103
    offset = 200
    assert sky.compute(nested)(3) >> pool == 203


def test_the_bound_arguments_of_a_partial_do_not_remember(pool: sky.ComputePool) -> None:
    def push(into: list[int], x: int) -> list[int]:
        into.append(x)
        return into

    call = sky.compute(functools.partial(push, []))(1)
    assert [call >> pool for _ in range(4)] == [[1]] * 4


@dataclass
class Scale:
    """A callable object that has no hash, as a plain dataclass has none."""

    factor: int

    def __call__(self, x: int) -> int:
        return self.factor * x


def test_callable_objects_run(pool: sky.ComputePool) -> None:
    assert sky.compute(Scale(3))(5) >> pool == 15
    assert pool.map(Scale(2), [1, 2]) == [2, 4]
    assert pool.executor.submit(Scale(4), 2).result(45) == 8


def test_builtins_and_classes_run(pool: sky.ComputePool) -> None:
    assert sky.compute(len)("abc") >> pool == 3
    assert sky.compute(Counter)(3) >> pool != 3
    assert (sky.compute(Counter)(3) >> pool).value == 3
    assert sky.compute(operator.add)(1, 2) >> pool == 3


def test_async_functions_run(pool: sky.ComputePool) -> None:
    assert later(1) >> pool == 2
    assert later(1) @ pool == [2, 2]
    assert later.local(1) == 2
    assert pool.map(later, range(5)) == [1, 2, 3, 4, 5]


def test_every_kind_of_parameter_arrives(pool: sky.ComputePool) -> None:
    assert everything(1, 2, d=4) >> pool == (1, 2, (), 3, 4, {})
    assert everything(1, 2, 3, 4, c=5, d=6, e=7) >> pool == (1, 2, (3, 4), 5, 6, {"e": 7})
    with pytest.raises(TypeError):
        everything(a=1, b=2, d=3)  # type: ignore[call-arg]


def test_parameters_may_have_any_name(pool: sky.ComputePool) -> None:
    names = {"self": 1, "fn": 2, "call": 3, "timeout": 4, "args": 5, "target": 6}
    assert any_names(**names) >> pool == names
    assert any_names.local(**names) == names


def test_defaults_travel_with_the_function(pool: sky.ComputePool) -> None:
    seen: list[int] = [1, 2]

    @sky.compute
    def with_default(x: list[int] = seen, *, y: dict[str, int] = {"a": 1}) -> tuple[list[int], dict[str, int]]:  # noqa: B006
        return x, y

    assert with_default() >> pool == ([1, 2], {"a": 1})


def test_globals_are_taken_as_they_are_when_the_call_is_sent(pool: sky.ComputePool) -> None:
    space: dict[str, Any] = {"level": 1, "__name__": "made_up"}
    exec("def read():\n    return level", space)
    assert sky.compute(space["read"])() >> pool == 1
    space["level"] = 2
    assert sky.compute(space["read"])() >> pool == 2


def test_a_function_of_the_same_name_is_not_mistaken_for_the_other(pool: sky.ComputePool) -> None:
    def make(value: int) -> sky.Compute[[], int]:
        @sky.compute
        def same() -> int:
            return value

        return same

    assert sky.gather(*(make(i)() for i in range(10))) >> pool == tuple(range(10))


def test_a_body_can_use_a_compute_function_as_a_plain_one(pool: sky.ComputePool) -> None:
    @sky.compute
    def outer(x: int) -> int:
        return double.local(x) + 1

    assert outer(3) >> pool == 7


def test_what_cannot_travel_is_named_by_its_path(pool: sky.ComputePool) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"argument .* of double.*\['b'\].*inside the function"):
        double([1, {"b": lock}]) >> pool  # type: ignore[arg-type]

    @sky.compute
    def locked() -> None:
        with lock:
            pass

    with pytest.raises(TypeError, match=r"closure variable 'lock' of function .*locked"):
        locked() >> pool
    with pytest.raises(TypeError, match="process that opened it"):
        sky.compute(id)(pool) >> pool


def test_a_result_that_cannot_travel_is_named(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.errors.ResultNotSerializable, match=r"locks.*\['a'\]"):
        sky.compute(locks)() >> pool
    assert double(1) >> pool == 2


def locks() -> dict[str, Any]:
    return {"a": threading.Lock()}


def test_a_call_does_not_keep_its_objects_alive(pool: sky.ComputePool) -> None:
    class Thing:
        pass

    def use(thing: object) -> int:
        return 1

    thing, captured, own = Thing(), Thing(), Counter(1)
    refs = [weakref.ref(thing), weakref.ref(captured), weakref.ref(own)]
    future = sky.compute(lambda x, kept=captured: (use(x), kept is None))(thing) > pool
    future.result(45)
    own.add(1) >> pool
    del thing, captured, own
    assert [r() for r in refs] == [None] * 3


# the main program, and modules that only the client has


def test_functions_of_the_main_program_run(script: Callable[..., subprocess.Popen[str]]) -> None:
    program = script("""
import dataclasses, enum
import skyward as sky

BASE = 100

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Point:
    x: int
    colour: Colour

class Bad(Exception):
    pass

def helper(x):
    return x + BASE

@sky.compute
def move(p: Point) -> Point:
    return Point(helper(p.x), Colour.RED)

@sky.compute
def bad():
    raise Bad("here")

@sky.compute
def items(n):
    yield from range(n)

if __name__ == "__main__":
    with sky.ComputePool(console=False) as pool:
        p = move(Point(1, Colour.RED)) >> pool
        assert p == Point(101, Colour.RED), p
        assert isinstance(p, Point) and p.colour is Colour.RED
        BASE = 200
        assert (move(Point(1, Colour.RED)) >> pool).x == 201
        try:
            bad() >> pool
        except Bad as exc:
            assert exc.args == ("here",)
        assert list(items(3) >> pool) == [0, 1, 2]
        assert pool.map(helper, [1, 2]) == [201, 202]
    print("fine")
""")
    out, err = program.communicate(timeout=120)
    assert (out, err, program.returncode) == ("fine\n", "", 0)


HELPER = """
FACTOR = 3
calls = []

def scale(x):
    calls.append(x)
    return FACTOR * x
"""

MODULE = """
from __future__ import annotations
import enum
from dataclasses import dataclass
import {helper} as helper
from {helper} import scale

LIMIT = 10

class Kind(enum.Enum):
    A = 1
    B = 2

class TooMuch(Exception):
    pass

@dataclass
class Box:
    size: int
    kind: Kind = Kind.A
    made = 0

    def limit(self):
        return LIMIT

    def grown(self):
        Box.made += 1
        return type(self)(scale(self.size), Kind.B)

class Special(Box):
    def grown(self):
        return super().grown()

def grow(box):
    if box.size > LIMIT:
        raise TooMuch(box.size)
    assert isinstance(box, Box) and box.kind is Kind.A
    assert helper.scale(1) == 3
    return box.grown()

def boxes(n):
    for i in range(n):
        yield Box(i)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that nodes do not have, which imports another such module."""
    mark = tmp_path.name.replace("-", "_")
    (tmp_path / f"own_helper_{mark}.py").write_text(HELPER)
    (tmp_path / f"own_{mark}.py").write_text(MODULE.format(helper=f"own_helper_{mark}"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(f"own_{mark}")
    for name in (f"own_{mark}", f"own_helper_{mark}"):
        sys.modules.pop(name, None)


def test_a_module_of_the_client_travels_by_value(pool: sky.ComputePool, module: Any) -> None:
    grown = sky.compute(module.grow)(module.Box(2)) >> pool
    assert isinstance(grown, module.Box)
    assert grown == module.Box(6, module.Kind.B)
    assert grown.kind is module.Kind.B
    special = sky.compute(module.grow)(module.Special(2)) >> pool
    assert type(special) is module.Special
    assert pool.map(module.grow, [module.Box(1)]) == [module.Box(3, module.Kind.B)]
    assert list(sky.compute(module.boxes)(2) >> pool) == [module.Box(0), module.Box(1)]


def test_an_exception_of_a_module_of_the_client_keeps_its_type(pool: sky.ComputePool, module: Any) -> None:
    with pytest.raises(module.TooMuch) as caught:
        sky.compute(module.grow)(module.Box(11)) >> pool
    assert caught.value.args == (11,)


def test_a_result_changes_nothing_in_the_module_it_belongs_to(pool: sky.ComputePool, module: Any) -> None:
    limit, made = module.Box.limit, module.Box.made
    box = sky.compute(module.grow)(module.Box(2)) >> pool
    module.LIMIT = 99
    assert box.limit() == 99
    assert module.Box.limit is limit
    assert module.Box.made == made


def test_a_change_of_a_module_of_the_client_is_seen_by_the_next_call(pool: sky.ComputePool, module: Any) -> None:
    helper = sys.modules[module.scale.__module__]
    assert (sky.compute(module.grow)(module.Box(2)) >> pool).size == 6
    assert helper.calls == []
    module.LIMIT = 1
    with pytest.raises(module.TooMuch):
        sky.compute(module.grow)(module.Box(2)) >> pool


# arguments and results


def arrays() -> list[Any]:
    whole = np.arange(24, dtype="f8").reshape(4, 6)
    frozen = np.arange(5)
    frozen.flags.writeable = False
    return [
        np.empty(0),
        np.array(3.5),
        whole[::2, ::-1],
        np.asfortranarray(whole),
        frozen,
        np.array([("a", 1)], dtype=[("name", "U1"), ("n", "i4")]),
        np.array([{"a": 1}, None], dtype=object),
        np.arange(3).astype(">i2"),
    ]


@sky.compute
def echo(*args: Any) -> Any:
    return args[0] if len(args) == 1 else args


@sky.compute
def add_one(a: Any) -> Any:
    a += 1
    return a


@pytest.mark.parametrize("index", range(len(arrays())))
def test_an_array_of_any_kind_comes_back_equal(pool: sky.ComputePool, index: int) -> None:
    array = arrays()[index]
    back = echo(array) >> pool
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("count", [0, 10, 50_000, 700_000], ids=["empty", "small", "400 kB", "5.6 MB"])
def test_arrays_can_be_changed_on_either_side_without_harm(pool: sky.ComputePool, count: int) -> None:
    array = np.zeros(count)
    for _ in range(4):  # on both nodes, and again with what a node already knows
        back = add_one(array) >> pool
        assert back.sum() == count
        back += 1
    assert array.sum() == 0
    first, second = add_one(array) @ pool
    first += 1
    assert second.sum() == count


def test_an_argument_changed_right_after_sending_does_not_matter(pool: sky.ComputePool) -> None:
    small, large, items = np.zeros(1000), np.zeros(700_000), [0] * 1000
    busy = [sky.compute(time.sleep)(0.2) > pool for _ in range(2)]
    futures = [echo(small) > pool, echo(large) > pool, echo(items) > pool]
    small += 1
    large += 1
    items[:] = [1] * 1000
    assert [int(np.sum(f.result(45))) for f in futures] == [0, 0, 0]
    wait(busy)


def test_the_same_array_twice_is_one_array_there(pool: sky.ComputePool) -> None:
    array = np.zeros(700_000)

    @sky.compute
    def same(a: Any, b: Any) -> bool:
        return a is b

    assert same(array, array) >> pool
    a, b = echo(array, array) >> pool
    assert a is b


def test_large_data_of_every_kind_goes_both_ways(pool: sky.ComputePool) -> None:
    text, data, mixed = "ä" * 3_000_000, os.urandom(5_000_000), bytearray(2_000_000)
    assert echo(text) >> pool == text
    assert echo(data) >> pool == data
    assert echo(mixed, data, [text]) >> pool == (mixed, data, [text])


def test_a_large_captured_array_travels_with_the_function(pool: sky.ComputePool) -> None:
    table = np.arange(700_000)
    total = sky.compute(lambda: int(table.sum()))
    assert [total() >> pool for _ in range(3)] == [int(table.sum())] * 3
    assert total() @ pool == [int(table.sum())] * 2
    table[0] = 5
    assert total() >> pool == int(table.sum())


def test_an_exception_that_is_returned_is_a_result(pool: sky.ComputePool) -> None:
    """T11."""
    back = echo(RuntimeError("not raised")) >> pool
    assert isinstance(back, RuntimeError)
    assert back.args == ("not raised",)
    (pair,) = sky.gather(echo(ValueError(1))) >> pool
    assert isinstance(pair, ValueError)
    assert isinstance(pool.map(ValueError, [1])[0], ValueError)


def test_results_of_every_plain_kind_come_back_equal(pool: sky.ComputePool) -> None:
    values = [None, True, 1 << 200, 1.5, float("inf"), 1j, "\udcff\x00é", b"\x00", (), [], {}, {1, 2}, frozenset({3})]
    values += [range(3), {(1, 2): [3]}, Ellipsis, NotImplemented, int, len, slice(1, 2)]
    assert list(echo(*values) >> pool) == values
    assert [pool.run(echo(v)) for v in values] == values  # for NotImplemented, `>>` has a meaning of Python's own


@pytest.mark.parametrize("error", [StopIteration(1), KeyError("a"), ExceptionGroup("two", [ValueError(1), OSError(2)])])
def test_an_exception_keeps_its_type_however_it_was_sent(pool: sky.ComputePool, error: Exception) -> None:
    def raise_it(_: object = None) -> None:
        raise error

    bad = sky.compute(raise_it)
    kind = type(error)
    with pytest.raises(kind) as caught:
        bad() >> pool
    assert "node" in caught.value.__notes__[0]
    assert "raise_it" in caught.value.__notes__[0]
    with pytest.raises(kind):
        bad() @ pool
    with pytest.raises(kind):
        (bad() > pool).result(45)
    with pytest.raises(kind):
        (double(1) & bad()) >> pool
    with pytest.raises(kind):
        pool.map(raise_it, [1])


# many


def test_a_thousand_calls_come_back_in_order(pool: sky.ComputePool) -> None:
    assert sky.gather(*(double(i) for i in range(1000))) >> pool == tuple(range(0, 2000, 2))


def test_map_keeps_the_order_of_many_items(pool: sky.ComputePool) -> None:
    assert pool.map(square, range(20_000)) == [i * i for i in range(20_000)]


def test_map_takes_any_function_and_any_iterable(pool: sky.ComputePool) -> None:
    assert pool.map(double, (i for i in range(5))) == [0, 2, 4, 6, 8]
    assert pool.map(str, {1: 2}) == ["1"]
    assert pool.map(square, []) == []
    assert pool.map(lambda x: x + 1, np.arange(3)) == [1, 2, 3]


def test_map_raises_what_the_function_raised(pool: sky.ComputePool) -> None:
    def picky(x: int) -> int:
        if x == 700:
            raise LookupError(x)
        return x

    with pytest.raises(LookupError, match="700") as caught:
        pool.map(picky, range(1000))
    assert "picky" in caught.value.__notes__[0].splitlines()[0]
    assert double(1) @ pool == [2, 2]


def test_map_raises_what_the_iterable_raised_before_anything_runs(pool: sky.ComputePool) -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("the source is broken")

    with pytest.raises(OSError, match="the source is broken"):
        pool.map(square, source())


def test_map_spreads_slow_items_over_the_nodes(pool: sky.ComputePool) -> None:
    def slow(_: int) -> int:
        time.sleep(0.05)
        info = sky.instance_info()
        assert info is not None
        return info.node

    assert set(pool.map(slow, range(8))) == {0, 1}


def test_a_pool_is_used_from_many_threads(pool: sky.ComputePool) -> None:
    def use(i: int) -> list[Any]:
        return [
            double(i) >> pool,
            double(i) @ pool,
            (double(i) & double(i + 1)) >> pool,
            pool.map(square, range(i)),
            (double(i) > pool).result(45),
        ]

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(use, range(48)))
    assert found == [[2 * i, [2 * i, 2 * i], (2 * i, 2 * i + 2), [n * n for n in range(i)], 2 * i] for i in range(48)]


def test_many_threads_may_ask_one_future(pool: sky.ComputePool) -> None:
    for _ in range(20):
        future = echo(list(range(2000))) > pool
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda _, f=future: f.result(45), range(8)))
        assert all(value is found[0] for value in found)
        assert found[0] == list(range(2000))
