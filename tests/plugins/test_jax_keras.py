"""The JAX and Keras plugins without nodes: images, variables, refusals."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy
import pytest

import skyward as sky
from skyward.api.image import Image
from skyward.api.info import InstanceInfo, NetworkInfo, Peer
from skyward.api.plugin import Cluster, Plugin
from skyward.api.spec import Spec
from skyward.errors import InvalidArgument
from skyward.plugins import _jax, _keras
from skyward.plugins._ranks import framework


def cluster(accelerator: str | None = None, nodes: int = 2) -> Cluster:
    return Cluster("test", nodes, 1, Spec(accelerator=accelerator, nodes=nodes))


def transformed(plugin: Plugin, image: Image, where: Cluster) -> Image:
    assert plugin.transform is not None
    return plugin.transform(image, where)


def place(node: int = 0, nodes: int = 2, port: int = 5000, accelerators: int = 0, **other: object) -> InstanceInfo:
    values: dict[str, object] = {
        "node": node,
        "total_nodes": nodes,
        "accelerators": accelerators,
        "head_addr": "127.0.0.1",
        "head_port": 4999,
        "job_id": "test",
        "peers": tuple(Peer(i, "127.0.0.1") for i in range(nodes)),
        "network": NetworkInfo("lo"),
        "ports": {"torch": 4999, "jax": port, "tensorflow": port + 1},
    }
    return InstanceInfo(**{**values, **other})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("accelerator", "wanted"),
    [
        (None, "jax"),
        ("A100", "jax[cuda12]"),
        ("H100:8", "jax[cuda12]"),
        ("TPU_V5E", "jax[tpu]"),
        ("MI300X", "jax"),
        ("Trainium2", "jax"),
    ],
)
def test_jax_is_installed_as_the_accelerator_needs_it(accelerator: str | None, wanted: str) -> None:
    """S1-21, S1-07: a string accelerator counts as one."""
    assert transformed(sky.plugins.jax(), Image(), cluster(accelerator)).pip == (wanted,)


@pytest.mark.parametrize(
    ("cuda", "extra"), [("cuda13", "cuda13"), ("cu128", "cuda12"), ("cu12", "cuda12"), ("cuda12-local", "cuda12-local")]
)
def test_jax_takes_cuda_by_its_major_version(cuda: str, extra: str) -> None:
    assert transformed(sky.plugins.jax(cuda=cuda), Image(), cluster("T4")).pip == (f"jax[{extra}]",)


@pytest.mark.parametrize("cuda", ["12.8", "", "rocm", None])
def test_jax_refuses_what_is_no_cuda(cuda: object) -> None:
    with pytest.raises(InvalidArgument, match="cuda12"):
        sky.plugins.jax(cuda=cuda)  # type: ignore[arg-type]


def test_an_image_keeps_what_it_has_and_is_not_changed() -> None:
    """As S4-11, for jax and keras; X5: what is asked for twice is harmless."""
    mine = Image(pip=["numpy", "jax==0.10.2"], env={"MODE": "fast"})
    joined = transformed(sky.plugins.keras(), transformed(sky.plugins.jax(), mine, cluster()), cluster())
    assert joined.pip == ("numpy", "jax==0.10.2", "jax", "keras")
    assert joined.env == {"MODE": "fast", "KERAS_BACKEND": "jax"}
    assert mine.pip == ("numpy", "jax==0.10.2")


def test_the_four_variables_of_jax_name_the_group_and_this_node() -> None:
    """S0-29, S1-22, T8; T15: the port is not torch's."""
    assert _jax.variables(place(1, 4, accelerators=8)) == {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:5000",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "1",
        "JAX_LOCAL_DEVICE_COUNT": "8",
    }
    assert _jax.variables(place())["JAX_LOCAL_DEVICE_COUNT"] == "1"
    assert _jax.variables(place(head_addr="fd00::1"))["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:5000"


@pytest.mark.parametrize(
    ("backend", "accelerator", "pip"),
    [
        ("jax", None, ("keras", "jax")),
        ("jax", "T4", ("keras", "jax[cuda12]")),
        ("jax", "TPU_V4", ("keras", "jax[tpu]")),
        ("torch", "T4", ("keras", "torch", "numpy")),
        ("tensorflow", None, ("keras", "tensorflow")),
        ("tensorflow", "T4", ("keras", "tensorflow[and-cuda]")),
    ],
)
def test_keras_brings_the_package_of_its_backend(
    backend: _keras.Backend, accelerator: str | None, pip: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3-03, S3-04, S3-20, T4."""
    monkeypatch.setattr("skyward.plugins._torch_wheels.own_source", lambda *settings: False)
    image = transformed(sky.plugins.keras(backend=backend), Image(), cluster(accelerator))
    assert image.pip == pip
    assert image.env == {"KERAS_BACKEND": backend}
    if backend == "torch":
        assert "cu" in image.pip_indexes[0].url


@pytest.mark.parametrize(
    ("backend", "has"), [("jax", "jax[cuda13]"), ("torch", "torch>=2"), ("tensorflow", "tensorflow-cpu==2.21")]
)
def test_keras_adds_no_second_package_of_its_backend(backend: _keras.Backend, has: str) -> None:
    """S1-17: the framework's own plugin, or the user, has chosen it."""
    assert transformed(sky.plugins.keras(backend), Image(pip=[has, "numpy"]), cluster("T4")).pip == (
        has,
        "numpy",
        "keras",
    )


def test_a_package_is_known_by_its_whole_name() -> None:
    image = Image(pip=["jaxlib", "Jax[cuda12]>=0.4", "torch-geometric"])
    assert _jax.has_package(image, "jax")
    assert not _jax.has_package(image, "torch")
    assert not _jax.has_package(Image(pip=["jaxlib"]), "jax")


def test_keras_has_jax_as_its_backend_unless_told_otherwise() -> None:
    """S3-01, X3."""
    assert transformed(sky.plugins.keras(), Image(), cluster()).env["KERAS_BACKEND"] == "jax"
    assert list(inspect.signature(sky.plugins.keras).parameters) == ["backend", "seed"]


@pytest.mark.parametrize("door", [sky.plugins.keras, sky.integrations.keras])
def test_both_doors_refuse_other_backends_and_seeds(door: object) -> None:
    """S3-01, S0-24."""
    assert callable(door)
    with pytest.raises(InvalidArgument, match="jax, torch, tensorflow"):
        door(backend="pytorch")
    for seed in (-1, 1.5, "42", True, 2**32):
        with pytest.raises(InvalidArgument, match="whole number"):
            door(seed=seed)
    assert door(seed=numpy.int64(3)) is not None


def test_two_backends_in_one_image_are_refused() -> None:
    """S0-23."""
    image = transformed(sky.plugins.keras("torch"), Image(), cluster())
    with pytest.raises(InvalidArgument, match=r"'torch'.*'jax'"):
        transformed(sky.plugins.keras("jax"), image, cluster())


def test_a_second_backend_in_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """S0-23."""
    monkeypatch.setattr(_keras, "_state", _keras._State())  # pyright: ignore[reportPrivateUsage]
    for name in ("KERAS_BACKEND", "NPROC", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    _keras.claim("torch")
    _keras.claim("torch")
    assert os.environ["KERAS_BACKEND"] == "torch"
    with pytest.raises(InvalidArgument, match=r"'torch' already.*'jax'"):
        _keras.claim("jax")
    assert os.environ["KERAS_BACKEND"] == "torch"


@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
@pytest.mark.parametrize("door", ["plugin", "decorator"])
def test_devices_are_distributed_on_jax_only(
    monkeypatch: pytest.MonkeyPatch, backend: _keras.Backend, door: str
) -> None:
    """S0-25: on two nodes, Keras on torch or TensorFlow is given no group of JAX and no distribution."""
    taken: list[str] = []
    monkeypatch.setattr(_keras, "_state", _keras._State())
    monkeypatch.setattr(_keras, "_used", lambda: None)
    monkeypatch.setattr(_keras, "pool_info", place)
    monkeypatch.setattr(_keras, "_distribute", lambda seed: taken.append("distribute"))
    monkeypatch.setattr(_keras._jax, "ensure_group", lambda info: taken.append("join"))
    monkeypatch.setattr(_keras._jax, "close", lambda: None)
    for name in ("KERAS_BACKEND", "NPROC", "OMP_NUM_THREADS", "TF_CONFIG"):
        monkeypatch.setenv(name, "")
    with (
        _keras.configured(place(), backend=backend, seed=None)
        if door == "plugin"
        else _keras._around_call(backend, None)
    ):
        assert os.environ["KERAS_BACKEND"] == backend
    assert taken == (["join", "distribute"] if backend == "jax" else [])


def test_workers_of_tensorflow_on_one_machine_have_a_port_each() -> None:
    """S0-26, X4."""
    peers = (Peer(0, "10.0.0.1"), Peer(1, "10.0.0.2"), Peer(2, "10.0.0.1"))
    assert json.loads(_keras.tf_config(place(2, 3, peers=peers))) == {
        "cluster": {"worker": ["10.0.0.1:5001", "10.0.0.2:5001", "10.0.0.1:5002"]},
        "task": {"type": "worker", "index": 2},
    }


def test_threads_follow_the_share_of_the_cores_unless_the_user_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NPROC", "")  # so that it is put back
    monkeypatch.delenv("NPROC")
    _jax.share_cores()
    assert os.environ["NPROC"] == "3"
    monkeypatch.setenv("NPROC", "7")
    _jax.share_cores()
    assert os.environ["NPROC"] == "7"


@pytest.mark.parametrize(
    "decorator",
    [sky.integrations.jax, sky.integrations.jax(), sky.integrations.keras, sky.integrations.keras(backend="torch")],
)
def test_outside_a_pool_a_decorated_function_is_what_it_was(decorator: object) -> None:
    """S0-01, S0-04, S0-05, S0-08: no framework is touched, name and kind stay, and it travels."""
    assert callable(decorator)

    def body(a: int, b: int = 2) -> int:
        return a + b

    def items(n: int) -> Iterator[int]:
        yield from range(n)

    wrapped = decorator(body)
    assert (wrapped.__name__, wrapped(1), wrapped(1, b=5)) == ("body", 3, 6)
    assert inspect.isgeneratorfunction(decorator(items))
    assert list(decorator(items)(3)) == [0, 1, 2]
    assert cloudpickle.loads(cloudpickle.dumps(wrapped))(4) == 6


PLUGINS = {"torch": "torch", "jax": "jax", "keras": "keras", "huggingface": "transformers", "joblib": "", "sklearn": ""}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_above_a_def_is_answered_with_the_decorator(name: str) -> None:
    plugin = getattr(sky.plugins, name)
    made = plugin("hf_x") if name == "huggingface" else plugin()
    for decorator in (plugin, made):
        with pytest.raises(TypeError, match=rf"{name}.*is for a pool") as caught:
            decorator(len)
        assert f"@sky.integrations.{PLUGINS[name]}" in str(caught.value) or not PLUGINS[name]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: sky.plugins.torch(torchvision="latest"), r"sky\.plugins\.torch\(\) .*`vision="),
        (lambda: sky.plugins.keras(back="jax"), r"sky\.plugins\.keras\(\) .*`backend`"),
        (lambda: sky.plugins.huggingface(), r"needs token.*from_env"),
        (lambda: sky.integrations.jax(backend="gpu"), r"sky\.integrations\.jax\(\) has no option 'backend'"),
        (lambda: sky.integrations.torch(back="nccl"), r"sky\.integrations\.torch\(\) .*`backend`"),
        (lambda: sky.integrations.keras(seeds=1), r"sky\.integrations\.keras\(\) .*`seed`"),
        (lambda: sky.integrations.transformers(time=1), r"sky\.integrations\.transformers\(\) .*`timeout`"),
        (lambda: sky.silent(only="head"), r"Write `@sky\.stdout\(only="),
    ],
)
def test_an_option_that_is_not_there_is_answered_with_what_to_write(wrong: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        wrong()


@pytest.mark.parametrize("name", ["pytorch", "huggingface"])
def test_an_integration_that_is_not_there_is_answered_with_those_that_are(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no '{name}'; .*torch, transformers"):
        getattr(sky.integrations, name)


@pytest.mark.parametrize("decorator", [sky.integrations.jax(), sky.integrations.keras(seed=1)])
def test_a_decorator_above_compute_is_refused(decorator: object) -> None:
    """S0-09."""
    assert callable(decorator)
    with pytest.raises(InvalidArgument, match=r"below @sky\.compute"):
        decorator(sky.compute(len))


def test_plugins_and_decorators_import_no_framework() -> None:
    """S0-03, S0-04: also where they are made, not only where skyward is imported."""
    source = (
        "import sys, skyward as sky\n"
        "sky.plugins.jax(), sky.plugins.keras(seed=1)\n"
        "sky.integrations.jax()(len), sky.integrations.keras(backend='torch')(len)\n"
        "print([m for m in ('jax', 'keras', 'torch', 'tensorflow', 'transformers', 'numpy') if m in sys.modules])\n"
    )
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_seeds_are_those_of_keras_and_tensorflow_is_not_imported_for_them(tmp_path: Path) -> None:
    """S0-06, S0-24: TensorFlow, where a body uses it for its data, finds the seed when it is imported."""
    stand_in = "class random:\n    seeds = []\n    set_seed = staticmethod(seeds.append)\n"
    (tmp_path / "tensorflow.py").write_text(stand_in)
    source = """
import random, sys
from importlib.util import find_spec
import keras, numpy
from skyward.plugins import _keras

def drawn():
    return random.random(), numpy.random.random(), float(keras.random.uniform(()))

_keras._seed_all(keras, 6)
_keras._seed_all(keras, 7)
found = drawn()
print("tensorflow" in sys.modules, find_spec("tensorflow") is not None)
import tensorflow
print(tensorflow.random.seeds)
keras.utils.set_random_seed(7)
print(found == drawn())
_keras._seed_all(keras, 8)
print(tensorflow.random.seeds, found == drawn())
"""
    env = os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True)
    assert done.stdout == "False True\n[7]\nTrue\n[7, 7, 8] False\n", done.stderr


def test_a_missing_framework_is_named_with_what_to_add() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no not_there, .*sky\.plugins\.jax\(\).*pip=\[\"not_there\"\]"):
        framework("not_there", "jax")


def test_keras_takes_the_steps_of_its_distribution_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3-09, S3-10, S3-11, S3-12: devices, DataParallel over them, then Keras' own `initialize_rng`."""
    steps: list[str] = []

    def step(name: str, result: object = None) -> Callable[..., object]:
        return lambda *args, **kwargs: (steps.append(name), result)[1]

    def data_parallel(devices: object, auto_shard_dataset: bool) -> object:
        return steps.append(f"DataParallel {devices} {auto_shard_dataset}")

    distribution = SimpleNamespace(
        list_devices=step("list_devices", ["cpu:0", "cpu:1"]),
        DataParallel=data_parallel,
        set_distribution=step("set_distribution"),
    )
    modules = {
        "keras": SimpleNamespace(distribution=distribution, utils=SimpleNamespace(set_random_seed=step("seed"))),
        "keras.src.backend.jax.distribution_lib": SimpleNamespace(initialize_rng=step("initialize_rng")),
    }
    monkeypatch.setattr(_keras, "framework", lambda module, plugin: modules[module])
    monkeypatch.setattr(_keras, "_state", _keras._State())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    _keras._distribute(7)
    assert steps == [
        "list_devices",
        "DataParallel ['cpu:0', 'cpu:1'] False",
        "set_distribution",
        "seed",
        "initialize_rng",
    ]
