"""Images, specs and workers: values that are checked when they are made (D6, SEC-9, SEC-16 to SEC-18)."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.accelerators import A100
from skyward.api.spec import Image, PipIndex, Spec, Worker
from skyward.errors import InvalidArgument


def test_an_image_is_a_value() -> None:
    """D6: frozen, lists become tuples, has a content hash."""
    image = Image(pip=["numpy>=2", "torch"], env={"A": "1"}, apt=["git"])
    assert image.pip == ("numpy>=2", "torch")
    assert image == Image(pip=("numpy>=2", "torch"), env={"A": "1"}, apt=("git",))
    assert len({image, pickle.loads(pickle.dumps(image)), dataclasses.replace(image)}) == 1
    with pytest.raises(AttributeError):
        image.pip = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        image.env["A"] = "2"  # type: ignore[index]


def test_the_dictionary_given_for_env_may_change_afterwards() -> None:
    given_env = {"A": "1"}
    image = Image(env=given_env)
    given_env["A"] = "2"
    assert image.env["A"] == "1"


def test_the_content_hash_tells_images_apart() -> None:
    """D6."""
    image = Image(pip=["a"], env={"A": "1", "B": "2"})
    assert image.content_hash == Image(pip=["a"], env={"B": "2", "A": "1"}).content_hash
    others = [Image(), Image(pip=["b"], env=image.env), Image(pip=["a"]), dataclasses.replace(image, apt=["git"])]
    others.append(dataclasses.replace(image, pip_indexes=[PipIndex("https://x/simple", ["a"])]))
    assert len({image.content_hash, *(other.content_hash for other in others)}) == 6
    assert len(image.content_hash) == 64


def test_auto_is_the_python_in_use() -> None:
    """D6."""
    assert Image().python_version == sys.version_info[:2]
    assert Image(python="3.12").python_version == (3, 12)


@pytest.mark.parametrize("python", ["3", "3.9", "2.7", "3.12.1", "3.12; id", "-3.12", "", 3.12, None])
def test_a_python_that_cannot_work_is_refused(python: Any) -> None:
    with pytest.raises(InvalidArgument, match="python="):
        Image(python=python)


@pytest.mark.parametrize("field", ["pip", "apt", "includes", "excludes", "allow_env"])
def test_a_string_where_a_list_is_wanted_is_an_error_in_words(field: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"Write {field}=\['torch'\]"):
        Image(**{field: "torch"})
    with pytest.raises(InvalidArgument, match=field):
        Image(**{field: 3})
    with pytest.raises(InvalidArgument, match="line of text"):
        Image(**{field: ["a\nb"]})


@pytest.mark.parametrize(
    "entry",
    [
        "numpy",
        "torch==2.3.0",
        "torch~=2.3",
        "jax[cuda12]>=0.4; python_version >= '3.11'",
        "mine @ https://example.org/mine-1.0-py3-none-any.whl",
        "https://example.org/mine-1.0-py3-none-any.whl",
        "git+https://example.org/mine.git@main",
        "./mine",
        "../mine",
        "dist/mine-1.0-py3-none-any.whl",
        "~/mine",
    ],
)
def test_requirements_paths_and_addresses_are_accepted(entry: str) -> None:
    """SEC-17."""
    assert Image(pip=[entry]).pip == (entry,)


@pytest.mark.parametrize(
    "entry",
    ["--index-url=https://evil", "-r x", " -e .", "x; import os", "a b", "x==", "$(touch pwned)", "`id`", "x;y", "", 3],
)
def test_what_is_no_requirement_is_refused(entry: Any) -> None:
    """SEC-16, SEC-17."""
    with pytest.raises(InvalidArgument, match="pip"):
        Image(pip=[entry])


@pytest.mark.parametrize("entry", ["git ffmpeg", "-y", "$(id)", "git;id", "../x", "é"])
def test_what_is_no_debian_package_is_refused(entry: str) -> None:
    """SEC-16."""
    assert Image(apt=["git", "libgl1-mesa-glx", "g++", "mesa-libGL", "libc6:amd64", "git=1:2.39.2-1.1"])
    with pytest.raises(InvalidArgument, match="apt"):
        Image(apt=[entry])


@pytest.mark.parametrize("field", ["env", "shell_vars"])
@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "", "A=B", "A\n", "É", "A;id", 3])
def test_names_of_variables_are_checked(field: str, name: Any) -> None:
    """SEC-18."""
    with pytest.raises(InvalidArgument, match=field):
        Image(**{field: {name: "x"}})


@pytest.mark.parametrize("value", [1, 1.5, None, True, b"x", "a\0b"])
def test_values_of_variables_are_text(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"env\['A'\]"):
        Image(env={"A": value})


def test_a_list_is_no_env() -> None:
    with pytest.raises(InvalidArgument, match="not a dictionary"):
        Image(env=[("A", "1")])  # type: ignore[arg-type]


@given(st.text(st.characters(exclude_characters="\0")))
def test_values_of_variables_are_kept_to_the_letter(value: str) -> None:
    """SEC-16."""
    image = Image(env={"A": value}, shell_vars={"B": value})
    assert (image.env["A"], image.shell_vars["B"]) == (value, value)
    assert pickle.loads(pickle.dumps(image)) == image
    assert len(image.content_hash) == 64


@pytest.mark.parametrize("name", ["PATH", "PYTHONPATH", "LD_PRELOAD"])
def test_what_every_program_loads_is_changed_only_on_purpose(name: str) -> None:
    """SEC-18."""
    with pytest.raises(InvalidArgument, match=rf"allow_env=\['{name}'\]"):
        Image(env={name: "x"})
    assert Image(env={name: "x"}, allow_env=[name]).env[name] == "x"


def test_the_pools_own_variable_cannot_be_set() -> None:
    with pytest.raises(InvalidArgument, match="COMPUTE_POOL"):
        Image(env={"COMPUTE_POOL": "{}"})


def test_secrets_do_not_show() -> None:
    """SEC-9."""
    canary = "hunter2"
    image = Image(
        pip=[f"git+https://me:{canary}@example.org/x.git"],
        pip_indexes=[PipIndex(f"https://me:{canary}@example.org/simple", ["x"])],
        env={"HF_TOKEN": canary, "api_key": canary, "MY_SECRET_2": canary, "PASSWORD": canary, "MODE": "fast"},
        shell_vars={"AWS_SECRET_ACCESS_KEY": canary},
    )
    for text in (repr(image), str(image), repr(image.env), f"{image.pip_indexes}", image.content_hash):
        assert canary not in text
    assert "'HF_TOKEN': '***'" in repr(image)
    assert "fast" in repr(image)
    for wrong in (f"-i https://me:{canary}@x", f"a b https://me:{canary}@x", f"git+https://me:{canary}@x\n"):
        with pytest.raises(InvalidArgument) as caught:
            Image(pip=[wrong])
        assert canary not in str(caught.value)


@pytest.mark.parametrize("entry", ["/etc/passwd", "../x", "a/../../x", "~/x", "a\\..\\x"])
def test_includes_stay_in_the_project(entry: str) -> None:
    """SEC-19."""
    with pytest.raises(InvalidArgument, match="leaves the project"):
        Image(includes=[entry])


@pytest.mark.parametrize(
    ("field", "value"),
    [("bootstrap_timeout", 0), ("bootstrap_timeout", float("nan"))],
)
def test_other_settings_of_an_image_are_checked(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=field):
        Image(**{field: value})


def test_an_index_is_chosen_by_bare_names() -> None:
    """D6, T2: requirement strings are no package names."""
    assert PipIndex("https://example.org/simple", ["Torch_Vision"]).packages == ("torch-vision",)
    for packages in (["torch==2.3"], [], ["torch>=2"], ["-x"]):
        with pytest.raises(InvalidArgument):
            PipIndex("https://example.org/simple", packages)
    for url in ("example.org", "--x", "https://a b", "ftp://x"):
        with pytest.raises(InvalidArgument, match="url="):
            PipIndex(url, ["torch"])
    with pytest.raises(InvalidArgument, match="PipIndex"):
        Image(pip_indexes=["https://example.org/simple"])  # type: ignore[list-item]


def test_adding_leaves_the_image_as_it_was() -> None:
    """S4-11, X5: appended, kept, and a repetition is harmless."""
    index = PipIndex("https://example.org/simple", ["torch"])
    image = Image(pip=["numpy", "torch"], env={"A": "1"})
    more = image.adding(pip=["torch", "keras"], pip_indexes=[index, index], apt=["git"], env={"B": "2"})
    assert (more.pip, more.pip_indexes, more.apt) == (("numpy", "torch", "keras"), (index,), ("git",))
    assert dict(more.env) == {"A": "1", "B": "2"}
    assert image == Image(pip=["numpy", "torch"], env={"A": "1"})


def test_a_worker_says_how_calls_run() -> None:
    """D6."""
    assert Worker() == Worker(1, "auto")
    assert not Worker(executor="auto").process
    assert Worker(4, "process").process
    for concurrency in (0, -1, 1.5, True, "2"):
        with pytest.raises(InvalidArgument, match="concurrency="):
            Worker(concurrency)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="auto, thread, process"):
        Worker(executor="fork")  # type: ignore[arg-type]


def test_a_spec_knows_its_accelerator() -> None:
    """S1-07, T2: the string is looked up when the spec is made."""
    spec = Spec(accelerator="a100:8", nodes=(2, 8), architecture="arm64", allocation="spot")
    assert spec.accelerator == A100(8)
    assert spec.accelerator.supports_cuda
    assert dataclasses.replace(spec, nodes=4).nodes == 4
    assert dataclasses.replace(spec, nodes=4).accelerator == A100(8)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, Spec(accelerator="a100:8", nodes=(2, 8), architecture="arm64", allocation="spot")}) == 1
    assert Spec().allocation == "spot-if-available"
    with pytest.raises(AttributeError):
        spec.nodes = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 0),
        ("nodes", (3, 2)),
        ("nodes", (1, 2, 3)),
        ("nodes", "4"),
        ("vcpus", 0),
        ("memory_gb", -1),
        ("architecture", "riscv"),
        ("allocation", "free"),
        ("region", "eu; rm"),
        ("max_hourly_cost", 0),
        ("ttl", 0),
        ("accelerator", "A1000"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(field: str, value: Any) -> None:
    """D6."""
    with pytest.raises(InvalidArgument, match=field):
        Spec(**{field: value})
