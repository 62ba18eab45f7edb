"""Where packages come from, with hostile indexes on loopback: no name of a private index from a public one, nothing
built that was not asked for, and no secret for the programs that resolve and build (SEC-13, SEC-26, SEC-28)."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

import skyward
from skyward.api.image import Image, PipIndex
from skyward.errors import BootstrapError
from skyward.setup.env import local, remote, uv
from skyward.setup.env.local import prepare
from skyward.setup.env.remote import Packages, prepare_host
from skyward.setup.env.requirements import Pin
from skyward.setup.env.script import look_script
from skyward.setup.env.uv import uv_environment
from skyward.setup.env.wheel import build_wheel
from skyward.setup.local_shell import LocalShell
from tests.support.indexes import Index, sources, wheel

CANARY = "canary-of-this-test"
PLATFORM = "x86_64-manylinux_2_28"


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Skyward as it is now: its files may change while these tests run."""
    return build_wheel(tmp_path_factory.mktemp("snapshot"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> Path:
    """An empty cache, and a client that has secrets."""
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).resolve().parent), os.environ["PATH"])))
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "cache"))
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "my_password", "UV_PUBLISH_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    for module in (local, remote):
        monkeypatch.setattr(module, "source_hash", lambda: "one state of the source")
        monkeypatch.setattr(module, "build_wheel", lambda dest: Path(shutil.copy(snapshot, dest)), raising=False)
    return tmp_path / "cache"


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path / "private")
    yield made
    made.close()


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index that everybody can add packages to: uv asks it beside those that this computer has."""
    made = Index(tmp_path / "public")
    usual = uv_environment(os.environ).get("UV_INDEX", "")
    monkeypatch.setenv("UV_INDEX", f"{usual} {made.url}".strip())
    monkeypatch.setenv("UV_INDEX_STRATEGY", "unsafe-best-match")
    yield made
    made.close()


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    """The file into which builds write the environment that they run in."""
    return tmp_path / "witness"


def run(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], cwd="/", env={}, capture_output=True, text=True, check=True).stdout


def on_host(image: Image) -> str:
    """The interpreter of the environment that a host makes: this computer, set up as if it were one."""
    host = prepare_host(
        LocalShell(), image, pool="p", deadline=time.monotonic() + 300, report=lambda *_: None, packages=Packages(image)
    )
    return host.python


def on_client(image: Image) -> str:
    return prepare(image).python


def resolved(image: Image, platform: str = PLATFORM) -> dict[str, Pin]:
    packages = Packages(image)
    packages.recipe(platform, "/x", time.monotonic() + 300)
    return {pin.name: pin for pin in packages._load(platform) or ()}


def own_platform() -> str:
    order = ["sh", "-c", look_script("0.0.0"), "sky", "T", "p", "1", "", ""]
    said = subprocess.run(order, capture_output=True, text=True, check=True).stdout.splitlines()
    return next(line.removeprefix("@T platform ") for line in said if line.startswith("@T platform "))


@pytest.mark.parametrize("install", [on_client, on_host])
def test_a_public_package_of_a_private_name_is_neither_built_nor_installed(
    install: Callable[[Image], str], private: Index, public: Index, witness: Path
) -> None:
    """SEC-28: a package that only another one asks for, too. The public index is not even asked for it."""
    private.add("mylib", "1.0", requires=["mylib2", "mylib3"])
    private.add("mylib2", "1.0")
    private.add("mylib3", "1.0")
    for name in ("mylib", "mylib2"):
        public.add_source(name, "99.0", witness)
    public.add("mylib3", "99.0")
    public.add("skyfriend", "2.0", requires=["mylib2", "skystranger"])
    public.add("skystranger", "3.0")
    private.add("skystranger", "0.1")
    indexes = [PipIndex(private.url, ["mylib", "mylib2", "mylib3", "mylib4"])]
    image = Image(pip=["mylib", "skyfriend"], pip_indexes=indexes)
    python = install(image)
    code = (
        "import mylib, mylib2, mylib3, skystranger; print(*(m.version for m in (mylib, mylib2, mylib3, skystranger)))"
    )
    assert run(python, code).split() == ["1.0", "1.0", "1.0", "3.0"]
    assert not witness.exists()
    assert not [name for name in ("mylib", "mylib2", "mylib3", "mylib4") if public.asked_for(name)]


def environments(witness: Path) -> list[dict[str, str]]:
    """What the builds saw, one after the other."""
    return [json.loads(line) for line in witness.read_text().splitlines()]


@pytest.mark.parametrize("install", [on_client, on_host])
def test_nothing_is_built_from_source_unless_it_is_asked_for(
    install: Callable[[Image], str], public: Index, witness: Path
) -> None:
    """SEC-13, SEC-26: the error says why, and what to write; then it is built, by programs that get no secret."""
    public.add_source("skyrawlib", "1.0", witness)
    public.add("skyfriend", "1.0", requires=["skyrawlib"])
    with pytest.raises(BootstrapError, match=r'sky\.Image\(\.\.\., build=\["skyrawlib"\]\)'):
        install(Image(pip=["skyfriend"]))
    assert not witness.exists()

    python = install(Image(pip=["skyfriend"], build=["SkyRawlib"]))
    assert run(python, "import skyrawlib; print(skyrawlib.built)") == "True\n"
    seen = environments(witness)
    assert seen
    assert all(CANARY not in environment.values() for environment in seen)
    assert all(environment["PATH"] and environment["HOME"] for environment in seen)


def test_an_older_wheel_is_taken_where_the_newest_version_has_none(public: Index, witness: Path) -> None:
    public.add("skyrawlib", "1.0")
    public.add_source("skyrawlib", "2.0", witness)
    assert resolved(Image(pip=["skyrawlib"]))["skyrawlib"].wanted == "skyrawlib==1.0"
    assert not witness.exists()


def test_what_the_user_names_by_path_or_repository_is_built(tmp_path: Path, public: Index, witness: Path) -> None:
    """It is the user's own word; what it needs is still not built."""
    public.add_source("skyrawlib", "1.0", witness)
    for name in ("pathlib_of_mine", "repo_of_mine", "nameless"):
        tree = tmp_path / name
        tree.mkdir()
        for path, text in sources(name, "1.0", witness).items():
            (tree / path).write_text(text)
    for name in ("repo_of_mine", "nameless"):
        for order in (
            ["init", "-q"],
            ["add", "."],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
        ):
            subprocess.run(["git", *order], cwd=tmp_path / name, check=True)
    repositories = [f"repo_of_mine @ git+file://{tmp_path}/repo_of_mine", f"git+file://{tmp_path}/nameless"]
    python = on_client(Image(pip=[str(tmp_path / "pathlib_of_mine"), *repositories]))
    code = "import pathlib_of_mine as a, repo_of_mine as b, nameless as c; print(a.built, b.built, c.built)"
    assert run(python, code) == "True True True\n"
    assert all(CANARY not in environment.values() for environment in environments(witness))

    (tmp_path / "pathlib_of_mine" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["skyrawlib"]\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    witness.unlink()
    with pytest.raises(BootstrapError, match="skyrawlib"):
        on_client(Image(pip=[str(tmp_path / "pathlib_of_mine")]))
    assert not witness.exists()


def test_builds_get_a_private_name_from_its_index_or_not_at_all(
    tmp_path: Path, private: Index, public: Index, witness: Path
) -> None:
    """SEC-28: uv cannot choose an index by name for what a build needs."""
    private.add("mytool", "1.0")
    public.add("mytool", "99.0", more="raise SystemError('hostile')\n")
    tree = tmp_path / "mine"
    tree.mkdir()
    for path, text in sources("mine", "1.0", witness, ["mytool"]).items():
        (tree / path).write_text(
            text if path != "backend.py" else f"import mytool\nassert mytool.version == '1.0'\n{text}"
        )
    indexes = [PipIndex(private.url, ["mytool"])]
    assert run(on_client(Image(pip=[str(tree)], pip_indexes=indexes)), "import mine; print(mine.built)") == "True\n"
    assert not public.asked_for("mytool")

    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "add", "."], cwd=tree, check=True)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"], cwd=tree, check=True)
    with pytest.raises(BootstrapError, match="Build a wheel yourself"):
        on_client(Image(pip=[f"mine @ git+file://{tree}"], pip_indexes=indexes))


def test_a_wheel_that_the_user_names_is_taken_before_any_index(tmp_path: Path, private: Index, public: Index) -> None:
    private.add("mylib", "1.0")
    public.add("skyfriend", "1.0", requires=["mylib"])
    own = wheel(tmp_path / "own", "mylib", "3.0")
    image = Image(pip=["skyfriend", str(own)], pip_indexes=[PipIndex(private.url, ["mylib"])])
    assert resolved(image)["mylib"].wanted == "mylib==3.0"


@pytest.mark.parametrize("install", [on_client, on_host])
def test_a_password_with_an_at_sign_is_shown_nowhere_and_is_in_no_file(
    tmp_path: Path, install: Callable[[Image], str], caplog: pytest.LogCaptureFixture
) -> None:
    """SEC-28: the last @ before the path ends a login, for programs that read addresses and so for us."""
    first, second = f"p{secrets.token_hex(8)}", f"w{secrets.token_hex(8)}"
    private = Index(tmp_path / "private", f"me:{first}@{second}")
    caplog.set_level(logging.DEBUG)
    try:
        private.add("skyprivate", "1.0")
        private.add("skydirect", "2.0")
        direct = f"{private.url.removesuffix('simple')}files/skydirect-2.0-py3-none-any.whl"
        image = Image(
            pip=["skyprivate", f"skydirect @ {direct}"],
            pip_indexes=[PipIndex(private.url, ["skyprivate"])],
            shell_vars={"UV_HTTP_RETRIES": "0"},
        )
        assert run(install(image), "import skyprivate, skydirect; print(skydirect.version)") == "2.0\n"
        private.login = "me:another"
        with pytest.raises(BootstrapError) as caught:
            install(dataclasses.replace(image, pip=[*image.pip, "skynone"]))
    finally:
        private.close()
    shown = f"{image!r} {image.pip_indexes} {caught.value!r} {caught.value} {caplog.text}"
    assert first not in shown
    assert second not in shown
    for secret in (first, second):
        assert subprocess.run(["grep", "-r", secret, tmp_path], capture_output=True).stdout == b""


@pytest.mark.parametrize("install", [on_client, on_host])
def test_settings_of_uv_in_directories_above_are_not_read(
    install: Callable[[Image], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, witness: Path
) -> None:
    """SEC-21, SEC-28: in /tmp they may be another user's, and say where build tools come from."""
    tree = tmp_path / "mine"
    tree.mkdir()
    for path, text in sources("mine", "1.0", witness).items():
        (tree / path).write_text(text)
    shared = tmp_path / "shared"
    cache, work, temporary, here = (shared / name for name in ("cache", "cache/work", "tmp", "here"))
    for directory in (shared, cache, work, temporary, here):
        directory.mkdir(mode=0o700)
        (directory / "uv.toml").write_text("this is no TOML, so uv fails if it reads it")
        (directory / "pyproject.toml").write_text(
            '[project]\nname = "theirs"\nversion = "0"\n'
            '[tool.uv.workspace]\nmembers = ["*", "*/*", "*/*/*", "*/*/*/*"]\n'
        )
    monkeypatch.setenv("SKYWARD_CACHE", str(cache))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(here)
    assert run(install(Image(pip=[str(tree)])), "import mine; print(mine.built)") == "True\n"


@pytest.mark.parametrize(("mode", "version"), [(0o755, "99.0"), (0o1777, "1.0")], ids=["own", "shared"])
def test_a_workspace_of_another_user_says_nothing_of_build_tools(
    tmp_path: Path, public: Index, witness: Path, mode: int, version: str
) -> None:
    """SEC-21, SEC-28: a pyproject.toml in /tmp above a source tree of the user's."""
    public.add("skytool", "1.0")
    hostile = wheel(tmp_path / "links", "skytool", "99.0")
    shared = tmp_path / "shared"
    tree = shared / "mine"
    tree.mkdir(parents=True)
    shared.chmod(mode)
    (shared / "pyproject.toml").write_text(
        '[project]\nname = "theirs"\nversion = "0"\n[tool.uv.workspace]\nmembers = ["mine"]\n'
        f'[tool.uv.sources]\nskytool = {{ path = "{hostile}" }}\n'
    )
    for path, text in sources("mine", "1.0", witness, ["skytool"]).items():
        (tree / path).write_text(text)
    with (tree / "pyproject.toml").open("a") as file:
        file.write('[project]\nname = "mine"\nversion = "1.0"\n')
    used = tmp_path / "used"
    with (tree / "backend.py").open("a") as file:
        file.write(f"\nimport skytool\nopen({str(used)!r}, 'w').write(skytool.version)\n")
    assert resolved(Image(pip=[str(tree)]))["mine"].wanted == "mine==1.0"
    assert used.read_text() == version


def test_uv_always_runs_in_a_private_directory_with_settings_of_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-21: never in the directory where the program was started, also for what hosts cannot get themselves."""
    seen: list[Path] = []

    def stopped(step: str, command: list[str], variables: object, image: object, deadline: float, cwd: Path) -> str:
        assert "[tool.uv.workspace]" in (cwd / "pyproject.toml").read_text()
        seen.append(cwd)
        raise BootstrapError(step, "enough for this test")

    monkeypatch.setattr(uv, "run", stopped)
    deadline = time.monotonic() + 300
    assert Packages(Image()).uv("riscv64-manylinux_2_39", deadline) is None
    assert Packages(Image()).python("riscv64-manylinux_2_39", deadline) is None
    for install in (resolved, on_client):
        with pytest.raises(BootstrapError):
            install(Image(pip=["skyfriend"]))
    assert len(seen) == 4
    assert all(cache in directory.parents for directory in seen)


def test_uv_is_started_in_one_place_only() -> None:
    """Others send the program to hosts, or ask for its version, which reads no settings."""
    package = Path(skyward.__file__).parent
    known = {"setup/env/uv.py", "setup/env/remote.py", "cli/doctor.py"}
    naming = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"\bfind_uv|-m.{1,5}\buv\b|(?:\[|\(\()\"uv\",|which\(\"uv", path.read_text())
    }
    assert naming == known
    assert (package / "setup/env/uv.py").read_text().count("find_uv()") == 2  # its definition, and run_uv
    assert re.findall(r"find_uv\(\).*", (package / "setup/env/remote.py").read_text()) == ["find_uv())"]
    assert re.findall(r"find_uv\(\).*", (package / "cli/doctor.py").read_text()) == ['find_uv(), "--version")']


def test_what_skyward_itself_needs_is_refused_if_it_was_altered(private: Index) -> None:
    """SEC-26: its packages are pinned to hashes like all others before a host installs them."""
    version = metadata.version("cloudpickle")
    private.add("cloudpickle", version)
    image = Image(pip_indexes=[PipIndex(private.url, ["cloudpickle"])])
    assert resolved(image, own_platform())["cloudpickle"].wanted == f"cloudpickle=={version}"
    private.add("cloudpickle", version, more="evil = True\n")
    with pytest.raises(BootstrapError, match="Hash mismatch") as caught:
        on_host(image)
    assert caught.value.step == "installing packages"
