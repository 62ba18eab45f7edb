"""JAX and Keras over ranks: several processes on each of several nodes, one mesh, one model."""

from __future__ import annotations

import os
from typing import Any

import skyward as sky


def joined() -> dict[str, Any]:
    """What JAX knows of the group, and a sum over all ranks."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    mesh = jax.make_mesh((jax.device_count(),), ("ranks",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    whole = jax.make_array_from_process_local_data(rows, np.full(2, jax.process_index() + 1.0, np.float32))
    return {
        "place": (jax.process_index(), jax.process_count()),
        "devices": (jax.local_device_count(), jax.device_count()),
        "variables": (os.environ["JAX_PROCESS_ID"], os.environ["JAX_NUM_PROCESSES"]),
        "sum": float(jax.jit(jnp.sum)(whole)),
    }


def fitted() -> tuple[list[Any], float]:
    """A small model, trained on this rank's part of the data; its weights, and the last loss."""
    import keras
    import numpy as np

    x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
    mine, wanted = sky.shard(x, x.sum(axis=1), drop_last=True)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    history = model.fit(mine, wanted, epochs=2, batch_size=16, verbose=0)
    return model.get_weights(), history.history["loss"][-1]


def test_jax_and_keras_join_every_rank() -> None:
    plugins = [sky.plugins.jax(), sky.plugins.keras(seed=1)]
    with sky.ComputePool(nodes=2, processes_per_node=2, plugins=plugins, console=False) as pool:
        found = sky.compute(joined)() @ pool
        trained = sky.compute(fitted)() @ pool
    assert [each["place"] for each in found] == [(rank, 4) for rank in range(4)]
    assert [each["variables"] for each in found] == [(str(rank), "4") for rank in range(4)]
    assert [each["devices"] for each in found] == [(1, 4)] * 4
    assert [each["sum"] for each in found] == [20.0] * 4
    head, loss = trained[0]
    for weights, other in trained:
        assert other == loss
        assert all((mine == theirs).all() for mine, theirs in zip(head, weights, strict=True))
