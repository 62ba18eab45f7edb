"""`resume=` on a pool: maps and groups of every kind take what is there and compute what is missing."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.client.resume import Resumed
from skyward.history import runs
from tests.support import resumed_map


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What the bodies were called with since the last question."""
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    path = tmp_path / "counted"

    def read() -> list[str]:
        found = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return sorted(found)

    return read


@sky.compute
def square(path: str, x: int, fail: bool = False) -> int:
    with open(path, "a") as file:
        file.write(f"{x}\n")
    if fail:
        raise ValueError(f"{x} fails")
    return x * x


@sky.compute
def cube(path: str, x: int) -> int:
    with open(path, "a") as file:
        file.write(f"cube-{x}\n")
    return x**3


def test_groups_of_every_kind_take_what_is_there(
    pool: sky.ComputePool, counted: Callable[[], list[str]], tmp_path: Path
) -> None:
    path = str(tmp_path / "counted")
    calls = [square(path, x) for x in range(4)]
    assert sky.gather(*calls[:2], resume="group") >> pool == (0, 1)
    assert counted() == ["0", "1"]
    assert (sky.gather(*calls[:3], resume="group") > pool).result() == (0, 1, 4)
    assert counted() == ["2"]
    assert list(sky.gather(*reversed(calls), resume="group", stream=True) >> pool) == [9, 4, 1, 0]
    assert counted() == ["3"]
    more = [*calls, cube(path, 2)]
    assert sorted(sky.gather(*more, resume="group", stream=True, ordered=False) >> pool) == [0, 1, 4, 8, 9]
    assert counted() == ["cube-2"]
    assert asyncio.run(_awaited(sky.gather(*more, resume="group"), pool)) == (0, 1, 4, 9, 8)
    assert sky.gather(*(square(path, x=x) for x in range(4)), resume="group") >> pool == (0, 1, 4, 9)
    assert counted() == []


async def _awaited(group: Any, pool: sky.ComputePool) -> Any:
    return await (group > pool)


def test_a_group_and_a_map_share_what_they_have(
    pool: sky.ComputePool, counted: Callable[[], list[str]], tmp_path: Path
) -> None:
    path = str(tmp_path / "counted")

    @sky.compute
    def half(x: int) -> float:
        with open(path, "a") as file:
            file.write(f"{x}\n")
        return x / 2

    assert pool.map(half, range(3), resume="shared") == [0, 0.5, 1]
    assert sky.gather(*map(half, range(4)), resume="shared") >> pool == (0, 0.5, 1, 1.5)
    assert counted() == ["0", "1", "2", "3"]


def test_failures_run_again_and_what_had_finished_is_there(
    pool: sky.ComputePool, counted: Callable[[], list[str]], tmp_path: Path
) -> None:
    path = str(tmp_path / "counted")
    switch = tmp_path / "fixed"

    @sky.compute
    def picky(x: int) -> int:
        with open(path, "a") as file:
            file.write(f"{x}\n")
        if x % 3 == 1 and not switch.exists():
            raise ValueError(x)
        return x

    found = pool.map(picky, range(9), resume="picky", return_exceptions=True)
    assert [type(each) for each in found] == [int, ValueError, int] * 3
    counted()
    again = sky.gather(*map(picky, range(9)), resume="picky", return_exceptions=True) >> pool
    assert [type(each) for each in again] == [int, ValueError, int] * 3
    assert counted() == ["1", "4", "7"]
    with pytest.raises(ValueError) as failed:
        pool.map(picky, range(9), resume="picky")
    assert failed.value.partial.items() >= {0: 0, 2: 2, 3: 3, 5: 5, 6: 6, 8: 8}.items()  # type: ignore[attr-defined]
    notes = "\n".join(failed.value.__notes__)
    assert re.search(r"item ([147]): \S*picky\(\1\)", notes), notes
    counted()
    switch.touch()
    assert pool.map(picky, range(9), resume="picky") == list(range(9))
    assert set(counted()) == {"1", "4", "7"}  # one that was stopped may have written its line late


def test_an_error_in_a_group_loses_nothing_that_had_finished(
    pool: sky.ComputePool, counted: Callable[[], list[str]], tmp_path: Path
) -> None:
    path = str(tmp_path / "counted")
    assert (sky.gather(square(path, 1), square(path, 2), resume="failing") >> pool) == (1, 4)
    for _ in range(2):
        with pytest.raises(ValueError, match="3 fails"):
            _ = sky.gather(square(path, 1), square(path, 3, fail=True), square(path, 2), resume="failing") >> pool
    assert counted() == ["1", "2", "3", "3"]


def test_a_process_that_dies_loses_nothing_that_had_finished(
    pool: sky.ComputePool, counted: Callable[[], list[str]], tmp_path: Path
) -> None:
    path, switch = str(tmp_path / "counted"), tmp_path / "fixed"

    @sky.compute
    def deadly(x: int) -> int:
        with open(path, "a") as file:
            file.write(f"{x}\n")
        if x == 3 and not switch.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    calls = [deadly(x) for x in range(3)]
    assert sky.gather(*calls, resume="deadly") >> pool == (0, 1, 2)
    for _ in range(2):
        with pytest.raises(sky.SkywardError):
            _ = sky.gather(*calls, deadly(3), resume="deadly") >> pool
    assert counted() == ["0", "1", "2", "3", "3"]
    switch.touch()
    assert pool.map(deadly, range(5), resume="deadly") == [0, 1, 2, 3, 4]
    assert counted() == ["3", "4"]


def test_a_lost_machine_loses_nothing_that_had_finished(counted: Callable[[], list[str]], tmp_path: Path) -> None:
    path, switch = tmp_path / "counted", tmp_path / "lost"
    with sky.ComputePool(nodes=2, console=False) as pool:
        # what runs the other node, with all that it has started
        keeper = pool._fleet.by_node[1].keeper.pid  # pyright: ignore[reportPrivateUsage]

        @sky.compute(retries=0)
        def fragile(x: int) -> int:
            with path.open("a") as file:
                file.write(f"{x}\n")
            if x == 40 and not switch.exists():
                switch.touch()
                for process in (*psutil.Process(keeper).children(recursive=True), psutil.Process(keeper)):
                    process.kill()
            time.sleep(0.02)
            return x

        with pytest.raises(sky.errors.NodeLost):
            pool.map(fragile, range(200), resume="lost")
        facts, _ = runs.find("lost").facts()
        kept = {pickle.loads(base64.b64decode(fact["value"])) for fact in facts if fact["fact"] == "result"}
        assert kept
        counted()
        assert pool.map(fragile, range(200), resume="lost") == list(range(200))
        assert set(counted()) == {str(x) for x in range(200) if x not in kept}


def test_a_result_is_kept_as_it_came_whatever_the_program_does_with_it(
    pool: sky.ComputePool, counted: Callable[[], list[str]]
) -> None:
    @sky.compute
    def listed(x: int) -> list[int]:
        return [x]

    for _ in range(2):
        for result in sky.gather(*map(listed, range(5)), resume="changed", stream=True) >> pool:
            assert len(result) == 1
            result.append(0)


def test_a_stream_that_is_left_lets_go_of_the_run(pool: sky.ComputePool, counted: Callable[[], list[str]]) -> None:
    @sky.compute
    def same(x: int) -> int:
        return x

    stream = sky.gather(*map(same, range(50)), resume="left", stream=True) >> pool
    assert next(stream) == 0
    stream.close()
    assert pool.map(same, range(50), resume="left") == list(range(50))


def test_an_object_that_was_put_counts_by_its_content(
    pool: sky.ComputePool, counted: Callable[[], list[str]], tmp_path: Path
) -> None:
    path = str(tmp_path / "counted")

    @sky.compute
    def entry(table: list[int], x: int) -> int:
        with open(path, "a") as file:
            file.write(f"{x}\n")
        return table[x]

    def lookup(x: int, table: list[int]) -> int:
        return entry.fn(table, x)

    for _ in range(2):
        table, other = pool.put([5, 6, 7]), pool.put([5, 6, 8])
        assert sky.gather(entry(table, 1), entry(other, 1), entry(table, 2), resume="put") >> pool == (6, 6, 7)
        assert pool.map(partial(lookup, table=table), range(2), resume="partial") == [5, 6]
    assert counted() == ["0", "1", "1", "1", "2"]
    with pytest.raises(sky.SkywardError, match=r"another version of \S*lookup"):
        pool.map(partial(lookup, table=other), range(2), resume="partial")


def test_generators_and_kept_results_are_refused(
    pool: sky.ComputePool, counted: Callable[[], list[str]], tmp_path: Path
) -> None:
    path = str(tmp_path / "counted")

    @sky.compute
    def numbers(x: int) -> Iterator[int]:
        yield x

    with pytest.raises(sky.SkywardError, match="numbers is a generator, whose results are a stream"):
        _ = sky.gather(numbers(1), resume="refused") >> pool
    with pytest.raises(sky.SkywardError, match="is a generator"):
        pool.map(numbers, [1], resume="refused")
    with pytest.raises(sky.SkywardError, match="goes with the pool"):
        _ = sky.gather(square(path, 1).keep(), resume="refused") >> pool
    kept = square(path, 1).keep() >> pool
    with pytest.raises(sky.SkywardError, match="is a Ref to a result that stays on its node"):
        _ = sky.gather(square(path, kept), resume="refused") >> pool
    assert not runs.runs()


def test_a_map_without_resume_makes_no_fingerprint_and_no_file(
    pool: sky.ComputePool, counted: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Resumed, "__init__", lambda *_: pytest.fail("nothing was to be kept"))

    @sky.compute
    def same(x: int) -> int:
        return x

    assert pool.map(same, range(10)) == list(range(10))
    assert sky.gather(same(1), same(2)) >> pool == (1, 2)
    assert not runs.runs()


def run_map(folder: Path, kept: int, number: int = signal.SIGKILL) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "SKYWARD_STATE": str(folder / "state"), "PYTHONPATH": str(root)}
    command, place = [sys.executable, resumed_map.__file__, str(kept), str(int(number))], folder / str(kept)
    place.mkdir()
    return subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=300)


SEEDS = 50 if os.environ.get("SKYWARD_SOAK") else 3  # each ends it at two moments


@pytest.mark.parametrize(
    ("seed", "number"), [(seed, signal.SIGKILL if seed % 3 else signal.SIGINT) for seed in range(1, SEEDS + 1)]
)
def test_a_map_that_is_ended_computes_each_missing_item_once_when_it_starts_again(
    seed: int, number: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    kept = 0
    for moment in sorted(chance.randrange(1, resumed_map.COUNT - 50) for _ in range(2)):
        ended = run_map(tmp_path, moment, number)
        assert ended.returncode != 0, ended.stdout
        assert "AssertionError" not in ended.stderr
        kept = moment
    ended = run_map(tmp_path, resumed_map.COUNT)
    assert ended.returncode == 0, ended.stderr
    samples = (tmp_path / str(resumed_map.COUNT) / "samples").read_text().split()
    assert len(samples) == len(set(samples)) == int(ended.stdout)
    assert len(samples) <= resumed_map.COUNT - kept


def test_the_example_takes_what_an_earlier_start_has_computed(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "guides" / "31_resume.py"
    environment = {**os.environ, "SKYWARD_STATE": str(tmp_path / "state")}
    trained: list[int] = []
    for rates in ("4", "6", "6"):
        command = [sys.executable, str(example), "--rates", rates]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        assert f"{rates} losses: [10.0, 5.0, 2.0, 1.0" in ended.stdout
        trained.append((ended.stdout + ended.stderr).count("training with"))
    assert trained == [4, 2, 0]
