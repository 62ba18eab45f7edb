"""What a stopped call leaves behind: nothing. A process in which a body was broken off runs no other."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import NodeLost
from tests.support.waiting import until

SLOW_MODULE = """
import time
from pathlib import Path
begun = time.monotonic()
Path({mark!r}).touch()
while time.monotonic() - begun < 2:
    pass
value = 42
"""


@sky.compute
def imported(directory: str) -> int:
    if directory not in sys.path:
        sys.path.insert(0, directory)
    import slow_module  # type: ignore[import-not-found]

    return slow_module.value


@sky.compute
def wait_for(path: Path, mark: Path | None = None) -> int:
    if mark is not None:
        mark.touch()
    while not path.exists():
        time.sleep(0.01)
    return os.getpid()


@sky.compute
def pid() -> int:
    return os.getpid()


@sky.compute
def speak(number: int, milliseconds: float) -> int:
    print(f"line {number}")
    end = time.perf_counter() + milliseconds / 1000
    while time.perf_counter() < end:
        pass
    return number


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_call_that_is_cancelled_while_it_imports_leaves_no_broken_module(concurrency: int, tmp_path: Path) -> None:
    mark = tmp_path / "importing"
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE.format(mark=str(mark)))
    with sky.ComputePool(nodes=1, concurrency=concurrency, console=False) as pool:
        first = imported(str(tmp_path)) > pool
        until(mark.exists)
        first.cancel()
        assert imported(str(tmp_path)) >> pool == 42


def test_pandas_can_be_imported_after_a_call_was_cancelled_while_importing_it(tmp_path: Path) -> None:
    @sky.compute
    def frame(mark: Path | None) -> int:
        if mark is not None:
            mark.touch()
        import pandas as pd

        return len(pd.DataFrame({"a": [1, 2, 3]}))

    with sky.ComputePool(nodes=1, concurrency=2, console=False) as pool:
        for attempt, pause in enumerate((0.0, 0.05, 0.15)):
            mark = tmp_path / str(attempt)
            first = frame(mark) > pool
            until(mark.exists)
            time.sleep(pause)  # not for luck: each moment of the import will do
            first.cancel()
        assert [f.result(60) for f in [frame(None) > pool for _ in range(4)]] == [3] * 4


def test_after_a_stop_new_calls_go_to_a_fresh_process_while_neighbours_finish(tmp_path: Path) -> None:
    with sky.ComputePool(nodes=1, concurrency=3, console=False) as pool:
        neighbours = [wait_for(tmp_path / "go", tmp_path / f"n{i}") > pool for i in range(2)]
        stopped = wait_for(tmp_path / "never", tmp_path / "s") > pool
        until(lambda: all((tmp_path / name).exists() for name in ("n0", "n1", "s")))
        stopped.cancel()
        fresh = {pid() >> pool for _ in range(3)}
        (tmp_path / "go").touch()
        old = {future.result(30) for future in neighbours}
        assert len(old) == 1
        assert not old & fresh
        assert len({pid() >> pool for _ in range(3)} & fresh) == 1


def test_neighbours_of_a_call_that_ignores_its_stop_are_not_blamed(tmp_path: Path) -> None:
    """There is no other way to end it than its process; the neighbours are told from the culprit."""

    @sky.compute
    def stuck(mark: Path) -> None:
        mark.touch()
        time.sleep(600)

    with sky.ComputePool(nodes=1, concurrency=2, console=False) as pool:
        neighbour = wait_for(tmp_path / "go", tmp_path / "n").with_retries(0) > pool
        culprit = stuck(tmp_path / "c") > pool
        until(lambda: (tmp_path / "n").exists() and (tmp_path / "c").exists())
        culprit.cancel()
        error = neighbour.exception(60)
        assert isinstance(error, NodeLost)
        assert "another call in its process had to be killed" in str(error)
        assert pid() >> pool


@pytest.mark.parametrize("options", [{}, {"concurrency": 4}, {"worker": sky.Worker(3, executor="process")}])
def test_calls_beside_cancelled_ones_all_answer(options: dict[str, object]) -> None:
    """H1 and H2: 60 short printing calls, 20 of them cancelled; a pool was dead after a few rounds."""
    rng = random.Random(7)
    with sky.ComputePool(nodes=2, console=False, **options) as pool:  # type: ignore[arg-type]
        for _ in range(8):
            futures = [speak(i, rng.choice((0, 1, 2, 5, 20))) > pool for i in range(60)]
            victims = set(rng.sample(range(60), 20))
            for victim in sorted(victims):
                futures[victim].cancel()
            assert not wait(futures, timeout=120).not_done
            assert [f.result() for i, f in enumerate(futures) if i not in victims] == [
                i for i in range(60) if i not in victims
            ]


ASSERT = "CUDA error: device-side assert triggered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"


@sky.compute
def fails_with(text: str) -> None:
    raise RuntimeError(text)


def test_a_process_whose_gpu_context_is_dead_runs_no_other_body() -> None:
    with sky.ComputePool(nodes=1, console=False) as pool:
        first = pid() >> pool
        with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
            fails_with("CUDA error: out of memory") >> pool
        assert pid() >> pool == first
        with pytest.raises(RuntimeError, match="device-side assert") as ended:
            fails_with(ASSERT) >> pool
        assert any("the process was replaced" in note for note in ended.value.__notes__)
        assert any("CUDA_LAUNCH_BLOCKING" in note for note in ended.value.__notes__)
        assert pid() >> pool != first


def test_calls_that_wait_behind_one_that_kills_the_gpu_context_run_in_a_fresh_process(tmp_path: Path) -> None:
    @sky.compute
    def dies(go: Path) -> int:
        while not go.exists():
            time.sleep(0.01)
        raise RuntimeError(ASSERT)

    with sky.ComputePool(nodes=1, concurrency=2, console=False) as pool:
        neighbour = wait_for(tmp_path / "end", tmp_path / "begun") > pool
        until((tmp_path / "begun").exists)
        culprit = dies(tmp_path / "go") > pool
        behind = [pid() > pool for _ in range(5)]
        (tmp_path / "go").touch()
        assert "device-side assert" in str(culprit.exception(60))
        fresh = {future.result(60) for future in behind}
        (tmp_path / "end").touch()
        assert neighbour.result(60) not in fresh


def test_a_map_that_keeps_exceptions_leaves_no_dead_gpu_context_behind() -> None:
    def square(number: int) -> int:
        if number == 1:
            raise RuntimeError(ASSERT)
        return number * number

    with sky.ComputePool(nodes=1, console=False) as pool:
        first = pid() >> pool
        results = pool.map(square, range(3), return_exceptions=True)
        assert [results[0], results[2]] == [0, 4]
        assert "the process was replaced" in str(results[1].__notes__)
        assert pid() >> pool != first


def test_ranks_of_a_group_are_all_made_again_after_one_of_them_has_killed_its_gpu_context() -> None:
    @sky.compute
    def on_one(rank: int) -> int:
        if sky.instance_info().rank == rank:
            raise RuntimeError(ASSERT)
        return os.getpid()

    with sky.ComputePool(nodes=2, plugins=[sky.Plugin("group", around_app=grouped)], console=False) as pool:
        before = set(on_one(-1) @ pool)
        with pytest.raises(RuntimeError, match="device-side assert"):
            on_one(1) @ pool
        assert not before & set(on_one(-1) @ pool)


@contextmanager
def grouped(info: sky.InstanceInfo) -> Iterator[None]:
    """A plugin's hook: a pool that has one takes its processes for a group."""
    yield


def test_after_a_failed_body_the_memory_that_torch_keeps_for_itself_is_returned() -> None:
    @sky.compute
    def fill(fails: bool) -> int:
        import types

        sys.modules.setdefault("torch", types.ModuleType("torch"))
        torch = sys.modules["torch"]
        if not hasattr(torch, "cuda"):
            torch.cuda = types.SimpleNamespace(emptied=0)
            torch.cuda.is_initialized = lambda: True
            torch.cuda.device_count = lambda: 1
            torch.cuda.memory_reserved = lambda device: 20 << 30
            torch.cuda.memory_allocated = lambda device: 0
            torch.cuda.empty_cache = lambda: setattr(torch.cuda, "emptied", torch.cuda.emptied + 1)
        if fails:
            raise ValueError("no")
        return torch.cuda.emptied

    with sky.ComputePool(nodes=1, console=False) as pool:
        assert fill(False) >> pool == 0
        with pytest.raises(ValueError, match="no"):
            fill(True) >> pool
        assert fill(False) >> pool == 1
