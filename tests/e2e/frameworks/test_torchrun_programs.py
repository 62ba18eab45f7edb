"""Programs written for torchrun, unchanged in a body: they form and end their groups themselves."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from tests.support.programs import load_program

SCRIPTS = Path(__file__).parent / "ddp_scripts"


@pytest.fixture(scope="module")
def torch_pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.torch()], console=False) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """The module's pools outlive a single test."""


Send = Callable[..., list[Any]]


@pytest.fixture(params=["plugin", "decorator", "decorator that forms no group"])
def send(request: pytest.FixtureRequest, torch_pool: sky.ComputePool, pool: sky.ComputePool) -> Send:
    """Sends a body to two nodes in one of the ways in which it may find the others."""
    doors = {
        "plugin": (lambda body: body, torch_pool),
        "decorator": (sky.integrations.torch(), pool),
        "decorator that forms no group": (sky.integrations.torch(init=False), pool),
    }
    decorate, chosen = doors[request.param]
    return lambda body, *args: sky.compute(decorate(body))(*args) @ chosen


def same(left: list[Any], right: list[Any]) -> bool:
    return all(a.equal(b) for a, b in zip(left, right, strict=True))


def test_a_program_that_forms_and_ends_its_group_runs_again_and_again(send: Send) -> None:
    """S4-19: with `init_process_group` and `destroy_process_group` as globals of the script."""
    main = load_program(SCRIPTS / "launched.py").main
    for _ in range(2):
        (rank_0, steps_0, weights_0), (rank_1, steps_1, weights_1) = send(main, 2, 8)
        assert (rank_0, rank_1, steps_0, steps_1) == (0, 1, 8, 8)
        assert weights_0.equal(weights_1)


def test_a_program_goes_on_from_its_snapshot(send: Send, tmp_path: Path) -> None:
    main = load_program(SCRIPTS / "snapshot.py").main
    path = str(tmp_path / "snapshot.pt")
    first, second = send(main, path, 2), send(main, path, 4)
    assert [result["rank"] for result in first] == [0, 1]
    for results in (first, second):
        assert results[0]["losses"] == results[1]["losses"]
        assert len(results[0]["losses"]) == 2
        assert same(results[0]["weights"], results[1]["weights"])
    assert second[0]["losses"][-1] < first[0]["losses"][0]


def test_a_program_that_names_rank_and_meeting_place_itself_uses_the_pools(send: Send, tmp_path: Path) -> None:
    program = load_program(SCRIPTS / "by_hand.py")

    def body(path: str) -> dict[str, Any]:
        info = sky.instance_info()
        return program.main(info.rank, info.world_size, path)

    results = send(body, str(tmp_path / "model.checkpoint"))
    assert [result["rank"] for result in results] == [0, 1]
    assert same(results[0]["weights"], results[1]["weights"])


def test_a_program_with_a_time_limit_of_its_own_forms_two_groups_in_a_row(send: Send) -> None:
    results = send(load_program(SCRIPTS / "collectives.py").main)
    assert [(r["rank"], r["passed"], r["again"], r["total"]) for r in results] == [
        (0, 1.0, 3.0, 2.0),
        (1, 0.0, 3.0, 2.0),
    ]
    assert results[0]["objects"] == results[1]["objects"]
    assert results[0]["averaged"] == results[1]["averaged"] == [0.5] * 6


def test_a_file_is_run_as_main(send: Send, tmp_path: Path) -> None:
    """What `torchrun snapshot.py --result ...` does."""
    script, result = str(SCRIPTS / "snapshot.py"), str(tmp_path / "result")
    arguments = [script, "--result", result, "--snapshot", str(tmp_path / "snapshot.pt")]

    def body() -> None:
        import sys

        before, sys.argv = sys.argv, arguments
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            sys.argv = before

    send(body)
    assert {path.name for path in tmp_path.iterdir()} == {"result.0", "result.1", "snapshot.pt"}


def test_a_group_that_leaves_the_others_out_is_the_bodys_own(send: Send, tmp_path: Path) -> None:
    def body(directory: str) -> tuple[int, int]:
        import torch.distributed as dist

        path = Path(directory, os.environ["RANK"])
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
        found = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        return found

    assert send(body, str(tmp_path)) == [(0, 1), (0, 1)]
    assert send(load_program(SCRIPTS / "launched.py").main, 1, 8)[1][0] == 1


def test_a_second_group_beside_the_first_is_refused_as_torch_does(torch_pool: sky.ComputePool) -> None:
    def body() -> None:
        from datetime import timedelta

        import torch.distributed as dist

        for seconds in (30, 40):
            dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))

    with pytest.raises(ValueError, match="twice"):
        sky.compute(body)() @ torch_pool
    assert send_total(torch_pool) == [3.0, 3.0]


def send_total(pool: sky.ComputePool) -> list[float]:
    def total() -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(value)
        return value.item()

    return sky.compute(total)() @ pool


@pytest.mark.parametrize("line", ["os.environ['LOCAL_RANK']", "dist.init_process_group('gloo')"])
def test_a_pool_without_a_group_says_what_a_program_for_torchrun_needs(line: str, pool: sky.ComputePool) -> None:
    def body() -> None:
        import torch.distributed as dist

        eval(line, {"os": os, "dist": dist})

    with pytest.raises((KeyError, ValueError)) as caught:
        sky.compute(body)() @ pool
    assert any("@sky.integrations.torch(init=False)" in note for note in caught.value.__notes__)
