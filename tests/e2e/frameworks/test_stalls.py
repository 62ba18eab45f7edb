"""Ranks that wait for each other for ever: told in seconds, stopped as one, and the next broadcast works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest

import skyward as sky
from skyward import events
from tests.support.waiting import until


@contextmanager
def heard(pool: sky.ComputePool) -> Iterator[list[Any]]:
    """The events of a pool, as they come."""
    found: list[Any] = []
    stop = pool.on_event(found.append)
    try:
        yield found
    finally:
        stop()


def warnings(found: list[Any]) -> list[str]:
    return [event.text for event in found if isinstance(event, events.Notice) and event.level == "warning"]


@sky.compute
def add_up(steps: list[int]) -> int:
    import torch
    import torch.distributed as dist

    rows = sky.shard(list(range(sum(steps))))
    for _ in range(steps[sky.instance_info().rank]):
        dist.all_reduce(torch.ones(2))
    return len(rows)


@sky.compute
def harmless() -> int:
    return 1


def test_a_torch_rank_with_a_step_too_many_is_told_and_stopped_and_the_group_is_made_again() -> None:
    with (
        sky.ComputePool(nodes=2, plugins=[sky.plugins.torch()], stall_timeout=3, console=False) as pool,
        heard(pool) as found,
    ):
        assert add_up([2, 2]) @ pool == [2, 2]
        with pytest.raises(sky.errors.Stalled, match="rank 1 has returned, rank 0 stands in torch") as ended:
            add_up([3, 2]) @ pool
        text = str(ended.value)
        assert "Rank 0 has entered 5 collectives, rank 1 4." in text
        assert "sky.shard gave rank 0 3, rank 1 2 of 5 elements" in text
        assert "in all_reduce" in text
        assert [stack.state for stack in ended.value.stacks] == ["running", "returned"]
        until(lambda: [event.waiting for event in found if isinstance(event, events.BroadcastStalled)] == [(0,)])
        assert add_up([2, 2]) @ pool == [2, 2]
        # and a call to one node of a group is told at once, once for each function
        assert (harmless() >> pool, harmless() >> pool) == (1, 1)
        until(lambda: sum("harmless is sent to one node (>>)" in text for text in warnings(found)) == 1)


@sky.compute
def gather(steps: list[int]) -> int:
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    for _ in range(steps[sky.instance_info().rank]):
        multihost_utils.process_allgather(jnp.ones(2))
    return steps[0]


def test_a_jax_rank_with_a_step_too_many_is_stopped_and_its_runners_are_replaced() -> None:
    with (
        sky.ComputePool(nodes=2, plugins=[sky.plugins.jax()], stall_timeout=3, console=False) as pool,
        heard(pool) as found,
    ):
        assert gather([1, 1]) @ pool == [1, 1]
        with pytest.raises(sky.errors.Stalled, match="process_allgather"):
            gather([2, 1]) @ pool
        assert gather([1, 1]) @ pool == [1, 1]
        with pytest.raises(sky.errors.Stalled, match="Send it to all with"):
            gather([1, 1]) >> pool
        until(lambda: any("gather is sent to one node (>>)" in text for text in warnings(found)))
        assert gather([1, 1]) @ pool == [1, 1]


def beat() -> None:
    """What trackers of experiments have a thread do."""
    while True:
        time.sleep(1)


@sky.compute
def fit(rows: int) -> int:
    import keras
    import numpy as np

    Thread(target=beat, daemon=True).start()
    x, y = sky.shard(np.ones((rows, 4), "float32"), np.arange(rows) % 2)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    model.fit(x, y, epochs=2, batch_size=64, verbose=0)
    return len(x)


def test_keras_ranks_with_unequal_shards_are_stopped_in_words_and_the_next_broadcast_works() -> None:
    """S3-22, S1-20: Keras waits for a thread of its own, which waits in JAX for a rank that has made fewer steps.

    Threads of others, such as one that wakes now and then, do not hide that.
    """
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.keras()], stall_timeout=6, console=False) as pool:
        with pytest.raises(sky.errors.Stalled, match=r"Keras' fit\(\), in JAX") as ended:
            fit(129) @ pool
        assert "sky.shard gave rank 0 65, rank 1 64 of 129 elements" in str(ended.value)
        assert "test_stalls.py" in str(ended.value).partition("\n")[0]
        assert fit(128) @ pool == [64, 64]
