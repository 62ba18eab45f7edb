"""Named pools in sky.toml and pyproject.toml: what they become, and what is said of mistakes in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import InvalidArgument
from skyward.pool.settings import find_settings

STRANGER = 65533

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


def test_the_search_ends_at_the_root_of_a_repository_and_at_home(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies above is not part of the project."""
    (project / "sky.toml").write_text("[pools.a]\nnodes = 2\n")
    inner = project / "one" / "two"
    inner.mkdir(parents=True)
    assert find_settings(inner) is not None
    (project / "one" / ".git").touch()  # a file in worktrees and submodules
    assert find_settings(inner) is None
    (project / "one" / ".git").unlink()
    monkeypatch.setenv("HOME", str(project / "one"))
    assert find_settings(inner) is None
    (project / "one" / "sky.toml").write_text("[pools.a]\nnodes = 4\n")
    assert find_settings(inner) is not None, "those of the root itself count"


@pytest.mark.parametrize("mode", [0o777, 0o1777], ids=["open", "sticky"])
@pytest.mark.parametrize("name", ["sky.toml", "pyproject.toml"])
def test_settings_that_others_can_put_there_are_refused_by_name(project: Path, name: str, mode: int) -> None:
    """SEC-21: a sky.toml of another user in /tmp ran its code as whoever typed `sky exec` below; that attack worked."""
    shared = project / "shared"
    mine = shared / "mine"
    mine.mkdir(parents=True)
    shared.chmod(mode)
    (shared / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert find_settings(mine) is None, "a file that has no settings disturbs nobody"
    top = "pools" if name == "sky.toml" else "tool.skyward.pools"
    (shared / name).write_text(f"[{top}.a]\nnodes = 2\n")
    with pytest.raises(InvalidArgument, match="others can write into") as caught:
        find_settings(mine)
    assert f"--config {shared / name}" in str(caught.value)
    assert sky.ComputePool.from_config("a", path=shared / name).nodes == 2, "the user's word"
    if mode == 0o1777:
        (mine / "sky.toml").write_text("[pools.a]\nnodes = 4\n")
        found = find_settings(mine)
        assert found is not None, "a directory of one's own in /tmp is as good as any"
        assert found.path == mine / "sky.toml"


def test_settings_that_others_can_change_are_refused(project: Path) -> None:
    """SEC-21."""
    (project / "sky.toml").write_text("[pools.a]\nnodes = 2\n")
    (project / "sky.toml").chmod(0o666)
    with pytest.raises(InvalidArgument, match="others can write to"):
        find_settings()
    (project / "sky.toml").rename(project / "open.toml")
    (project / "sky.toml").symlink_to("open.toml")
    with pytest.raises(InvalidArgument, match=r"others can write to .*open\.toml"):
        find_settings()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_settings_of_another_user_are_refused(project: Path) -> None:
    """SEC-21: also those that a link of theirs leads to."""
    (project / "sky.toml").write_text("[pools.a]\nnodes = 2\n")
    os.chown(project / "sky.toml", STRANGER, STRANGER)
    with pytest.raises(InvalidArgument, match="belongs to another user"):
        sky.ComputePool.from_config("a")
    (project / "sky.toml").unlink()
    (project / "mine.toml").write_text("[pools.a]\nnodes = 2\n")
    (project / "sky.toml").symlink_to("mine.toml")
    assert sky.ComputePool.from_config("a").nodes == 2
    os.chown(project / "sky.toml", STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(InvalidArgument, match="belongs to another user"):
        sky.ComputePool.from_config("a")


def test_an_endpoint_counts_only_if_a_variable_names_it_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-21, SEC-32: `sky plan` in a cloned repository sent a signed request where its sky.toml said."""
    url = "http://127.0.0.1:9"
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_EC2"):
        monkeypatch.delenv(name, raising=False)
    (project / "sky.toml").write_text(f'[pools.a]\nprovider = {{kind = "aws", endpoint_url = "{url}"}}\n')
    with pytest.raises(InvalidArgument, match=f"export AWS_ENDPOINT_URL={url}"):
        sky.ComputePool.from_config("a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    provider = sky.ComputePool.from_config("a").provider
    assert isinstance(provider, sky.AWS)
    assert provider.endpoint_url == url


def test_a_token_of_ray_goes_to_no_address_that_only_settings_name(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-21: `sky exec` in a cloned repository sent the user's token where its sky.toml said."""
    monkeypatch.setenv("HOME", str(project))
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    url = "http://127.0.0.1:9"
    for kind in ("ray", "Ray"):
        (project / "sky.toml").write_text(f'[pools.a]\nprovider = {{kind = "{kind}", address = "{url}/"}}\n')
        assert isinstance(sky.ComputePool.from_config("a").provider, sky.Ray), (
            "without a token there is nothing to send"
        )
        with monkeypatch.context() as changed:
            changed.setenv("RAY_AUTH_TOKEN", "canary")
            with pytest.raises(InvalidArgument, match=f"export RAY_API_SERVER_ADDRESS={url}") as failure:
                sky.ComputePool.from_config("a")
            assert "canary" not in str(failure.value)
            changed.setenv("RAY_API_SERVER_ADDRESS", url)
            assert isinstance(sky.ComputePool.from_config("a").provider, sky.Ray)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "canary")
    (project / "sky.toml").write_text(f'[pools.a]\nprovider = {{kind = "ray", address = "{url}", token = ""}}\n')
    assert isinstance(sky.ComputePool.from_config("a").provider, sky.Ray)


WRONG = {
    "not TOML": ("nodes = = 3", "is not TOML"),
    "a table with a typo": ("[pool.a]\nnodes = 1", "Did you mean pools?"),
    "an option with a typo": ("[pools.a]\nnode = 1", r"\[pools.a\]: node is not known. Did you mean nodes?"),
    "a value of the wrong kind": ('[pools.a]\nnodes = "4"', "Write nodes=4, without quotes"),
    "a provider that is not there": ('[pools.a]\nprovider = "azure"', "Write one of: aws, "),
    "a provider's option": ('[pools.a]\nprovider = {kind = "ssh", host = "a"}', "Did you mean hosts?"),
    "a provider without its hosts": ('[pools.a]\nprovider = "ssh"', "hosts"),
    "a plugin that is not there": ('[pools.a]\nplugins = ["pytorch"]', "'pytorch' is not known"),
    "plugins without a list": ('[pools.a]\nplugins = "torch"', "expected a list"),
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
