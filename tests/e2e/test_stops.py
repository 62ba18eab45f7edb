"""What a stopped call leaves behind: nothing. A process in which a body was broken off runs no other."""

from __future__ import annotations

import os
import random
import sys
import time
from concurrent.futures import wait
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
