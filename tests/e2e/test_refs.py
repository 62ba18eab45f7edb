"""Objects that stay: `pool.put` sends an object once, and calls share it."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import NotSerializable
from tests.support.waiting import until


class Table:
    """Says how often it was unpickled in this process."""

    def __init__(self, rows: dict[str, int]) -> None:
        self.rows = rows

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        os.environ["TABLES"] = str(int(os.environ.get("TABLES", "0")) + 1)


@sky.compute
def look_up(table: Table, name: str) -> tuple[int, int, int, str]:
    return table.rows[name], os.getpid(), id(table), os.environ["TABLES"]


@sky.compute
def total(values: np.ndarray) -> float:
    return float(values.sum())


@sky.compute
def sizes(deep: dict[str, list[Any]]) -> list[int]:
    return [len(item) for item in deep["all"]]


def test_an_object_is_unpickled_once_in_each_process(pool: sky.ComputePool) -> None:
    ref = pool.put(Table({"a": 1, "b": 2}))
    found = sky.gather(*(look_up(ref, "ab"[n % 2]) for n in range(20))) >> pool
    assert [value for value, *_ in found] == [1, 2] * 10
    assert len({process for _, process, *_ in found}) == 2
    assert len({(process, at) for _, process, at, _ in found}) == 2
    assert {count for *_, count in found} == {"1"}


def test_a_ref_is_found_inside_lists_and_dicts_and_functions(pool: sky.ComputePool) -> None:
    small, large = pool.put([1, 2, 3]), pool.put(np.arange(500_000))
    assert sizes({"all": [small, large, small]}) >> pool == [3, 500_000, 3]

    @sky.compute
    def closed_over() -> int:
        return len(small) + len(large)  # type: ignore[arg-type]

    assert closed_over() @ pool == [500_003, 500_003]
    assert pool.map(lambda n: n + len(small), [1, 2]) == [4, 5]  # type: ignore[arg-type]


def test_a_ref_inside_an_object_that_is_put_is_the_object_there(pool: sky.ComputePool) -> None:
    inner = pool.put(np.ones(300_000))
    outer = pool.put({"all": [inner, "ab"]})
    assert sizes(outer) @ pool == [[300_000, 2], [300_000, 2]]


def test_a_ref_brings_the_object_back(pool: sky.ComputePool) -> None:
    ref = pool.put({"x": np.arange(400_000), "name": "n"})
    back = ref.get()
    assert back["name"] == "n"
    assert (back["x"] == np.arange(400_000)).all()
    assert "400" in repr(ref) or "bytes" in repr(ref)


def test_the_object_is_as_it_was_when_it_was_put(pool: sky.ComputePool) -> None:
    values = np.ones(300_000)
    ref = pool.put(values)
    values[:] = 5
    assert total(ref) >> pool == 300_000.0


def test_many_calls_pack_the_object_once(pool: sky.ComputePool) -> None:
    packed = []

    class Counted:
        def __reduce__(self) -> Any:
            packed.append(1)
            return list, ([1, 2],)

    ref = pool.put(Counted())
    assert sky.gather(*(sky.compute(len)(ref) for _ in range(10))) >> pool == (2,) * 10  # type: ignore[arg-type]
    assert packed == [1]


def test_letting_go_of_a_ref_frees_it(pool: sky.ComputePool) -> None:
    @sky.compute
    def kept() -> int:
        from skyward.transport import refs

        return len(refs._objects)

    gc.collect()
    until(lambda: max(kept() @ pool) == 0)  # those of earlier tests
    ref = pool.put(np.ones(1_000_000))
    total(ref) @ pool
    assert min(kept() @ pool) == 1
    again = pool.put(np.ones(1_000_000))  # the same content: it stays for this one
    del ref
    gc.collect()
    until(lambda: max(kept() @ pool) == 0)
    assert total(again) >> pool == 1_000_000
    again.drop()
    with pytest.raises(NotSerializable, match="was dropped"):
        total(again) >> pool
    with pytest.raises(ValueError, match="was dropped"):
        again.get()


def test_letting_go_of_refs_removes_their_files(pool: sky.ComputePool) -> None:
    def files() -> int:
        return len([name for name in os.listdir(pool._store.directory) if len(name) == 32])

    before = files()
    for n in range(20):
        assert sizes(pool.put({"all": [f"{n} {os.urandom(8).hex()}"]})) >> pool
    gc.collect()
    until(lambda: files() <= before)


def test_files_that_somebody_else_has_removed_are_written_or_made_again_or_named(pool: sky.ComputePool) -> None:
    """As systemd does with all of a user's files in /dev/shm when the user logs out."""
    values = np.arange(300_000.0)
    made = sky.compute(np.ones)(300_000).keep() >> pool
    put = pool.put(values * 2)
    assert total(values) >> pool == values.sum()
    directory = Path(pool._store.directory)
    for path in directory.iterdir():
        if len(path.name) in (28, 32):
            path.unlink(missing_ok=True)
    assert total(values) >> pool == values.sum()
    assert total(made) >> pool == 300_000
    for path in directory.iterdir():
        if len(path.name) == 28:
            path.unlink(missing_ok=True)
    assert made.get().sum() == 300_000
    for use in (lambda: total(put) >> pool, put.get):
        with pytest.raises(sky.errors.FilesLost, match="another program has removed it"):
            use()


def test_a_ref_of_another_pool_is_refused(pool: sky.ComputePool) -> None:
    with sky.ComputePool(console=False) as other:
        ref = other.put([1])
        with pytest.raises(NotSerializable, match="put it into this one"):
            sky.compute(len)(ref) >> pool  # type: ignore[arg-type]


def test_a_process_that_was_lost_gets_the_object_again(pool: sky.ComputePool) -> None:
    @sky.compute(retries=0)
    def die(values: np.ndarray) -> None:
        os._exit(3)

    ref = pool.put(np.ones(300_000))
    assert total(ref) @ pool == [300_000.0] * 2
    with pytest.raises(sky.errors.TaskCrashed):
        die(ref) >> pool
    assert total(ref) @ pool == [300_000.0] * 2


def test_concurrent_calls_of_a_process_share_one_object() -> None:
    with sky.ComputePool(concurrency=8, console=False) as pool:
        ref = pool.put(Table({"a": 1}))
        found = sky.gather(*(look_up(ref, "a") for _ in range(32))) >> pool
        assert len({at for _, _, at, _ in found}) == 1
        assert {count for *_, count in found} == {"1"}
