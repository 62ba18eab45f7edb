"""What the blocks of the documents leave open, filled in: the names that they use, and a pool where they show none.

A block is run unchanged between `before` and `after`; `after` says what must have come of it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FILLINGS", "Filling"]


@dataclass(frozen=True)
class Filling:
    """The lines around one block."""

    after: str
    before: str = ""
    stand_ins: tuple[str, ...] = ()
    """Those on nodes that it needs, see `stand_ins`."""
    quick: bool = False
    """Whether it is run by `make test` too; the others are by `make soak`."""
    script: str | None = None
    """For what is no Python: the program of examples/ that it runs."""


_TORCH = 'provider=sky.AWS(), nodes=2, image=sky.Image(pip=["torch", "numpy"])'
_DIGITS = """
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC
X, y = load_digits(return_X_y=True)
X, y = X[:300], y[:300]
"""
_SEARCHED = """
here = GridSearchCV(grid.estimator, grid.param_grid, cv=grid.cv).fit(X, y)
assert grid.best_params_ == here.best_params_
assert grid.best_score_ == here.best_score_
assert list(grid.cv_results_["mean_test_score"]) == list(here.cv_results_["mean_test_score"])
"""
_IN_A_GROUP = """
@sky.compute
def train():
    import torch.distributed as dist
    return dist.get_rank(), dist.get_world_size(), dist.get_backend()
"""
_KERAS_TRAIN = """
@sky.compute
def train():
    import os, keras, numpy
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    rows = numpy.arange(24.0).reshape(8, 3)
    model.fit(*sky.shard(rows, rows.sum(1)), epochs=1, verbose=0)
    return os.environ["KERAS_BACKEND"], keras.backend.backend(), model.get_weights()[0].tolist()
"""
_KERAS_DDP = """
@sky.compute
def train():
    import keras, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    shared = DistributedDataParallel(model)
    torch.manual_seed(dist.get_rank())
    shared(torch.randn(4, 3)).sum().backward()
    return keras.backend.backend(), dist.get_world_size(), next(model.parameters()).grad.tolist()
"""

FILLINGS: dict[str, Filling] = {
    "S0.1": Filling(
        f"""
assert isinstance(train([1]), sky.PendingCompute)
with sky.ComputePool({_TORCH}) as pool:
    assert train([1]) @ pool == [None, None]
"""
    ),
    "S0.2": Filling(
        f"""
with sky.ComputePool({_TORCH}) as pool:
    heard = Heard(pool)
    train() @ pool
assert [node for node, _ in heard.lines] == [0], heard.lines
"""
    ),
    "S0.3": Filling(
        f"""
with sky.ComputePool({_TORCH}) as pool:
    assert train() @ pool == [None, None]
""",
        before="""
def MyModel():
    import torch
    return torch.nn.Linear(3, 1)
""",
        stand_ins=("cuda",),
    ),
    "S0.4": Filling(
        """
with sky.ComputePool(provider=sky.AWS(), nodes=2, image=sky.Image(pip=["keras", "jax"])) as pool:
    assert train() @ pool == [None, None]
""",
        before="""
import numpy
x, y = numpy.random.default_rng(0).normal(size=(64, 5)), numpy.arange(64) % 3
""",
        stand_ins=("keras",),
    ),
    "S0.5": Filling(
        """
@sky.compute
@sky.integrations.jax()
def seen():
    import jax
    return jax.process_index(), jax.process_count(), len(jax.devices())

with sky.ComputePool(provider=sky.AWS(), nodes=2, image=sky.Image(pip=["jax"])) as pool:
    assert train() @ pool == [None, None]
    assert seen() @ pool == [(0, 2, 2), (1, 2, 2)]
"""
    ),
    "S0.6": Filling(
        """
image = sky.Image(pip=["torch", "numpy", "transformers", "accelerate"])
with sky.ComputePool(provider=sky.AWS(), nodes=2, image=image) as pool:
    found = fine_tune() @ pool
assert len(found) == 2 and found[0]["eval_loss"] == found[1]["eval_loss"], found
""",
        stand_ins=("gloo", "trainer"),
    ),
    "S0.7": Filling("assert results == [x * x for x in range(100)]\n", quick=True),
    "S0.8": Filling(_SEARCHED, before=_DIGITS + 'param_grid = {"C": [0.1, 1, 10], "gamma": ["scale", 0.01]}\n'),
    "S0.9": Filling(_SEARCHED, before=_DIGITS + 'model, params = SVC(), {"C": [0.1, 1, 10]}\n'),
    "S1.1": Filling("assert results == [None] * 4\n"),
    "S1.2": Filling(
        """
with sky.ComputePool(provider=sky.AWS(), nodes=2, plugins=plugins) as pool:
    one, two = train() @ pool
assert one[:2] == two[:2] == ("jax", "jax")
assert one[2] == two[2], "the nodes hold different weights"
""",
        before=_KERAS_TRAIN,
    ),
    "S1.3": Filling(
        """
with sky.ComputePool(provider=sky.AWS(), nodes=3) as pool:
    parts = train(list(range(20)), [10 * n for n in range(20)]) @ pool
assert all(b == 10 * a for part in parts for a, b in part)
assert sorted(a for part in parts for a, _ in part) == list(range(20))
assert [len(part) for part in parts] == [7, 7, 6]
""",
        before="def fit(x, y): return list(zip(x, y))\n",
        quick=True,
    ),
    "S1.4": Filling(
        """
with sky.ComputePool(provider=sky.AWS(), nodes=2) as pool:
    heard = Heard(pool)
    assert distributed_task([3, 4]) @ pool == [7, 7]
assert sorted(heard.lines) == [(0, "Node 0 of 2"), (0, "the others are coordinated"), (1, "Node 1 of 2")], heard.lines
""",
        before="""
def coordinate_others(): print("the others are coordinated")
def process(data): return sum(data)
""",
        quick=True,
    ),
    "S1.5": Filling(
        """
with sky.ComputePool(provider=sky.AWS(), nodes=2) as pool:
    heard = Heard(pool)
    train() @ pool
assert [node for node, _ in heard.lines] == [0] and "0.2500" in heard.lines[0][1], heard.lines
""",
        before="epoch, loss = 3, 0.25\n",
    ),
    "S1.6": Filling(
        """
with sky.ComputePool(provider=sky.AWS(), nodes=2) as pool:
    heard = Heard(pool)
    assert train() @ pool == [None, None]
assert heard.lines == []
"""
    ),
    "S2.5": Filling("", script="examples/guides/06_pytorch_distributed.py"),
    "S3.1": Filling(
        """
with sky.ComputePool(provider=sky.AWS(), nodes=2, plugins=plugins) as pool:
    one, two = train() @ pool
assert one == two, "the nodes hold different weights"
""",
        before=_KERAS_TRAIN,
    ),
    "S3.2": Filling(
        """
with sky.ComputePool(provider=sky.AWS(), nodes=2, plugins=plugins) as pool:
    one, two = train() @ pool
assert one == two and one[:2] == ("torch", 2), "gradients were not averaged"
""",
        before=_KERAS_DDP,
    ),
    "S3.3": Filling(
        """
with sky.ComputePool(provider=sky.AWS(), plugins=plugins) as pool:
    assert (train() >> pool)[:2] == ("jax", "jax")
""",
        before=_KERAS_TRAIN,
    ),
    "S3.4": Filling(
        "assert len(results) == 2 and results[0] == results[1] and results[0] > 0.5, results\n", stand_ins=("digits",)
    ),
    "S3.5": Filling(
        """
assert len(results) == 4
assert all(result == results[0] for result in results) and results[0][:2] == ("torch", 4), results
""",
        before=_KERAS_DDP,
    ),
    "S3.6": Filling('assert result[:2] == ("jax", "jax")\n', before=_KERAS_TRAIN),
    "S4.1": Filling(
        """
assert [result["rank"] for result in results] == [0, 1, 2, 3]
assert asked[-1].pip[0] == "torch" and asked[-1].pip_indexes[-1].url.endswith("/whl/cu128"), asked
""",
        stand_ins=("cuda",),
        quick=True,
    ),
    "S4.2": Filling(
        """
assert results == [(0, 2, "gloo"), (1, 2, "gloo")]
assert asked[-1].pip[:3] == ("torch", "torchvision", "torchaudio"), asked
assert asked[-1].pip_indexes[-1].url.endswith("/whl/cu128"), asked
""",
        before=_IN_A_GROUP,
    ),
    "S4.3": Filling(
        """
from skyward.api.plugin import Cluster
pool = sky.ComputePool(provider=sky.AWS(), accelerator="A100", nodes=2, plugins=plugins)
print(pool.script())
assert asked[-1].pip[:2] == ("torch==2.3.0", "torchvision==0.18.0"), asked
assert asked[-1].pip_indexes[-1].url.endswith("/whl/cu124"), asked
""",
        quick=True,
    ),
    "S4.4": Filling(
        """
assert results == [(rank, 4, "gloo") for rank in range(4)]
assert asked[-1].pip_indexes[-1].url.endswith("/whl/cpu"), asked
""",
        before=_IN_A_GROUP,
    ),
    "S4.5": Filling(
        """
assert [world for world, _, _ in results] == [2, 2] and results[0][1] == results[1][1], results
assert [token for _, _, token in results] == ["hf_xxx", "hf_xxx"]
assert {"transformers", "datasets", "tokenizers"} < set(asked[-1].pip)
""",
        before="""
@sky.compute
def finetune():
    import os
    from transformers import Trainer
    trainer = Trainer(...)
    trainer.train()
    return trainer.args.world_size, trainer.evaluate()["eval_loss"], os.environ["HF_TOKEN"]
""",
        stand_ins=("trainer",),
    ),
}
