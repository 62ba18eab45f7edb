"""Keras on real nodes on this computer: the backend in time, equal weights on JAX, the others left to their own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import skyward as sky


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.jax(), sky.plugins.keras()], console=False) as opened:
        yield opened


def points(count: int = 256) -> tuple[Any, Any]:
    """Points in the plane, and on which side of a line they lie."""
    chance = np.random.default_rng(7)
    x = chance.normal(size=(count, 2)).astype("float32")
    return x, (x.sum(axis=1) > 0).astype("int32")


def build() -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


def fit(epochs: int = 3) -> dict[str, Any]:
    """Train on this node's shard, as the Keras guide does; what came of it."""
    import keras

    x, y = sky.shard(*points(), shuffle=True, seed=42)
    model = build()
    initial = model.get_weights()
    history = model.fit(x, y, epochs=epochs, batch_size=32, verbose=0)
    _, accuracy = model.evaluate(*points(), verbose=0)
    return {
        "backend": keras.config.backend(),
        "initial": initial,
        "weights": model.get_weights(),
        "history": history.history,
        "accuracy": accuracy,
        "rows": len(x),
        "distribution": keras.distribution.distribution() is not None,
    }


@sky.compute
def train(epochs: int = 3) -> dict[str, Any]:
    return fit(epochs)


def same(left: list[Any], right: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_nodes_train_one_model_on_their_shards(pool: sky.ComputePool) -> None:
    """S3-06, S3-13, S3-21, S3-22, S3-25, S1-17, S1-18, X11: equal weights at the start and the end, one history."""
    first, second = train() @ pool
    assert (first["backend"], first["rows"], second["rows"]) == ("jax", 128, 128)
    assert same(first["initial"], second["initial"])
    assert same(first["weights"], second["weights"])
    assert not same(first["initial"], first["weights"])
    assert first["history"] == second["history"]
    assert first["history"]["loss"][0] > first["history"]["loss"][-1]
    assert first["accuracy"] == second["accuracy"] > 0.8


def test_without_a_seed_every_training_starts_elsewhere(pool: sky.ComputePool) -> None:
    """S0-24: omitted means no seeding."""

    @sky.compute
    def initial() -> list[Any]:
        return build().get_weights()

    assert not same((initial() @ pool)[0], (initial() @ pool)[0])


def test_devices_are_found_and_datasets_not_split_again(pool: sky.ComputePool) -> None:
    """S1-11, S1-16, S3-02, S3-08 to S3-12, S3-14, S0-06, X11: and TensorFlow is not imported for that."""

    @sky.compute
    def look() -> tuple[Any, ...]:
        import keras

        assert "tensorflow" not in sys.modules

        distribution = keras.distribution.distribution()
        devices = distribution.device_mesh.devices.size, len(keras.distribution.list_devices())
        kind = type(distribution).__name__
        return os.environ["KERAS_BACKEND"], keras.config.backend(), kind, devices, distribution.auto_shard_dataset

    assert look() @ pool == [("jax", "jax", "DataParallel", (2, 2), False)] * 2


def test_another_backend_in_the_same_process_is_refused(pool: sky.ComputePool) -> None:
    """S0-23."""

    @sky.compute
    @sky.integrations.keras(backend="torch")
    def other() -> str:
        return "never"

    with pytest.raises(ValueError, match=r"Keras on 'jax' already.*'torch'"):
        other() >> pool


def test_the_decorator_adds_nothing_where_the_plugin_was(pool: sky.ComputePool) -> None:
    """X1; and its seed makes a call repeatable."""

    @sky.compute
    @sky.integrations.keras(backend="jax", seed=42)
    def seeded() -> dict[str, Any]:
        return fit(1)

    once, again = seeded() @ pool, seeded() @ pool
    assert same(once[0]["weights"], once[1]["weights"])
    assert same(once[0]["weights"], again[0]["weights"])


def test_one_node_needs_the_keras_plugin_alone() -> None:
    """S3-19, S3-20, S3-24, S3-25, S0-06: no distribution, only the backend's framework."""

    @sky.compute
    def alone() -> tuple[dict[str, Any], list[str], str, bool]:
        early = os.environ["KERAS_BACKEND"], "keras" in sys.modules
        result = fit()
        return result, [name for name in ("torch", "tensorflow", "jax") if name in sys.modules], *early

    with sky.ComputePool(plugins=[sky.plugins.keras()], console=False) as single:
        result, loaded, backend, imported = alone() >> single
    assert (backend, imported) == ("jax", False)
    assert loaded == ["jax"]
    assert not result["distribution"]
    assert result["accuracy"] > 0.8


@contextmanager
def without_the_backend(info: sky.InstanceInfo) -> Iterator[None]:
    """A plugin's hook that takes away what the image's environment says of Keras."""
    assert os.environ.pop("KERAS_BACKEND") == "tensorflow"
    yield


def test_on_tensorflow_the_plugin_sets_the_backend_when_the_runner_starts_and_nothing_else() -> None:
    """S3-05, S3-18, S3-25: on two nodes too; a strategy is the user's business."""

    @sky.compute
    def configured() -> tuple[str, str | None, list[str]]:
        loaded = [name for name in ("keras", "tensorflow", "jax", "torch") if name in sys.modules]
        return os.environ["KERAS_BACKEND"], os.environ.get("TF_CONFIG"), loaded

    plugins = [sky.Plugin("first", around_app=without_the_backend), sky.plugins.keras("tensorflow")]
    with sky.ComputePool(nodes=2, plugins=plugins, console=False) as pool:
        assert configured() @ pool == [("tensorflow", None, [])] * 2


def test_keras_alone_brings_the_group_of_jax_along() -> None:
    """S1-20, S0-27, S3-08: nodes never train apart without a word; a call to one of them trains there by itself."""
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.keras()], console=False) as joined:
        first, second = train(1) @ joined
        assert same(first["initial"], second["initial"])
        assert same(first["weights"], second["weights"])
        single = train(1) >> joined
        assert not single["distribution"]
        first, second = train(1) @ joined  # the random numbers that one node has drawn alone do not matter
        assert same(first["initial"], second["initial"])
        assert same(first["weights"], second["weights"])


def test_the_decorator_joins_the_nodes_and_holds_in_threads() -> None:
    """S0-22, S0-24, S0-28, T6: Keras keeps its distribution per thread, and slots are threads here."""

    @sky.compute
    @sky.stdout(only="head")
    @sky.integrations.keras(backend="jax", seed=42)
    def decorated(epochs: int) -> dict[str, Any]:
        return fit(epochs)

    with sky.ComputePool(nodes=2, concurrency=2, console=False) as plain:
        runs = [decorated(1) @ plain for _ in range(2)]
    for first, second in runs:
        assert first["distribution"]
        assert second["distribution"]
        assert same(first["weights"], second["weights"])
        assert same(first["weights"], runs[0][0]["weights"])


def test_the_decorator_is_in_time_for_a_script_that_imports_keras(script: Callable[..., Any]) -> None:
    """S0-22: with keras as a global, unpickling the function imports it."""
    program = script("""
import skyward as sky
import keras

@sky.compute
@sky.silent
@sky.integrations.keras(backend="jax")
def chosen():
    return keras.config.backend()

with sky.ComputePool(console=False) as pool:
    print(chosen() >> pool)
""")
    out, errors = program.communicate(timeout=300)
    assert out == "jax\n", errors


def test_jax_may_stand_after_keras() -> None:
    """S3-14: Keras brings the group of JAX along, so that the order is no trap."""
    with sky.ComputePool(nodes=2, plugins=[sky.plugins.keras(), sky.plugins.jax()], console=False) as turned:
        first, second = train(1) @ turned
    assert same(first["weights"], second["weights"])


def test_on_torch_a_model_is_a_module_for_ddp() -> None:
    """S3-07, S3-15, S3-16, S3-17, S3-23, S3-25, S1-19, X4: the torch plugin has the group, Keras only the backend."""

    @sky.compute
    def averaged() -> tuple[str, bool, bool, list[Any], bool, list[int]]:
        import keras
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

        rows = TensorDataset(*(torch.as_tensor(part) for part in (*points(), np.arange(256))))
        x, y = sky.shard(*points(), shuffle=True, seed=1)
        model = build()
        model(x[:1])
        parallel = DistributedDataParallel(model)
        steps = torch.optim.SGD(model.parameters(), lr=0.1)
        sampled: list[int] = []

        def learn(inputs: Any, labels: Any) -> None:
            steps.zero_grad()
            torch.nn.functional.cross_entropy(parallel(inputs), labels.long()).backward()
            steps.step()

        for at in range(0, 64, 16):
            learn(torch.as_tensor(x[at : at + 16]), torch.as_tensor(y[at : at + 16]))
        for inputs, labels, numbers in DataLoader(rows, batch_size=32, sampler=DistributedSampler(rows, seed=1)):
            learn(inputs, labels)
            sampled += numbers.tolist()
        grouped = torch.distributed.is_initialized()
        plain = keras.distribution.distribution() is None
        module = isinstance(model, torch.nn.Module)
        return keras.config.backend(), grouped, module, model.get_weights(), plain, sampled

    both = [sky.plugins.torch(), sky.plugins.keras(backend="torch")]
    with sky.ComputePool(nodes=2, plugins=both, console=False) as joined:
        first, second = averaged() @ joined
        assert first[:3] == second[:3] == ("torch", True, True)
        assert first[4]
        assert same(first[3], second[3])
        assert sorted(first[5] + second[5]) == list(range(256))


def test_the_decorator_leaves_torch_and_tensorflow_to_their_own_start() -> None:
    """S0-25, S0-26, X4: a group for torch, TF_CONFIG for TensorFlow; seeded for both (S0-24)."""

    @sky.compute
    @sky.integrations.keras(backend="torch", seed=3)
    def on_torch() -> tuple[str, int, bool, list[Any]]:
        import keras
        import torch.distributed as dist

        plain = keras.distribution.distribution() is None
        return keras.config.backend(), dist.get_world_size(), plain, build().get_weights()

    with sky.ComputePool(nodes=2, console=False) as plain:
        first, second = on_torch() @ plain
        assert first[:3] == second[:3] == ("torch", 2, True)
        assert same(first[3], second[3])


@sky.compute
def sharded_by_type() -> list[tuple[bool, bool]]:
    """Whether parts of values of TensorFlow are values of it, and hold every row."""
    import tensorflow as tf

    whole: Any = tf.constant([[i, i + 1] for i in range(0, 14, 2)], tf.int16)
    found: list[tuple[bool, bool]] = []
    for data in (whole, tf.Variable(whole), tf.RaggedTensor.from_tensor(whole)):
        for options in ({"shuffle": True}, {"pad": True}, {"shuffle": True, "pad": True}):
            parts: list[Any] = [sky.shard(data, node=node, total_nodes=3, **options) for node in range(3)]
            rows = {tuple(row) for part in parts for row in part.numpy().tolist()}
            found.append(({part.dtype for part in parts} == {tf.int16}, rows == {(i, i + 1) for i in range(0, 14, 2)}))
    nothing = sky.shard(tf.zeros((0, 3)), shuffle=True)
    found.append((nothing.dtype == tf.float32, nothing.shape == (0, 3)))
    return found


def test_tensorflow_is_configured_and_trains() -> None:
    """S3-19, S0-24, S0-26: its threads are this node's share; S1-31, S1-32: its tensors are sharded as such."""

    @sky.compute
    @sky.integrations.keras(backend="tensorflow")
    def configured() -> tuple[str, Any, str]:
        return os.environ["KERAS_BACKEND"], json.loads(os.environ["TF_CONFIG"]), os.environ["TF_NUM_INTRAOP_THREADS"]

    with sky.ComputePool(nodes=2, console=False) as plain:
        seen = configured() @ plain
    workers = seen[0][1]["cluster"]["worker"]
    assert len(set(workers)) == 2
    assert [place[1]["task"] for place in seen] == [{"type": "worker", "index": node} for node in (0, 1)]
    assert {place[0] for place in seen} == {"tensorflow"}

    with sky.ComputePool(plugins=[sky.plugins.keras("tensorflow", seed=9)], console=False) as single:
        once, again = train(2) >> single, train(2) >> single
        assert sharded_by_type() >> single == [(True, True)] * 10
    assert once["backend"] == "tensorflow"
    assert same(once["weights"], again["weights"])
