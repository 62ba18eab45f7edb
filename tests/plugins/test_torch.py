"""The torch and huggingface plugins as values: images, versions, indexes, decorators; no framework, no node."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

import skyward as sky
from skyward.errors import InvalidArgument

WHEELS = "https://download.pytorch.org/whl"
NAMES = ("torch", "torchvision", "torchaudio")
TOKEN = "hf_canary0123456789"


@pytest.fixture(autouse=True)
def _plain_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip and uv of this computer look on PyPI, whatever its user has set."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "uv.toml"))


def transformed(plugin: sky.Plugin, accelerator: object = None, image: sky.Image | None = None) -> sky.Image:
    cluster = sky.Cluster("pool", 2, 1, sky.Spec(accelerator=accelerator, nodes=2))  # type: ignore[arg-type]
    assert plugin.transform is not None
    return plugin.transform(image or sky.Image(), cluster)


def test_the_torch_plugin_has_exactly_two_hooks() -> None:
    """S4-01."""
    plugin = sky.plugins.torch()
    hooks = {"transform", "bootstrap", "decorate", "around_app", "around_client"}
    assert {hook for hook in hooks if getattr(plugin, hook) is not None} == {"transform", "around_app"}


def test_the_defaults_are_those_of_the_documents() -> None:
    """S4-02, S4-03, S4-04, S4-05, S4-06."""
    defaults = {name: p.default for name, p in inspect.signature(sky.plugins.torch).parameters.items()}
    assert defaults == {
        "backend": None,
        "cuda": "cu128",
        "version": "latest",
        "vision": None,
        "audio": None,
        "timeout": 600,
    }


def test_the_newest_torch_alone_is_installed_by_default() -> None:
    """S4-04, S4-10, S1-13."""
    assert transformed(sky.plugins.torch()).pip == ("torch", "numpy")


@pytest.mark.parametrize(("pin", "numpy"), [("2.2.0", "numpy<2"), ("2.3.0", "numpy"), (">=2.0", "numpy")])
def test_numpy_comes_along_in_a_version_that_torch_can_use(pin: str, numpy: str) -> None:
    """Without it, torch warns on every node."""
    assert transformed(sky.plugins.torch(version=pin)).pip[-1] == numpy
    own = transformed(sky.plugins.torch(version=pin), image=sky.Image(pip=["numpy==1.26.4"]))
    assert own.pip == ("numpy==1.26.4", transformed(sky.plugins.torch(version=pin)).pip[0])


@pytest.mark.parametrize(
    ("pin", "index"),
    [
        ("torch==2.1.0", "cu121"),
        ("torch==2.6.*", "cu126"),
        ("torch<2.7", "cu126"),
        ("torch~=2.7", "cu128"),
        ("torch>=2.4", "cu128"),
        ("torch==2.6.0+cu118", "cu118"),
        ("torch==2.13.0", "cu128"),
        ("torch==1.13.1", "cu128"),
    ],
)
def test_a_version_that_the_image_pins_has_the_index_that_has_it(pin: str, index: str) -> None:
    """S4-11: the pin counts, and the index for the accelerator follows from it."""
    image = transformed(sky.plugins.torch(vision="latest"), "A100", sky.Image(pip=[pin]))
    assert image.pip[:2] == (pin, "torchvision")
    assert [entry.url for entry in image.pip_indexes] == [f"{WHEELS}/{index}"]
    assert transformed(sky.plugins.torch(), None, sky.Image(pip=["torch==2.1.0"])).pip_indexes[0].url == f"{WHEELS}/cpu"
    asked = transformed(sky.plugins.torch(version="2.3.0", cuda="cu124"), "A100")
    assert asked.pip_indexes[0].url == f"{WHEELS}/cu124"  # S4-26: what is asked for is taken as it is


@pytest.mark.parametrize(
    ("options", "pip", "words"),
    [
        ({"version": "2.3.0", "cuda": "cu124", "vision": "0.18.0"}, "torch==2.1.0", "torch==2.1.0.*torch==2.3.0"),
        ({"version": ">=2.3"}, "torch==2.1.0", "no version satisfies both"),
        ({"version": "2.3.0"}, "torch<2.2", "no version satisfies both"),
        ({"vision": "0.18.0"}, "torch==2.1.0", "torchvision 0.16"),
        ({"audio": "2.3.0"}, "torch==2.1.0", "torchaudio 2.1"),
        ({"version": "2.4.0", "vision": "0.18.0"}, "pandas", "torchvision 0.19"),
    ],
)
def test_versions_that_cannot_fit_are_refused_in_words(options: dict[str, str], pip: str, words: str) -> None:
    """S4-11."""
    with pytest.raises(InvalidArgument, match=words):
        transformed(sky.plugins.torch(**options), "A100", sky.Image(pip=[pip]))  # type: ignore[arg-type]


def test_a_pin_and_a_wider_wish_are_one_requirement() -> None:
    """S4-11, X5."""
    wide = transformed(sky.plugins.torch(version=">=2.0"), "A100", sky.Image(pip=["torch==2.4.0", "numpy"]))
    assert wide.pip == ("torch==2.4.0", "numpy")
    narrow = transformed(sky.plugins.torch(version="2.4.0"), "A100", sky.Image(pip=["torch>=2.0", "numpy"]))
    assert narrow.pip == ("torch>=2.0", "numpy", "torch==2.4.0")
    file = sky.Image(pip=["torch @ https://wheels.example/torch-2.4.0-py3-none-any.whl", "numpy"])
    assert transformed(sky.plugins.torch(), "A100", file).pip == file.pip


def test_an_index_that_the_image_has_for_torch_is_the_only_one() -> None:
    """Keras on torch after the torch plugin adds no second one."""
    first = transformed(sky.plugins.torch(cuda="cu126"), "A100")
    both = transformed(sky.plugins.keras(backend="torch"), "A100", first)
    assert [index.url for index in both.pip_indexes] == [f"{WHEELS}/cu126"]
    pinned = transformed(sky.plugins.keras(backend="torch"), "A100", sky.Image(pip=["torch==2.1.0"]))
    assert [index.url for index in pinned.pip_indexes] == [f"{WHEELS}/cu121"]


@pytest.mark.parametrize("constraint", ["==2.3", ">=2.3", "<=2.3", "~=2.3", "!=2.3", "<2.3", ">2.3", "===2.3"])
def test_a_constraint_of_any_kind_is_passed_through(constraint: str) -> None:
    """S4-04, T3."""
    vision = constraint.replace("2.3", "0.18")
    image = transformed(sky.plugins.torch(version=constraint, vision=vision, audio=constraint))
    assert image.pip[:3] == (f"torch{constraint}", f"torchvision{vision}", f"torchaudio{constraint}")


def test_a_bare_version_is_pinned_and_each_package_has_its_own() -> None:
    """S4-04, S4-06, S4-26, T3: audio is not pinned to vision's version."""
    image = transformed(sky.plugins.torch(version="2.3.0", vision="0.18.0", audio="2.3.1", cuda="cu124"), "A100")
    assert image.pip[:3] == ("torch==2.3.0", "torchvision==0.18.0", "torchaudio==2.3.1")
    assert image.pip_indexes == (sky.PipIndex(f"{WHEELS}/cu124", NAMES),)


def test_two_constraints_in_one_text_are_passed_through() -> None:
    assert set(transformed(sky.plugins.torch(version=">=2.3,<3")).pip[0].removeprefix("torch").split(",")) == {
        ">=2.3",
        "<3",
    }


def test_latest_vision_and_audio_come_unpinned_from_the_cuda_index() -> None:
    """S4-25."""
    image = transformed(sky.plugins.torch(vision="latest", audio="latest"), "A100")
    assert image.pip[:3] == NAMES
    assert [index.url for index in image.pip_indexes] == [f"{WHEELS}/cu128"]


@pytest.mark.parametrize("accelerator", ["A100", "a100:8", sky.Accelerator("H100"), sky.accelerators.T4(count=2)])
def test_an_accelerator_with_cuda_gets_the_cuda_wheels(accelerator: object) -> None:
    """S4-07, S4-09, S1-07, T2: also when it is given as a string."""
    assert transformed(sky.plugins.torch(), accelerator).pip_indexes[0].url == f"{WHEELS}/cu128"


@pytest.mark.parametrize("accelerator", [None, "MI300X", "TPU_V5E", "Trainium2"])
def test_without_cuda_the_cpu_wheels_are_taken(accelerator: object) -> None:
    """S4-08, S4-27."""
    image = transformed(sky.plugins.torch(backend="gloo"), accelerator)
    assert image.pip_indexes[0].url == f"{WHEELS}/cpu"


def test_the_index_lists_names_not_requirements() -> None:
    """T2."""
    image = transformed(sky.plugins.torch(version="2.3.0", vision="==0.18"), "A100")
    assert image.pip_indexes[0].packages == NAMES


def test_the_index_is_only_for_packages_that_no_index_of_the_image_has() -> None:
    own = sky.Image(pip_indexes=[sky.PipIndex("https://wheels.example/simple", ["torch"])])
    assert transformed(sky.plugins.torch(), None, own).pip_indexes == own.pip_indexes
    vision = transformed(sky.plugins.torch(vision="latest"), None, own)
    assert vision.pip_indexes == (*own.pip_indexes, sky.PipIndex(f"{WHEELS}/cpu", NAMES[1:]))


@pytest.mark.parametrize(
    ("name", "value", "own"),
    [
        ("PIP_INDEX_URL", "https://mirror.example/simple", True),
        ("UV_DEFAULT_INDEX", "mirror=https://mirror.example/simple", True),
        ("PIP_INDEX_URL", "https://pypi.org/simple", False),
        ("PIP_FIND_LINKS", "https://wheels.example/all.html", True),
        ("PIP_FIND_LINKS", "{home}", True),
        ("PIP_FIND_LINKS", "{home}/torch", False),
        ("PIP_EXTRA_INDEX_URL", "https://packages.example/simple", False),
        ("UV_INDEX", "https://packages.example/torch/cpu", True),
        ("UV_EXTRA_INDEX_URL", "file://{home}", True),
        ("PIP_NO_INDEX", "1", True),
    ],
)
def test_a_site_with_a_place_of_its_own_for_torch_is_not_sent_elsewhere(
    name: str, value: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch-2.13.0+cpu-py3-none-any.whl").touch()
    monkeypatch.setenv(name, value.format(home=tmp_path))
    image = transformed(sky.plugins.torch(), None, sky.Image(pip=["torch==2.13.0+cpu"]))
    assert image.pip == ("torch==2.13.0+cpu", "numpy")
    assert bool(image.pip_indexes) is not own


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ('[[index]]\nurl = "https://mirror.example/simple"\ndefault = true\n', True),
        ('[[index]]\nname = "more"\nurl = "https://packages.example/simple"\n', False),
        ('[pip]\nindex-url = "https://mirror.example/simple"\n', True),
        ('find-links = ["https://wheels.example/all.html"]\n', True),
        ("this is no TOML", False),
    ],
)
def test_a_file_of_uv_s_settings_counts_as_well(text: str, own: bool, tmp_path: Path) -> None:
    (tmp_path / "uv.toml").write_text(text)
    assert bool(transformed(sky.plugins.torch()).pip_indexes) is not own


def test_what_the_image_has_is_kept_and_the_original_is_not_changed() -> None:
    """S4-11, X5: a torch that the image asks for itself does no harm."""
    own = sky.PipIndex("https://wheels.example/simple", ["private"])
    image = sky.Image(pip=["numpy", "torch"], pip_indexes=[own], env={"A": "1"}, apt=["git"])
    before = replace(image)
    after = transformed(sky.plugins.torch(vision="latest"), "A100", image)
    assert after.pip == ("numpy", "torch", "torchvision")
    assert after.pip_indexes == (own, sky.PipIndex(f"{WHEELS}/cu128", NAMES))
    assert (after.env, after.apt) == (image.env, image.apt)
    assert image == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "ncll"}, "nccl, gloo"),
        ({"cuda": "12.8"}, "cu128"),
        ({"version": "newest"}, "latest"),
        ({"version": ""}, "latest"),
        ({"version": None}, "latest"),
        ({"vision": "=>0.18"}, "torchvision"),
        ({"audio": 2}, "torchaudio"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_a_value_that_cannot_work_is_refused_in_words(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        sky.plugins.torch(**options)  # type: ignore[arg-type]


def test_the_huggingface_plugin_adds_its_packages() -> None:
    """S1-24; accelerate too, without which there is no Trainer."""
    image = transformed(sky.plugins.huggingface(token=TOKEN), image=sky.Image(pip=["torch"]))
    assert image.pip == ("torch", "transformers", "datasets", "tokenizers", "accelerate")


def test_the_token_is_in_no_repr_and_no_image() -> None:
    """SEC-9."""
    plugin = sky.plugins.huggingface(token=TOKEN)
    image = transformed(plugin)
    pool = sky.ComputePool(plugins=[plugin])
    shown = [repr(x) for x in (plugin, plugin.around_app, image, dict(image.env), pool, pool.plugins)]
    assert not [text for text in shown if TOKEN in text]
    assert "***" in repr(plugin)


@pytest.mark.parametrize("token", ["", "  ", "hf_a\nb", None, b"hf_x"])
def test_a_token_that_is_none_is_refused_without_being_shown(token: object) -> None:
    with pytest.raises(InvalidArgument, match="access token") as caught:
        sky.plugins.huggingface(token=token)  # type: ignore[arg-type]
    assert "hf_" not in str(caught.value)


def test_importing_skyward_and_decorating_import_no_framework() -> None:
    """S0-03, S0-04, S0-05, S4-13: also where torch cannot be imported at all."""
    program = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
import skyward as sky
@sky.compute
@sky.integrations.torch
def a(): ...
@sky.compute
@sky.integrations.torch(backend="nccl", timeout=5)
def b(): ...
@sky.compute
@sky.integrations.transformers(backend="nccl")
def c(): ...
a(), b(), c(), sky.plugins.torch(vision="latest"), sky.plugins.huggingface(token="hf_x")
heavy = {"torch", "transformers", "datasets", "accelerate", "huggingface_hub", "jax", "keras", "tensorflow", "numpy"}
print(sorted(name for name in heavy if sys.modules.get(name)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_integration_changes_nothing_outside_a_pool() -> None:
    """S0-01, S0-08, S0-10."""

    @sky.integrations.torch
    def bare(a: int, *, b: int = 1) -> int:
        """Doc."""
        return a + b

    @sky.integrations.transformers(backend="nccl")
    def with_options(a: int) -> int:
        return a

    assert (bare(1, b=2), with_options(3)) == (3, 3)
    assert (bare.__name__, bare.__doc__, str(inspect.signature(bare))) == (
        "bare",
        "Doc.",
        "(a: 'int', *, b: 'int' = 1) -> 'int'",
    )


def test_every_kind_of_function_stays_of_its_kind() -> None:
    @sky.integrations.torch
    def generator():
        yield 1

    @sky.integrations.torch()
    async def coroutine() -> int:
        return 1

    @sky.integrations.transformers
    async def async_generator():
        yield 1

    assert inspect.isgeneratorfunction(generator)
    assert inspect.iscoroutinefunction(coroutine)
    assert inspect.isasyncgenfunction(async_generator)
    assert list(generator()) == [1]


def test_a_decorated_function_travels_as_one_payload_that_refers_to_skyward() -> None:
    """S0-09, S0-12: the machinery goes by name, not by value."""

    @sky.compute
    @sky.stdout(only="head")
    @sky.integrations.torch
    def train(x: int) -> int:
        return 2 * x

    data = cloudpickle.dumps(train.fn)
    assert b"skyward.plugins._torch" in data
    assert b"init_process_group" not in data
    assert pickle.loads(data)(4) == 8


@pytest.mark.parametrize("decorate", [sky.integrations.torch, sky.integrations.torch(), sky.integrations.transformers])
def test_an_integration_above_compute_is_refused(decorate: object) -> None:
    """S0-09, S2-02."""
    with pytest.raises(InvalidArgument, match="below @sky"):
        decorate(sky.compute(lambda: None))  # type: ignore[operator]


def test_an_integration_wants_a_function_and_a_known_backend() -> None:
    with pytest.raises(InvalidArgument, match="not a function"):
        sky.integrations.torch(3)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="nccl, gloo"):
        sky.integrations.torch(backend="mpi")  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="timeout"):
        sky.integrations.transformers(timeout=-1)


@pytest.mark.parametrize(("name", "backend"), [("torch", "gloo"), ("keras", "jax"), ("transformers", "nccl")])
def test_a_backend_without_its_name_is_answered_with_it(name: str, backend: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"@sky.integrations.{name}\(backend='{backend}'\)"):
        getattr(sky.integrations, name)(backend)
