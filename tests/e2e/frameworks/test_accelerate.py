"""accelerate and the Trainer over two nodes without a word about nodes in the body; nothing is downloaded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import TaskCrashed
from skyward.events import Output
from tests.support.training import check_ranks, train_with_accelerate, train_with_trainer
from tests.support.waiting import until


@pytest.fixture(scope="module")
def grouped() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.torch()], console=False) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """The module's pools outlive a single test."""


Send = Callable[..., list[Any]]


@pytest.fixture(params=["plugin", "torch decorator", "transformers decorator"])
def send(request: pytest.FixtureRequest, grouped: sky.ComputePool, pool: sky.ComputePool) -> Send:
    """Sends a body to two nodes, in one of the ways in which it may find the others."""
    doors = {
        "plugin": (lambda body: body, grouped),
        "torch decorator": (sky.integrations.torch(), pool),
        "transformers decorator": (sky.integrations.transformers(), pool),
    }
    decorate, chosen = doors[request.param]
    return lambda body, *args: sky.compute(decorate(body))(*args) @ chosen


def test_an_accelerator_finds_the_other_nodes(send: Send) -> None:
    """On CPUs it takes itself for a program alone, unless it is told."""
    results = send(train_with_accelerate)
    check_ranks(results)
    assert results[0]["ranks"] == [0, 1]
    assert (results[0]["type"], results[0]["steps"]) == ("DistributedType.MULTI_CPU", 4)


def test_a_trainer_finds_the_other_nodes_without_use_cpu(send: Send) -> None:
    """S0-32, S0-33, S0-35, S0-36, S1-27, S4-29: one model, a loss that goes down, and the evaluation comes home."""
    results = send(train_with_trainer)
    check_ranks(results)
    assert [result["type"] for result in results] == ["distributed"] * 2
    assert {"eval_loss", "eval_runtime", "epoch"} <= results[0]["evaluation"].keys()


def test_every_call_starts_as_a_new_program(grouped: sky.ComputePool) -> None:
    """Otherwise: "AcceleratorState has already been initialized, restart your runtime completely"."""

    @sky.compute
    def precision(**options: Any) -> str:
        from accelerate import Accelerator

        return Accelerator(**options).mixed_precision

    assert precision() @ grouped == ["no", "no"]
    assert precision(mixed_precision="bf16") @ grouped == ["bf16", "bf16"]


def test_an_accelerator_that_was_alone_is_not_remembered(pool: sky.ComputePool) -> None:
    """Nothing may train apart because an earlier call did."""

    def count() -> int:
        from accelerate import Accelerator

        return Accelerator().num_processes

    assert sky.compute(count)() @ pool == [1, 1]
    assert sky.compute(sky.integrations.transformers(count))() @ pool == [2, 2]


def test_an_accelerator_that_is_held_goes_on_in_the_next_call(grouped: sky.ComputePool) -> None:
    @sky.compute
    def hold() -> None:
        import builtins

        from accelerate import Accelerator

        builtins.held = Accelerator(mixed_precision="bf16")  # type: ignore[attr-defined]

    @sky.compute
    def use() -> tuple[int, str]:
        import builtins

        found: Any = builtins.held  # type: ignore[attr-defined]
        del builtins.held  # type: ignore[attr-defined]
        return found.num_processes, found.mixed_precision

    hold() @ grouped
    assert use() @ grouped == [(2, "bf16"), (2, "bf16")]


def test_a_trainer_that_trains_apart_says_so_once() -> None:
    """The plugin of Hugging Face alone forms no group."""
    said: list[str] = []
    opened = sky.ComputePool(nodes=2, plugins=[sky.plugins.huggingface(token="hf_none")], console=False)
    opened.on_event(lambda event: said.append(event.text) if isinstance(event, Output) else None)
    with opened as apart:
        for _ in range(2):
            assert [result["world_size"] for result in sky.compute(train_with_accelerate)() @ apart] == [1, 1]
    assert "".join(said).count("each trains its own model") == 1


@pytest.fixture(params=["plugin", "transformers decorator"])
def door(
    request: pytest.FixtureRequest, grouped: sky.ComputePool, pool: sky.ComputePool
) -> tuple[Any, sky.ComputePool]:
    return (lambda body: body, grouped) if request.param == "plugin" else (sky.integrations.transformers(), pool)


def test_a_rank_that_raises_in_the_middle_ends_the_trainer_of_the_others(door: tuple[Any, sky.ComputePool]) -> None:
    decorate, chosen = door

    def body() -> None:
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        for step in range(3):
            if step == 1 and accelerator.process_index == 1:
                raise KeyError("mine")
            accelerator.backward(model(torch.ones(1, 1)).sum())

    began = time.monotonic()
    with pytest.raises(KeyError, match="mine") as caught:
        sky.compute(decorate(body))() @ chosen
    assert time.monotonic() - began < 60
    assert any("rank 1 of 2" in note for note in caught.value.__notes__)
    check_ranks(sky.compute(decorate(train_with_accelerate))() @ chosen)


def test_a_rank_that_is_killed_in_the_middle_is_named_and_the_next_training_works(
    grouped: sky.ComputePool, tmp_path: Path
) -> None:
    body = sky.compute(train_with_trainer)
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(lambda: body(wait_in_rank=1, directory=str(tmp_path)) @ grouped)
        until((tmp_path / "waits").exists, 120)
        os.kill(int((tmp_path / "waits").read_text()), signal.SIGKILL)
        with pytest.raises(TaskCrashed, match="node 1"):
            sent.result(60)
    check_ranks(body() @ grouped)


def test_rows_that_cannot_be_divided_leave_nobody_waiting(grouped: sky.ComputePool) -> None:
    """A rank has 49 rows or 25, its last batch is short: the frameworks pad, or leave out."""
    for options in ({}, {"dataloader_drop_last": True}):
        arguments = {"max_steps": -1, "num_train_epochs": 2, **options}
        check_ranks(sky.compute(train_with_trainer)(49, **arguments) @ grouped)
    check_ranks(sky.compute(train_with_accelerate)(3, 61, 8) @ grouped)
