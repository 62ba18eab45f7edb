"""Tensors, models and tables through a pool of this computer: equal, shared as they were, and nobody else's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import torch

import skyward as sky

MANY = 1 << 20


@sky.compute
def echo(value: Any) -> Any:
    return value


@sky.compute
def add_rank(tensor: Any) -> Any:
    tensor += sky.instance_info().rank + 1
    return tensor


@sky.compute
def fail(tensor: Any) -> None:
    error = ValueError("with a tensor")
    error.tensor = tensor  # type: ignore[attr-defined]
    raise error


def test_tensors_of_several_kinds_come_back_equal(pool: sky.ComputePool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint16):
        sent = torch.arange(MANY).to(dtype)
        got = echo(sent) >> pool
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8))
    array = jnp.arange(MANY).astype("bfloat16")
    assert bool(((echo(array) >> pool) == array).all())


def test_what_shares_memory_shares_it_after_the_way_there_and_back(pool: sky.ComputePool) -> None:
    whole = torch.zeros(MANY)
    got, part, again = echo((whole, whole[5:10], whole)) >> pool
    part += 1
    assert got is again
    assert got.sum() == 5
    assert whole.sum() == 0


def test_a_model_is_trained_there_and_comes_back(pool: sky.ComputePool) -> None:
    @sky.compute
    def trained(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.step()
        return model

    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    got = trained(model) >> pool
    assert got[1].weight is got[0].weight
    assert not torch.equal(got[0].weight, before)
    assert torch.equal(model[0].weight, before)
    got.load_state_dict(echo(model.state_dict()) >> pool)
    assert torch.equal(got[0].weight, before)


def test_what_a_rank_does_to_its_tensor_no_other_rank_sees(pool: sky.ComputePool) -> None:
    sent = torch.zeros(MANY)
    for _ in range(2):
        first, second = add_rank(sent) @ pool
        assert (first[0], first[-1], second[0], second[-1]) == (1, 1, 2, 2)
    assert sent.sum() == 0


def test_a_tensor_that_comes_back_unchanged_can_be_changed_here(pool: sky.ComputePool) -> None:
    sent = torch.zeros(MANY)
    first, second = echo(sent) @ pool
    first += 1
    assert second.sum() == 0
    assert (echo(sent) >> pool).sum() == 0


def test_an_exception_brings_a_small_tensor_home(pool: sky.ComputePool) -> None:
    with pytest.raises(ValueError, match="with a tensor") as caught:
        fail(torch.arange(5)) >> pool
    assert torch.equal(caught.value.tensor, torch.arange(5))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="with a tensor"):
        fail(torch.zeros(MANY)) >> pool


def test_large_items_stream_both_ways_however_many_there_are(pool: sky.ComputePool) -> None:
    """More than may be under way at a time: who has taken a large item says so."""

    @sky.compute
    def doubled(items: Iterator[Any]) -> Any:
        for item in items:
            yield item * 2

    count = 40
    got = [int(t[0]) for t in doubled(torch.full((MANY,), n) for n in range(count)) >> pool]
    assert got == [2 * n for n in range(count)]


def test_tables_and_bytes_come_back_equal(pool: sky.ComputePool) -> None:
    frame = pd.DataFrame({"text": [f"row {n}" for n in range(100_000)], "number": np.arange(100_000)})
    assert (echo(frame) >> pool).equals(frame)
    data = random.randbytes(10_000_000)
    assert echo(data) @ pool == [data, data]
