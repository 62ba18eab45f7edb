"""Results that stay where they were made: `call.keep()`, and calls that are arguments of others."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

import skyward as sky
from tests.support.waiting import until


class Table:
    """Says how often it was pickled and unpickled in this process."""

    def __init__(self, rows: int) -> None:
        self.rows = np.arange(rows, dtype=float)

    def __getstate__(self) -> dict[str, Any]:
        _count("PACKED")
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _count("UNPACKED")


def _count(name: str) -> None:
    os.environ[name] = str(int(os.environ.get(name, "0")) + 1)


@sky.compute
def load(rows: int) -> Table:
    return Table(rows)


@sky.compute
def node_of(*_: object) -> int:
    return sky.instance_info().node


@sky.compute
def look(table: Table) -> dict[str, Any]:
    counts = {name.lower(): os.environ.get(name) for name in ("PACKED", "UNPACKED")}
    return {"sum": float(table.rows.sum()), "node": sky.instance_info().node, "pid": os.getpid(), **counts}


@sky.compute
def make(n: int) -> np.ndarray:
    return np.full(300_000, float(n))


@sky.compute
def total(*values: Any) -> float:
    return float(sum(_sum(value) for value in values))


def _sum(value: Any) -> float:
    if isinstance(value, list | tuple):
        return sum(map(_sum, value))
    if isinstance(value, dict):
        return sum(map(_sum, value.values()))
    return float(np.sum(value))


@sky.compute
def kept_here() -> int:
    from skyward.transport import refs

    return len(refs._objects)


def blobs_of(pool: sky.ComputePool) -> list[str]:
    """The files of kept results, on this computer."""
    return [name for name in os.listdir(pool._store.directory) if len(name) == 28]


def nothing_kept(pool: sky.ComputePool) -> bool:
    gc.collect()
    return not blobs_of(pool) and max(kept_here() @ pool) == 0 and not pool._engine._core.calls.kept.results


def test_a_kept_result_is_used_where_it_is_without_being_unpickled(pool: sky.ComputePool) -> None:
    ref = load(300_000).keep() >> pool
    assert isinstance(ref, sky.Ref)
    found = [look(ref) >> pool for _ in range(3)]
    assert {seen["sum"] for seen in found} == {float(np.arange(300_000.0).sum())}
    assert len({seen["pid"] for seen in found}) == 1
    assert {(seen["packed"], seen["unpacked"]) for seen in found} == {("1", None)}


def test_another_node_gets_it_and_unpickles_it_once(pool: sky.ComputePool) -> None:
    ref = load(1000).keep() >> pool
    first, second = look(ref) @ pool
    assert first["sum"] == second["sum"]
    again = look(ref) @ pool
    elsewhere = [new for new, old in zip(again, (first, second), strict=True) if old["unpacked"]]
    assert len(elsewhere) == 1
    assert elsewhere[0]["unpacked"] == next(old for old in (first, second) if old["unpacked"])["unpacked"]


def test_a_kept_result_comes_home_when_it_is_asked_for(pool: sky.ComputePool) -> None:
    ref = make(3).keep() >> pool
    for _ in range(2):
        back = ref.get()
        assert (back == np.full(300_000, 3.0)).all()
    assert ref.size >= 2_400_000
    assert total(ref) >> pool == 900_000.0


def test_a_broadcast_keeps_one_result_on_each_rank(pool: sky.ComputePool) -> None:
    refs = node_of().keep() @ pool
    assert [ref.get() for ref in refs] == [0, 1]
    ran = sky.gather(*(node_of(ref) for ref in refs)) >> pool
    assert ran == (0, 1)


def test_refs_are_found_in_gather_map_lists_dicts_and_objects_that_were_put(pool: sky.ComputePool) -> None:
    refs = sky.gather(*(make(n).keep() for n in range(4))) >> pool
    assert sky.gather(*(total(ref) for ref in refs)) >> pool == (0.0, 300_000.0, 600_000.0, 900_000.0)
    assert pool.map(_sum, refs) == [0.0, 300_000.0, 600_000.0, 900_000.0]
    assert total([refs[1], {"deep": [refs[2], refs[1]]}]) >> pool == 1_200_000.0
    assert total(pool.put({"one": refs[3]})) >> pool == 900_000.0

    @sky.compute
    def closed_over() -> float:
        return float(refs[1].sum())  # type: ignore[attr-defined]

    assert closed_over() @ pool == [300_000.0] * 2


def test_letting_go_of_a_ref_frees_it_everywhere(pool: sky.ComputePool) -> None:
    until(lambda: nothing_kept(pool))
    ref = make(1).keep() >> pool
    assert total(ref) @ pool == [300_000.0] * 2
    assert len(blobs_of(pool)) >= 1
    assert kept_here() @ pool == [1, 1]
    del ref
    until(lambda: nothing_kept(pool))
    ref = make(1).keep() >> pool
    ref.drop()
    with pytest.raises(sky.errors.NotSerializable, match="was dropped: call it again"):
        total(ref) >> pool
    with pytest.raises(ValueError, match="was dropped"):
        ref.get()
    until(lambda: nothing_kept(pool))


def test_memory_does_not_grow_when_results_are_kept_and_let_go(pool: sky.ComputePool) -> None:
    @sky.compute
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    big = sky.compute(lambda: np.ones(5_000_000))  # 40 MB
    sky.gather(*(big().keep() for _ in range(4))) >> pool
    until(lambda: nothing_kept(pool))
    before = max(resident() @ pool)
    for _ in range(5):
        sky.gather(*(big().keep() for _ in range(4))) >> pool
    until(lambda: nothing_kept(pool))
    assert max(resident() @ pool) - before < 100e6  # 800 MB were kept in all


def test_a_ref_outlives_the_process_that_made_it(pool: sky.ComputePool) -> None:
    @sky.compute(retries=0)
    def die(values: np.ndarray) -> None:
        os._exit(3)

    ref = make(2).keep() >> pool
    with pytest.raises(sky.errors.TaskCrashed):
        die(ref) >> pool
    assert total(ref) @ pool == [600_000.0] * 2


def test_kept_results_outlive_the_agent_of_any_node(pool: sky.ComputePool) -> None:
    """Nodes of one computer share their files: a node that is started again must not clear those of the others."""
    refs = [*(node_of().keep() @ pool), make(2).keep() >> pool]
    agents = [about["pid"] for about in pool._engine.greetings()]
    for agent in agents:
        os.kill(agent, signal.SIGKILL)
    until(lambda: not {about["pid"] for about in pool._engine.greetings()} & set(agents))
    assert node_of() @ pool == [0, 1]
    assert [ref.get() for ref in refs[:2]] == [0, 1]
    assert total(refs[2]) @ pool == [600_000.0] * 2


def test_a_call_that_uses_the_ref_keeps_it(pool: sky.ComputePool) -> None:
    future = total(make(5).keep() >> pool) > pool
    gc.collect()
    assert future.result(30) == 1_500_000.0
    until(lambda: nothing_kept(pool))


def test_a_busy_node_does_not_starve_who_prefers_it(pool: sky.ComputePool) -> None:
    ref = node_of().keep() >> pool
    there = ref.get()
    assert node_of(ref) >> pool == there

    @sky.compute
    def sleep(seconds: float, *_: object) -> int:
        time.sleep(seconds)
        return sky.instance_info().node

    busy = sleep(30, ref) > pool
    try:
        until(lambda: busy.running())
        assert node_of(ref) >> pool == 1 - there
    finally:
        busy.cancel()


def test_a_ref_shows_where_it_is(pool: sky.ComputePool) -> None:
    ref = node_of().keep() >> pool
    there = ref.get()
    assert f"on node {there}" in repr(ref)
    assert "node_of()" in repr(ref)
    assert f"node {there}" in ref._repr_html_()


def test_a_generator_has_nothing_to_keep(pool: sky.ComputePool) -> None:
    @sky.compute
    def count(n: int) -> Any:
        yield from range(n)

    with pytest.raises(TypeError, match="yields its items one by one"):
        count(3).keep()
    with pytest.raises(TypeError, match="yields its items one by one"):
        total(count(3)) >> pool
    hidden = sky.compute(lambda: (n for n in range(3)))
    with pytest.raises(TypeError, match="yields its items one by one"):
        hidden().keep() >> pool


def test_a_failed_call_leaves_nothing_behind(pool: sky.ComputePool) -> None:
    until(lambda: nothing_kept(pool))

    @sky.compute
    def fail(n: int) -> int:
        raise KeyError(n)

    with pytest.raises(KeyError):
        fail(1).keep() >> pool
    unpicklable = sky.compute(lambda: threading.Lock())
    with pytest.raises(sky.errors.ResultNotSerializable, match="cannot be kept"):
        unpicklable().keep() >> pool
    until(lambda: nothing_kept(pool))


# calls as arguments


def test_a_call_among_the_arguments_runs_first_and_its_result_goes_nowhere_else(pool: sky.ComputePool) -> None:
    assert total(make(3)) >> pool == 900_000.0
    assert node_of(node_of()) >> pool in (0, 1)
    same = sky.compute(lambda inner: (inner, sky.instance_info().node))
    inner, outer = same(node_of()) >> pool
    assert inner == outer
    until(lambda: nothing_kept(pool))


def test_calls_are_found_at_any_depth_and_run_once_each(pool: sky.ComputePool) -> None:
    counts = pool.dict("runs")

    @sky.compute
    def counted(name: str, *values: Any) -> float:
        runs = sky.dict("runs")
        runs[name] = runs.get(name, 0) + 1
        return 1.0 + _sum(list(values))

    shared = counted("shared")
    deep = counted("top", [counted("left", shared), {"right": counted("right", {"x": [shared, shared]})}])
    assert deep >> pool == 1 + (1 + 1) + (1 + 2)
    assert dict(counts.items()) == {"shared": 1, "left": 1, "right": 1, "top": 1}
    assert sky.gather(counted("a", shared), counted("b", shared)) >> pool == (2.0, 2.0)
    assert counts["shared"] == 2


def test_a_fan_in_runs_over_the_whole_pool(pool: sky.ComputePool) -> None:
    @sky.compute
    def slow(n: int) -> tuple[int, int]:
        time.sleep(0.05)
        return n, sky.instance_info().node

    collect = sky.compute(lambda parts: parts)
    parts = collect([slow(n) for n in range(20)]) >> pool
    assert [n for n, _ in parts] == list(range(20))
    assert {node for _, node in parts} == {0, 1}
    until(lambda: nothing_kept(pool))


def test_the_failure_of_an_inner_call_is_that_of_the_outer_one(pool: sky.ComputePool) -> None:
    @sky.compute
    def fail(n: int) -> int:
        raise ValueError(f"no {n}")

    with pytest.raises(ValueError, match="no 7") as caught:
        total([make(1), fail(7)]) >> pool
    notes = "\n".join(caught.value.__notes__)
    assert "fail is an argument of total, which was not started" in notes.replace(fail(7).name, "fail")
    until(lambda: nothing_kept(pool))
    assert total(make(1)) >> pool == 300_000.0


def test_cancelling_and_time_limits_reach_inner_calls(pool: sky.ComputePool) -> None:
    marks = pool.dict("marks")

    @sky.compute
    def sleep(name: str) -> int:
        try:  # "began" is seen before its assignment has returned
            sky.dict("marks")[name] = "began"
            time.sleep(60)
        finally:
            sky.dict("marks")[name] = "ended"
        return 1

    future = total(sleep("one")) > pool
    until(lambda: marks.get("one") == "began")
    future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    until(lambda: marks.get("one") == "ended")
    with pytest.raises(sky.errors.TaskTimeout, match="sleep"):
        total(sleep("two")).with_timeout(0.3) >> pool
    until(lambda: nothing_kept(pool))


def test_a_broadcast_runs_an_inner_call_once_and_gives_it_to_every_rank(pool: sky.ComputePool) -> None:
    counts = pool.dict("inner")

    @sky.compute
    def counted() -> float:
        sky.dict("inner")["runs"] = sky.dict("inner").get("runs", 0) + 1
        return 5.0

    assert total(counted()) @ pool == [5.0, 5.0]
    assert counts["runs"] == 1

    @sky.compute
    def fail() -> float:
        raise KeyError("inner")

    with pytest.raises(KeyError, match="inner"):
        total(fail()) @ pool
    until(lambda: nothing_kept(pool))


def test_map_takes_calls_as_items(pool: sky.ComputePool) -> None:
    assert pool.map(_sum, [make(n) for n in range(5)]) == [300_000.0 * n for n in range(5)]
    until(lambda: nothing_kept(pool))


def test_a_kept_call_among_the_arguments_is_the_same_as_a_call(pool: sky.ComputePool) -> None:
    assert total(make(2).keep()) >> pool == 600_000.0
    ref = total(make(2)).keep() >> pool
    assert ref.get() == 600_000.0


def test_concurrent_calls_of_a_process_share_a_kept_result() -> None:
    with sky.ComputePool(concurrency=4, console=False) as pool:
        ref = load(10).keep() >> pool
        ids = sky.gather(*(sky.compute(id)(ref) for _ in range(16))) >> pool
        assert len(set(ids)) == 1


def test_a_ref_of_a_closed_pool_says_so() -> None:
    with sky.ComputePool(console=False) as pool:
        ref = make(1).keep() >> pool
    with pytest.raises(sky.errors.PoolClosed):
        ref.get()


def test_what_a_closed_pool_kept_is_gone_and_that_is_said() -> None:
    with sky.ComputePool(console=False) as pool:
        refs = (pool.put({"a": 1}), load(10).keep() >> pool)
    for ref in refs:
        with pytest.raises(sky.errors.PoolClosed, match="gone with it"):
            ref.get()
