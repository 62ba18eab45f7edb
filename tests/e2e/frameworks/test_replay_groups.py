"""Ranks of a torch group that failed run again as processes of this computer, with gloo."""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext

import pytest

import skyward as sky
from skyward.pool.replay import Replay, _on_the_cpu  # pyright: ignore[reportPrivateUsage]


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


@sky.compute
def train(failing: int) -> str:
    import torch
    import torch.distributed as dist

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        if dist.get_rank() == failing and step == 1:
            raise AssertionError(f"rank {dist.get_rank()} of {dist.get_world_size()}, step {step}")
    return dist.get_backend()


@sky.compute
def alone() -> int:
    import torch.distributed as dist

    raise ValueError(dist.get_world_size())


@needs("torch")
@pytest.mark.timeout(600)
def test_an_assertion_in_a_rank_of_ddp_is_reproduced_and_so_is_a_call_to_one_node_of_the_group() -> None:
    with sky.ComputePool(nodes=2, console=False, plugins=[sky.plugins.torch(backend="gloo")]) as pool:
        with pytest.raises(AssertionError) as broadcast:
            train(1) @ pool
        with pytest.raises(ValueError, match="2") as single:
            alone() >> pool
    ended = Replay(broadcast.value).run()
    assert ended.text.endswith("AssertionError: rank 1 of 2, step 1")
    assert "raise AssertionError(f" in ended.text
    with pytest.raises(ValueError, match="2"):
        sky.replay(single.value)


@sky.compute
def sums(failing: int) -> None:
    import jax
    import jax.numpy as jnp

    rank = jax.process_index()
    total = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(jnp.full((1,), rank + 1.0))
    if rank == failing:
        raise AssertionError(f"rank {rank} of {jax.process_count()}, sum {float(total[0])}")


@needs("jax")
@pytest.mark.timeout(600)
def test_a_rank_that_fails_in_jax_is_reproduced() -> None:
    with sky.ComputePool(nodes=2, console=False, plugins=[sky.plugins.jax()]) as pool:
        with pytest.raises(AssertionError) as there:
            sums(1) @ pool
    ended = Replay(there.value).run()
    assert ended.text.endswith("AssertionError: rank 1 of 2, sum 3.0")
    assert ended.rank == 1


@sky.compute
def fit(failing: int) -> None:
    import keras
    import numpy as np

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rank = sky.instance_info().rank
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    model.predict(np.ones((4, 3 if rank == failing else 2)), verbose=0)


@needs("keras")
@pytest.mark.timeout(600)
def test_a_rank_that_fails_inside_keras_is_reproduced() -> None:
    with sky.ComputePool(nodes=2, console=False, plugins=[sky.plugins.jax(), sky.plugins.keras()]) as pool:
        with pytest.raises(ValueError, match="incompatible with the layer") as there:
            fit(1) @ pool
    again = Replay(there.value)
    ended = again.run()
    assert again.compared(ended)[0].startswith("it failed as on the node: ValueError: ")
    assert "in fit\n    model.predict(" in ended.text


def test_a_hook_that_asks_for_nccl_gets_the_backend_of_the_cpu() -> None:
    def around(info: object, backend: str | None) -> AbstractContextManager[None]:
        return nullcontext()

    found = _on_the_cpu(functools.partial(around, backend="nccl"))
    assert isinstance(found, functools.partial)
    assert found.keywords == {"backend": None}
    assert _on_the_cpu(around) is around
