"""Environments on this computer: the interpreter in use, or one made by uv (D6, SEC-16, SEC-17)."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import skyward
from skyward.api.image import Image, PipIndex
from skyward.errors import BootstrapError, InvalidArgument, PythonMismatch
from skyward.setup.env import local, wheel
from skyward.setup.env.local import Environment, prepare
from skyward.setup.env.uv import missing_apt, missing_pip, no_index, uv_environment
from skyward.setup.env.wheel import build_wheel, tree_hash
from tests.support.processes import gone

PROJECT = Path(__file__).parents[3]


def only_index(directory: Path, *packages: tuple[str, str]) -> str:
    """A package index on disk with tiny packages that exist nowhere else."""
    for name, version in packages:
        folder = directory / name
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name}-{version}-py3-none-any.whl"
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(f"{name}.py", f"version = {version!r}\n")
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        (folder / "index.html").write_text(f'<a href="{file.name}">{file.name}</a>')
    return directory.as_uri()


def run(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], cwd="/", env={}, capture_output=True, text=True, check=True).stdout


def test_the_interpreter_in_use_serves_when_it_has_everything(tmp_path: Path) -> None:
    image = Image(pip=["cloudpickle>=3", "packaging"], env={"A": "1"})
    environment = prepare(image, cache=tmp_path)
    assert environment == Environment(sys.executable, {"A": "1"})
    assert list(tmp_path.iterdir()) == []


def test_what_is_installed_is_compared_with_care() -> None:
    """Versions, markers and extras count; what is only a place is never taken for installed."""
    version = metadata.version("packaging")
    have = [
        "Packaging",
        f"packaging=={version}",
        "no-such-thing; python_version < '3'",
        "pytest[]",
        "packaging[no-such-extra]",
    ]
    assert missing_pip(have) == []
    lack = [
        "no-such-thing",
        "packaging<1",
        f"packaging!={version}",
        "packaging @ https://example.org/p.whl",
        "https://example.org/p-1-py3-none-any.whl",
        "./here",
        "distributed[no-such]<1",
    ]
    assert missing_pip(lack) == lack


def test_the_needs_of_an_extra_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "bundle-1.0.dist-info"
    info.mkdir()
    extras = "Provides-Extra: full\nProvides-Extra: small\n"
    needs = 'Requires-Dist: no-such-thing; extra == "full"\nRequires-Dist: packaging>=1; extra == "small"\n'
    nested = 'Requires-Dist: bundle[full]; extra == "all"\nProvides-Extra: all\n'
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bundle\nVersion: 1.0\n{extras}{needs}{nested}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert missing_pip(["bundle", "bundle[small]", "bundle[full]", "bundle[all]"]) == ["bundle[full]", "bundle[all]"]


def test_a_package_that_is_not_here_gets_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The issue's own words, with a real small package; made once, and the second time found without any program."""
    said: list[str] = []
    image = Image(pip=["cowsay"], env={"A": "1"})
    assert missing_pip(image.pip)
    monkeypatch.setattr(local, "source_hash", lambda: "one state of the source")
    made = prepare(image, cache=tmp_path, report=said.append)
    assert made.python != sys.executable
    assert made.env["A"] == "1"
    assert any("cowsay" in line for line in said)
    code = "import cowsay, skyward.errors, importlib.metadata as m; print(m.version('cloudpickle'))"
    assert run(made.python, code) == f"{metadata.version('cloudpickle')}\n"
    assert run(made.python, "import importlib.util as i; print(i.find_spec('distributed'))") == "None\n"
    assert run(made.python, "import skyward.errors as e; print(e.__file__)").startswith(str(tmp_path))
    assert list(Path(made.python).parents[1].rglob("cowsay/__pycache__/*.pyc"))
    script = Path(made.python).parent / "cowsay"
    assert subprocess.run([script, "--help"], capture_output=True, check=True)

    monkeypatch.setattr(subprocess, "Popen", None)
    said.clear()
    assert prepare(image, cache=tmp_path, report=said.append) == made
    assert said == []
    assert {path.suffix for path in tmp_path.iterdir()} == {"", ".lock"}


def test_two_at_once_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the lock, then takes what the first has made, without starting any program."""
    monkeypatch.setattr(local, "source_hash", lambda: "one state of the source")
    image = Image(pip=["no-such-thing"])
    home = tmp_path / local._key(image)
    waiting = threading.Event()
    made: list[Environment] = []

    def second() -> None:
        made.append(prepare(image, cache=tmp_path, report=lambda line: waiting.set()))

    with open(home.with_suffix(".lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(60)
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").symlink_to(sys.executable)
        (home / ".complete").touch()
        monkeypatch.setattr(subprocess, "Popen", None)
    thread.join(60)
    assert [environment.python for environment in made] == [str(home / "bin" / "python")]


def test_an_interrupted_build_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle: the next one starts anew and clears up; a lost interpreter counts as no environment."""
    monkeypatch.setattr(local, "source_hash", lambda: "one state of the source")
    image = Image(pip=["no-such-thing"])
    home = tmp_path / local._key(image)
    (tmp_path / f"{home.name}.tmp-old" / "env").mkdir(parents=True)
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to("/no/such/python")
    (home / ".complete").touch()
    with pytest.raises(BootstrapError, match="no-such-thing"):
        prepare(image, cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{home.name}.lock"]


def test_an_index_serves_the_packages_that_it_names_and_no_others(tmp_path: Path) -> None:
    """D6, SEC-17: also a package that only another one asks for; and a wheel on disk is installed."""
    url = only_index(tmp_path / "index", ("cowsay", "0.0.1"), ("iniconfig", "0.0.1"), ("humanize", "0.0.1"))
    only_index(tmp_path, ("tinything", "1.0"))
    own = str(tmp_path / "tinything" / "tinything-1.0-py3-none-any.whl")
    indexes = [PipIndex(url, ["iniconfig", "cowsay", "not-needed-at-all"])]
    image = Image(pip=["cowsay", "humanize", "pytest-mock", own], pip_indexes=indexes)
    made = prepare(image, cache=tmp_path / "cache")
    names = ("tinything", "cowsay", "iniconfig", "humanize")
    code = f"import importlib.metadata as m; print(*[m.version(n) for n in {names!r}])"
    versions = run(made.python, code).split()
    assert versions[:3] == ["1.0", "0.0.1", "0.0.1"]
    assert versions[3] != "0.0.1"


def test_a_package_on_disk_has_another_environment_when_it_changes(tmp_path: Path) -> None:
    only_index(tmp_path, ("tinything", "1.0"))
    image = Image(pip=[str(tmp_path / "tinything" / "tinything-1.0-py3-none-any.whl")])
    before = local._key(image)
    with zipfile.ZipFile(image.pip[0], "a") as archive:
        archive.writestr("more.py", "")
    assert local._key(image) != before
    with pytest.raises(InvalidArgument, match="there is no"):
        prepare(Image(pip=["./no-such-directory"]), cache=tmp_path / "cache")


def test_a_cache_into_which_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-21."""
    tmp_path.chmod(0o777)
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path))
    with pytest.raises(BootstrapError, match="SKYWARD_CACHE"):
        prepare(Image(pip=["no-such-thing"]))
    assert list(tmp_path.iterdir()) == []


def test_a_failure_says_which_step_and_what_uv_said(tmp_path: Path) -> None:
    with pytest.raises(BootstrapError, match="no-such-package-of-skyward") as caught:
        prepare(Image(pip=["no-such-package-of-skyward"]), cache=tmp_path)
    assert caught.value.step == "resolving packages"
    assert caught.value.exit_code


def test_passwords_of_indexes_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-9."""
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    index = PipIndex("http://me:hunter2@127.0.0.1:9/simple", ["cowsay"])
    said: list[str] = []
    with pytest.raises(BootstrapError) as caught:
        prepare(Image(pip=["cowsay"], pip_indexes=[index]), cache=tmp_path, report=said.append)
    with pytest.raises(BootstrapError) as other:
        url = "http://me:hunter2@127.0.0.1:9/x-1-py3-none-any.whl"
        prepare(Image(pip=[url]), cache=tmp_path, report=said.append)
    assert "hunter2" not in f"{caught.value}{caught.value.args}{other.value}{other.value.args}{said}"
    assert "127.0.0.1" in str(caught.value)


def test_what_takes_too_long_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = 'sleep 600 & echo $! > "$1.new"; mv "$1.new" "$1"; wait'
    build = local._Build(Image(bootstrap_timeout=2), time.monotonic() + 2, print)
    with pytest.raises(BootstrapError, match="bootstrap_timeout=2 s"):
        build.run("a step", ["sh", "-c", script, "sh", str(child)], os.environ)
    pid = int(child.read_text())
    deadline = time.monotonic() + 60
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_apt_packages_that_are_missing_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    if missing_apt(["dpkg"]):
        pytest.skip("not a Debian")
    assert missing_apt(["dpkg", "no-such-package-x", "dpkg=0.1"]) == ["no-such-package-x", "dpkg=0.1"]
    assert prepare(Image(apt=["dpkg"])).python == sys.executable
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BootstrapError, match=r"sudo apt-get install .* no-such-package-x$"):
        prepare(Image(apt=["no-such-package-x"]))


def test_a_lock_of_apt_that_another_program_holds_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first two calls find it held."""
    if missing_apt(["dpkg"]):
        pytest.skip("not a Debian")
    said = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (unattended-upgr)"
    calls = tmp_path / "calls"
    locked = f'[ $(wc -l < {calls}) -gt 2 ] || {{ echo "{said}" >&2; exit 100; }}'
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\necho x >> {calls}\n{locked}\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    steps: list[str] = []
    prepare(Image(apt=["no-such-package-x"]), report=steps.append)
    assert calls.read_text() == "x\n" * 4
    assert [step for step in steps if "lock" in step] == [f"waiting for apt's lock: {said[3:]}"]


def test_without_dpkg_an_image_with_apt_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_apt([]) == []
    with pytest.raises(BootstrapError, match="no dpkg"):
        missing_apt(["git"])


def test_the_settings_of_pip_hold_for_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://a/simple\nextra-index-url =\n  https://b\n  https://c%20d\n")
    monkeypatch.setattr("skyward.setup.env.uv._files", lambda environ: [tmp_path / "missing", config])
    assert uv_environment({}) == {
        "UV_DEFAULT_INDEX": "https://a/simple",
        "UV_INDEX": "https://b https://c%20d",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    chosen = {"PIP_INDEX_URL": "https://e", "PIP_FIND_LINKS": "/one /two", "PIP_DEFAULT_TIMEOUT": "180"}
    found = uv_environment({**chosen, "UV_INDEX": "https://mine"})
    assert found == {"UV_DEFAULT_INDEX": "https://e", "UV_FIND_LINKS": "/one,/two", "UV_HTTP_TIMEOUT": "180"}
    assert "UV_DEFAULT_INDEX" not in uv_environment({"UV_INDEX_URL": "https://older"})
    assert no_index({"PIP_NO_INDEX": "1"})
    assert not no_index({})
    config.write_text("this is no configuration")
    assert uv_environment({}) == {}


def test_the_files_of_pip_can_be_switched_off_and_the_last_one_wins(tmp_path: Path) -> None:
    own = tmp_path / "own.conf"
    own.write_text("[global]\nindex-url = https://own/simple\n")
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text(
        "[global]\nindex-url = https://user/simple\n[install]\nno_index = true\n"
    )
    assert uv_environment({"PIP_CONFIG_FILE": os.devnull}) == {}
    user = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert uv_environment(user)["UV_DEFAULT_INDEX"] == "https://user/simple"
    assert no_index(user)
    assert uv_environment({**user, "PIP_CONFIG_FILE": str(own)})["UV_DEFAULT_INDEX"] == "https://own/simple"


def test_the_wheel_is_what_is_imported(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    built = build_wheel(first)
    assert built.read_bytes() == build_wheel(second).read_bytes()
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        record = next(name for name in names if name.endswith("/RECORD"))
        assert archive.read("skyward/errors.py") == Path(skyward.__file__).with_name("errors.py").read_bytes()
        assert {line.split(",")[0] for line in archive.read(record).decode().splitlines()} == set(names)
        assert b"Requires-Dist: cloudpickle" in archive.read(record.replace("RECORD", "METADATA"))
    assert not any("__pycache__" in name for name in names)
    assert "skyward/py.typed" in names


def test_a_checkout_that_is_not_installed_knows_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == list(wheel.REQUIRES)
    # Nothing is installed where nothing is looked for.
    monkeypatch.setattr(sys, "path", [])
    version, about = wheel._about()
    assert version == skyward.__version__
    assert about["METADATA"].count("Requires-Dist") == len(wheel.REQUIRES)


def test_a_tree_hash_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    seen = {tree_hash(tmp_path)}
    (tmp_path / "a").write_text("2")
    seen.add(tree_hash(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    seen.add(tree_hash(tmp_path))
    assert len(seen) == 3
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").write_text("x")
    assert tree_hash(tmp_path) in seen


def test_another_python_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """Row 10: bytecode cannot cross minor versions."""
    other = f"3.{sys.version_info[1] + 1}"
    with pytest.raises(PythonMismatch, match="cannot cross"):
        prepare(Image(python=other), cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
