"""Named pools in sky.toml and pyproject.toml: what they become, and what is said of mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import InvalidArgument
from skyward.pool.settings import find_settings

GOOD = """
default = "lab"

[pools.lab]
provider = {kind = "ssh", hosts = ["gpu1", "ada@gpu2:2222"], lease = 60}
concurrency = 2
plugins = ["torch", {kind = "jax", cuda = "cuda13"}]

[pools.lab.image]
pip = ["numpy"]
env = {TOKEN = {secret = "SOME_TOKEN"}, LEVEL = "1"}

[pools.here]
nodes = 3
image = ["numpy"]
worker = {concurrency = 4, executor = "process"}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_TOKEN", "t0ken-of-somebody")
    return tmp_path


def test_a_named_pool_has_the_options_of_the_file(project: Path) -> None:
    (project / "sky.toml").write_text(GOOD)
    lab = sky.ComputePool.from_config("lab")
    assert lab.provider == sky.SSH(hosts=["gpu1", "ada@gpu2:2222"], lease=60)
    assert lab.nodes == 2
    assert lab.concurrency == 2
    assert [plugin.name for plugin in lab.plugins] == ["torch", "jax"]
    assert isinstance(lab.image.env["TOKEN"], sky.Secret)
    assert "t0ken" not in repr(lab.image)
    here = sky.ComputePool.from_config("here", nodes=1)
    assert (here.nodes, here.worker) == (1, sky.Worker(4, "process"))
    assert here.image.pip == ("numpy",)
    assert sky.ComputePool.from_config().provider == lab.provider, "the default one"


def test_the_nearest_folder_upwards_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "pyproject.toml").write_text("[tool.skyward.pools.a]\nnodes = 2\n")
    inner = project / "one" / "two"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert sky.ComputePool.from_config().nodes == 2, "the only one"
    (inner / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert sky.ComputePool.from_config("a").nodes == 2, "one without [tool.skyward] does not count"
    (project / "one" / "sky.toml").write_text("[pools.a]\nnodes = 4\n")
    assert sky.ComputePool.from_config("a").nodes == 4
    found = find_settings()
    assert found is not None
    assert found.path == project / "one" / "sky.toml"
    assert sky.ComputePool.from_config("a", path=project / "pyproject.toml").nodes == 2


WRONG = {
    "no TOML": ("nodes = = 3", "is no TOML"),
    "a table with a typo": ("[pool.a]\nnodes = 1", "Did you mean pools?"),
    "an option with a typo": ("[pools.a]\nnode = 1", r"\[pools.a\]: node is not known. Did you mean nodes?"),
    "a value of the wrong kind": ('[pools.a]\nnodes = "4"', "Write nodes=4, without quotes"),
    "a provider that is not there": ('[pools.a]\nprovider = "azure"', "Write one of: aws, "),
    "a provider's option": ('[pools.a]\nprovider = {kind = "ssh", host = "a"}', "Did you mean hosts?"),
    "a provider without its hosts": ('[pools.a]\nprovider = "ssh"', "hosts"),
    "a plugin that is not there": ('[pools.a]\nplugins = ["pytorch"]', "'pytorch' is not known"),
    "plugins without a list": ('[pools.a]\nplugins = "torch"', "a list is wanted"),
    "an image's option": ('[pools.a]\nimage = {packages = ["x"]}', "packages is not known"),
    "a secret that is not set": (
        '[pools.a.image.env]\nA = {secret = "NOT_SET_ANYWHERE"}',
        "NOT_SET_ANYWHERE is not set",
    ),
    "another name": ("[pools.b]\nnodes = 1", "no pool 'a'; there are: b"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named_with_its_file_and_place(project: Path, case: str) -> None:
    text, words = WRONG[case]
    (project / "sky.toml").write_text(text)
    with pytest.raises(InvalidArgument, match=words) as caught:
        sky.ComputePool.from_config("a")
    assert "nodes=4" in str(caught.value) or str(project / "sky.toml") in str(caught.value)


def test_without_settings_it_says_how_to_get_some(project: Path) -> None:
    with pytest.raises(InvalidArgument, match="`sky init` writes one"):
        sky.ComputePool.from_config("gpu")
    (project / "sky.toml").write_text("[pools.a]\n[pools.b]\n")
    with pytest.raises(InvalidArgument, match="does not say which is meant"):
        sky.ComputePool.from_config()
