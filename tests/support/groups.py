"""Groups of frameworks over the two nodes of a pool, checked in as few calls as show that they are groups."""

from __future__ import annotations

from typing import Any

import skyward as sky
from tests.ssh.places import TORCH, torch_plugin

__all__ = ["check_ddp", "check_jax_and_keras"]


@sky.compute
def _trained(steps: int) -> tuple[int, int, float, list[float]]:
    """Rank, size of the group, a sum over all ranks, and the weights after some steps of DDP, each on its own data."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1)
    shared = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        shared(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    weights = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
    return dist.get_rank(), dist.get_world_size(), total.item(), weights


@sky.compute
def _summed() -> tuple[int, int, float]:
    """Number of this process, how many there are, and the sum of an array that lies on all of them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    mesh = jax.make_mesh((jax.device_count(),), ("nodes",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("nodes"))
    own = np.arange(4.0, dtype=np.float32) + 10 * jax.process_index()
    total = jax.jit(jnp.sum)(jax.make_array_from_process_local_data(rows, own))
    return jax.process_index(), jax.process_count(), float(total)


@sky.compute
def _fitted() -> tuple[str, int, list[float], list[float]]:
    """Keras's backend, the devices that share the model, its weights before and after a step on this node's data."""
    import keras
    import numpy as np

    distribution: Any = keras.distribution.distribution()
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    before = np.concatenate([value.ravel() for value in model.get_weights()]).tolist()
    inputs = np.full((8, 2), 1.0 + sky.instance_info().node, dtype="float32")
    model.fit(inputs, inputs[:, :1], batch_size=8, verbose=0)
    after = np.concatenate([value.ravel() for value in model.get_weights()]).tolist()
    return keras.config.backend(), distribution.device_mesh.devices.size, before, after


def check_ddp(provider: Any) -> None:
    """torch's group spans two nodes, and DDP keeps one model on them."""
    with sky.ComputePool(provider=provider, nodes=2, image=TORCH, plugins=[torch_plugin()], console=False) as pool:
        first, second = _trained(5) @ pool
    assert (first[:3], second[:3]) == ((0, 2, 3.0), (1, 2, 3.0))
    assert first[3] == second[3]


def check_jax_and_keras(provider: Any) -> None:
    """JAX computes over two nodes, and Keras trains one model on them, from data that differ."""
    plugins = [sky.plugins.jax(), sky.plugins.keras()]
    with sky.ComputePool(provider=provider, nodes=2, plugins=plugins, console=False) as pool:
        assert _summed() @ pool == [(0, 2, 52.0), (1, 2, 52.0)]
        first, second = _fitted() @ pool
        assert _summed() @ pool == [(0, 2, 52.0), (1, 2, 52.0)]
    assert first == second
    backend, devices, before, after = first
    assert (backend, devices) == ("jax", 2)
    assert before != after
