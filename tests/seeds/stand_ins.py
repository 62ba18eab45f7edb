"""What a block of the documents finds here in the place of what this machine lacks. Nothing else is changed.

| in the place of                          | there is                                                        |
|------------------------------------------|-----------------------------------------------------------------|
| an AWS account                           | the test cloud, with real hosts behind it; their user is "sky"  |
| wheels for CUDA, and PyTorch's own index | CPU wheels in the client's versions; no torchvision, torchaudio |
| a pip that looks on PyPI                 | one, while the image is made                                    |
| a GPU                                    | an nvidia-smi that lists those of the machine's type; `.cuda()` |
|                                          | leaves things where they are; gloo for nccl                     |
| data from the net                        | small made-up data                                              |
| a model that is left out (`...`)         | a small one                                                     |

The program of a block calls `prepare` first. What happens on nodes is in `on_nodes`, which travels by value.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from packaging.requirements import Requirement

import skyward as sky
from skyward import events
from skyward.api.plugin import Cluster
from skyward.pool import opening
from skyward.providers.aws.api import Pace

__all__ = ["Heard", "asked", "cpu_image", "prepare"]

_CLIENTS = ("torch", "jax", "keras", "tensorflow", "transformers", "datasets", "tokenizers", "accelerate")
_ABSENT = ("torchvision", "torchaudio")
_PACE = Pace(base=0.01, cap=0.1, budget=60.0, poll=0.1, settle=0.1, unanswered=1.0, boot=1.0)

asked: list[sky.Image] = []
"""The images that pools of this program have asked for, before CPU wheels were put in."""


def prepare(*on_nodes: str) -> None:
    """Puts the stand-ins in place: those of the client, and on nodes those that are named."""
    settings: dict[str, Any] = {"username": "sky", "ssh_from": "192.0.2.1", "pace": _PACE}
    sky.AWS = functools.partial(sky.AWS, **settings)  # type: ignore[misc,assignment]
    opening.transformed = _transformed(opening.transformed)
    if "gloo" in on_nodes:
        for module in (sky.plugins, sky.integrations):
            for name in {"torch", "transformers"} & set(vars(module)):
                setattr(module, name, _gloo(getattr(module, name)))
    names = tuple(name for name in on_nodes if name != "gloo")
    if names:
        make = sky.ComputePool.__init__
        plugin = sky.Plugin("stand-ins", decorate=functools.partial(_standing_in, names))

        @functools.wraps(make)
        def with_stand_ins(self: Any, *specs: Any, plugins: Any = (), **options: Any) -> None:
            make(self, *specs, plugins=[*plugins, plugin], **options)

        sky.ComputePool.__init__ = with_stand_ins  # type: ignore[method-assign]


def cpu_image(image: sky.Image) -> sky.Image:
    """The image with CPU wheels in the client's versions."""
    indexes = [index for index in image.pip_indexes if "pytorch" not in index.url]
    pip: list[str] = []
    for entry in image.pip:
        name = Requirement(entry).name.lower()
        if name in _CLIENTS:
            version = importlib.metadata.version(name).partition("+")[0]
            pip.append(f"{name}=={version}")
        elif name not in _ABSENT:
            pip.append(entry)
    return replace(image, pip=pip, pip_indexes=indexes)


class Heard:
    """What a pool's nodes print to stdout, as (node, line)."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self.lines: list[tuple[int, str]] = []
        pool.on_event(self._hear)

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.Output) and event.stream == "stdout":
            self.lines.append((event.node, event.text))


def _transformed(make: Callable[..., sky.Image]) -> Callable[..., sky.Image]:
    def transformed(plugins: Any, image: sky.Image, cluster: Cluster) -> sky.Image:
        with _plain_pip():
            made = make(plugins, image, cluster)
        asked.append(made)
        print("asked", json.dumps({"pip": made.pip, "indexes": [index.url for index in made.pip_indexes]}), flush=True)
        return cpu_image(made)

    return transformed


@contextlib.contextmanager
def _plain_pip() -> Iterator[None]:
    """A pip that looks on PyPI, whatever its user has set: torch's own index is asked for then."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))}
    for name in kept:
        del os.environ[name]
    os.environ |= {"PIP_CONFIG_FILE": os.devnull, "UV_CONFIG_FILE": os.devnull}
    try:
        yield
    finally:
        del os.environ["PIP_CONFIG_FILE"], os.environ["UV_CONFIG_FILE"]
        os.environ |= kept


def _gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def with_gloo(*args: Any, backend: Any = None, **options: Any) -> Any:
        return make(*args, backend="gloo" if backend == "nccl" else backend, **options)

    return with_gloo


def _standing_in(names: tuple[str, ...], fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def body(*args: Any, **kwargs: Any) -> Any:
        for name in names:
            _ON_NODES[name]()
        return fn(*args, **kwargs)

    return body


def _no_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign,assignment]
        torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]


def _small_digits() -> None:
    """Pictures that are told apart by where they are bright."""
    import keras
    import numpy

    def load_data() -> Any:
        def some(count: int, seed: int) -> Any:
            random = numpy.random.default_rng(seed)
            labels = random.integers(0, 10, count).astype("uint8")
            pictures = random.integers(0, 60, (count, 28, 28))
            for picture, label in zip(pictures, labels, strict=True):
                picture[2 * label : 2 * label + 4] += 190
            return pictures.astype("uint8"), labels

        return some(1000, 1), some(
            200, 2
        )  # as the real ones: two equal shards, each with a last batch that is not full

    keras.datasets.mnist.load_data = load_data


def _small_keras_model() -> None:
    import keras

    whole = keras.Sequential
    if isinstance(whole, type):

        def filled(layers: Any) -> Any:  # in the body, after it was seeded: a layer draws its seed when it is made
            return whole([keras.layers.Dense(3, activation="softmax")] if layers == [...] else layers)

        keras.Sequential = filled  # type: ignore[misc,assignment]


def _small_trainer() -> None:
    """A Trainer of a classifier of a few weights, on data that it can learn."""
    import tempfile

    import torch
    import transformers

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x: Any, labels: Any) -> Any:
            logits = self.layer(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    make = transformers.Trainer.__init__  # the module itself is lazy, and gives the class back whatever is set

    def filled(self: Any, *args: Any, **options: Any) -> None:
        if args != (...,):
            return make(self, *args, **options)
        torch.manual_seed(0)
        data = [{"x": x, "labels": int(x.sum() > 0)} for x in torch.randn(64, 4)]
        settings = transformers.TrainingArguments(
            tempfile.mkdtemp(),
            num_train_epochs=1,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        return make(self, model=Tiny(), args=settings, train_dataset=data, eval_dataset=data)

    if make.__name__ != "filled":
        transformers.Trainer.__init__ = filled


_ON_NODES = {
    "cuda": _no_cuda,
    "digits": _small_digits,
    "keras": _small_keras_model,
    "trainer": _small_trainer,
}
