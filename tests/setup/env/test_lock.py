"""Locks: read in three formats, enforced with hashes; and the record of what an unlocked image comes to (SEC-27)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

import skyward as sky
from skyward.api.image import Image, PipIndex
from skyward.errors import BootstrapError, InvalidArgument
from skyward.setup.env import local, remote
from skyward.setup.env.local import prepare
from skyward.setup.env.lock import Locked, check_asked, lock_path, only_locked, read_pylock_file, read_requirements
from skyward.setup.env.remote import Packages, prepare_host
from skyward.setup.env.uv import find_uv, uv_environment
from skyward.setup.env.wheel import build_wheel
from skyward.setup.local_shell import LocalShell
from tests.support.indexes import Index, wheel

ONE, TWO = "1" * 64, "2" * 64

# ------------------------------------------------------------------------------------------------------ as texts


def test_requirements_with_hashes_are_read() -> None:
    text = f"""
    # made by pip-compile
    Some.Thing==1.2 \\
        --hash=sha256:{ONE} \\
        --hash=sha256:{TWO}
        # via other
    other[extra]==2.0+cu128 ; python_version >= "3" --hash=sha256:{ONE}   # a comment
    direct @ https://example.org/direct-1.0-py3-none-any.whl --hash=sha256:{TWO}
    repo @ git+https://example.org/repo.git@{"c" * 40}
    """
    assert read_requirements("\n".join(line.strip() for line in text.splitlines()), "lock") == (
        Locked("some-thing", "Some.Thing==1.2", "1.2", frozenset({ONE, TWO})),
        Locked("other", 'other[extra]==2.0+cu128 ; python_version >= "3"', "2.0+cu128", frozenset({ONE})),
        Locked("direct", "direct @ https://example.org/direct-1.0-py3-none-any.whl", "", frozenset({TWO})),
        Locked("repo", f"repo @ git+https://example.org/repo.git@{'c' * 40}"),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thing==1.2", "thing has no SHA-256"),
        ("thing @ git+https://example.org/x.git@main", "thing has no SHA-256"),
        (f"thing>=1.2 --hash=sha256:{ONE}", "no exact version"),
        (f"thing==1.* --hash=sha256:{ONE}", "no exact version"),
        ("thing==1.2 --hash=md5:abc", "no SHA-256"),
        ("thing==1.2 --hash=sha256:abc", "no SHA-256"),
        ("--index-url https://me:pw@example.org/simple", "the option --index-url is not read"),
        ("-r other.txt", "the option -r is not read"),
        (f"./here --hash=sha256:{ONE}", "not a requirement with a name"),
    ],
)
def test_requirements_that_pin_nothing_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        read_requirements(text, "lock.txt")
    assert "lock.txt cannot be used as a lock" in str(caught.value)
    assert "pw" not in str(caught.value)


PYLOCK = f"""
lock-version = "1.0"
created-by = "somebody"
[[packages]]
name = "thing"
version = "1.2"
marker = "sys_platform == 'linux'"
sdist = {{ url = "https://x/thing.tar.gz", hashes = {{ sha256 = "{TWO}" }} }}
wheels = [{{ url = "https://x/thing.whl", hashes = {{ sha256 = "{ONE}" }} }}]
[[packages]]
name = "repo"
vcs = {{ type = "git", url = "https://x/repo.git", commit-id = "{"c" * 40}", subdirectory = "sub" }}
[[packages]]
name = "direct"
archive = {{ url = "https://x/direct.whl", hashes = {{ sha256 = "{ONE}" }} }}
"""


def test_a_pylock_is_read() -> None:
    assert read_pylock_file(PYLOCK, "pylock.toml") == (
        Locked("thing", "thing==1.2 ; sys_platform == 'linux'", "1.2", frozenset({ONE, TWO})),
        Locked("repo", f"repo @ git+https://x/repo.git@{'c' * 40}#subdirectory=sub"),
        Locked("direct", "direct @ https://x/direct.whl", "", frozenset({ONE})),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no toml", "not TOML"),
        ('[[packages]]\nname = "thing"\n', "no lock-version"),
        ('lock-version = "1.0"\n', "no packages"),
        ('lock-version = "1.0"\n[[packages]]\nname = "../x"\n', "called '../x'"),
        ('lock-version = "1.0"\n[[packages]]\nname = "thing"\nversion = "1"\n', "thing has no SHA-256"),
        ('lock-version = "1.0"\n[[packages]]\nname = "thing"\ndirectory = { path = "." }\n', "give its path in pip"),
        (
            'lock-version = "1.0"\n[[packages]]\nname = "a"\nvcs = { type = "git", url = "x", commit-id = "main" }\n',
            "full commit-id",
        ),
    ],
)
def test_a_pylock_that_pins_nothing_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_pylock_file(text, "pylock.toml")


def test_only_files_with_a_hash_of_the_lock_are_left() -> None:
    """An index may have got more files of the same version since."""
    text = f"""
    [[packages]]
    name = "thing"
    version = "1"
    sdist = {{ url = "https://x/thing.tar.gz", hashes = {{ sha256 = "{TWO}" }} }}
    wheels = [{{ url = "https://x/new.whl", hashes = {{ sha256 = "{"3" * 64}" }} }},
              {{ url = "https://x/old.whl", hashes = {{ sha256 = "{ONE}" }} }}]
    """
    (package,) = only_locked(text, [Locked("thing", "thing==1", "1", frozenset({ONE}))])["packages"]
    assert [file["url"] for file in package["wheels"]] == ["https://x/old.whl"]
    assert "sdist" not in package
    with pytest.raises(
        BootstrapError, match=r"no file of thing==1 that fits .* begin with 1111111111111111, 2222222222222222, 3333"
    ):
        only_locked(text, [Locked("thing", "thing==1", "1", frozenset({"4" * 64}))])


def test_what_the_lock_lacks_is_named() -> None:
    """Also what plugins ask for: their packages are entries of the image like all others."""
    locked = [Locked("thing", "thing==1.2", "1.2"), Locked("repo", "repo @ git+https://x")]
    fine = ["Thing>=1", "thing[extra]", "repo", "repo @ git+https://x", "rich", "gone; python_version < '3'"]
    check_asked(fine, locked, {"rich": "15.0"})
    with pytest.raises(
        InvalidArgument, match=r"ask for: thing>=2 \(it has 1.2\), other, git\+https://\*\*\*@x/y\."
    ) as e:
        check_asked(["thing>=2", "other", "git+https://me:pw@x/y"], locked, {})
    assert "make it again" in str(e.value)


@pytest.mark.parametrize("lock", ["Pipfile.lock", "poetry.lock", "pyproject.toml", "", 1, "uv.lock.bak"])
def test_what_is_no_lock_is_refused_when_the_image_is_made(lock: str) -> None:
    with pytest.raises(InvalidArgument, match=r"pylock\.toml"):
        Image(lock=lock)


def test_a_lock_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="there is no file"):
        prepare(Image(lock=str(tmp_path / "pylock.toml")), cache=tmp_path)
    (tmp_path / "uv.lock").touch()
    with pytest.raises(InvalidArgument, match=r"no pyproject\.toml beside it"):
        lock_path(str(tmp_path / "uv.lock"))


# ------------------------------------------------------------------------------------------------------ enforced


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Skyward as it is now: its files may change while these tests run."""
    return build_wheel(tmp_path_factory.mktemp("snapshot"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> Path:
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).resolve().parent), os.environ["PATH"])))
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "cache"))
    for module in (local, remote):
        monkeypatch.setattr(module, "source_hash", lambda: "one state of the source")
        monkeypatch.setattr(module, "build_wheel", lambda dest: Path(shutil.copy(snapshot, dest)))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index beside those that this computer has, with a few packages."""
    made = Index(tmp_path / "index")
    usual = uv_environment(os.environ).get("UV_INDEX", "")
    monkeypatch.setenv("UV_INDEX", f"{usual} {made.url}".strip())
    monkeypatch.setenv("UV_INDEX_STRATEGY", "unsafe-best-match")
    made.add("skylocked", "1.0", requires=["skydeep>=1"])
    made.add("skylocked", "2.0", requires=["skydeep>=1"])
    made.add("skydeep", "1.0")
    made.add("skydeep", "1.5")
    yield made
    made.close()


def uv(*arguments: str, cwd: Path) -> None:
    variables = {**os.environ, **uv_environment(os.environ)}
    subprocess.run([find_uv(), *arguments], cwd=cwd, env=variables, check=True, capture_output=True)


def locked_requirements(directory: Path) -> Path:
    (directory / "in.txt").write_text("skylocked<2\nskydeep<1.5\n")
    uv("pip", "compile", "--quiet", "--generate-hashes", "in.txt", "--output-file", "requirements.txt", cwd=directory)
    return directory / "requirements.txt"


def locked_pylock(directory: Path) -> Path:
    (directory / "in.txt").write_text("skylocked<2\nskydeep<1.5\n")
    uv("pip", "compile", "--quiet", "in.txt", "--output-file", "pylock.toml", cwd=directory)
    return directory / "pylock.toml"


def locked_project(directory: Path) -> Path:
    minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
    (directory / "pyproject.toml").write_text(
        f'[project]\nname = "mine"\nversion = "1"\nrequires-python = "=={minor}.*"\n'
        'dependencies = ["skylocked<2", "skydeep<1.5"]\n[dependency-groups]\ndev = ["no-such-thing-of-skyward"]\n'
        "[tool.uv]\nenvironments = [\"sys_platform == 'linux'\"]\n"
    )
    text = (directory / "pyproject.toml").read_text()
    (directory / "pyproject.toml").write_text(text.replace('dev = ["no-such-thing-of-skyward"]', "dev = []"))
    uv("lock", "--quiet", cwd=directory)
    return directory / "uv.lock"


def on_host(image: Image) -> str:
    report: Callable[[str, float | None], None] = lambda step, took: None  # noqa: E731
    deadline = time.monotonic() + 300
    return prepare_host(
        LocalShell(), image, pool="p", deadline=deadline, report=report, packages=Packages(image)
    ).python


def on_client(image: Image) -> str:
    return prepare(image).python


def installed(python: str) -> dict[str, str]:
    """Names and versions of all packages, as pip would list them."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    said = subprocess.run([python, "-I", "-c", code], cwd="/", env={}, capture_output=True, text=True, check=True)
    return {name.lower().replace("_", "-"): version for name, version in json.loads(said.stdout).items()}


@pytest.mark.parametrize("make", [locked_requirements, locked_pylock, locked_project])
@pytest.mark.parametrize("install", [on_client, on_host])
def test_exactly_what_the_lock_lists_is_installed(
    cache: Path, index: Index, tmp_path: Path, make: Callable[[Path], Path], install: Callable[[Image], str]
) -> None:
    """SEC-27: newer versions that the index has are not taken; what Skyward itself needs is added, as on every node."""
    (tmp_path / "lock").mkdir()
    lock = make(tmp_path / "lock")
    found = installed(install(Image(pip=["skylocked"], lock=str(lock))))
    assert (found["skylocked"], found["skydeep"]) == ("1.0", "1.0")
    assert found["cloudpickle"] == metadata.version("cloudpickle")
    assert found["skyward"]


@pytest.mark.parametrize("install", [on_client, on_host])
def test_a_file_with_another_hash_than_the_lock_has_is_refused(
    cache: Path, index: Index, tmp_path: Path, install: Callable[[Image], str]
) -> None:
    """SEC-27."""
    lock = locked_requirements(tmp_path)
    file = index.root / "files" / "skydeep-1.0-py3-none-any.whl"
    right = hashlib.sha256(file.read_bytes()).hexdigest()
    assert right in lock.read_text()
    lock.write_text(lock.read_text().replace(right, ONE))
    with pytest.raises(BootstrapError, match=r"no file of skydeep==1\.0 .* make the lock again") as caught:
        install(Image(lock=str(lock)))
    assert caught.value.step == "reading the lock"
    assert not list(cache.glob("envs/*/.complete"))


def test_what_is_asked_for_beyond_the_lock_is_an_error_that_names_it(cache: Path, index: Index, tmp_path: Path) -> None:
    lock = str(locked_requirements(tmp_path))
    with pytest.raises(InvalidArgument, match=r"skylocked>=2 \(it has 1\.0\), cowsay"):
        prepare(Image(pip=["skylocked>=2", "cowsay", "rich"], lock=lock))
    (tmp_path / "other.txt").write_text(f"cloudpickle==0.1 --hash=sha256:{ONE}\n")
    with pytest.raises(InvalidArgument, match=r"the lock has cloudpickle 0\.1, and this program runs with"):
        prepare(Image(lock=str(tmp_path / "other.txt")))


def test_a_path_of_this_computer_goes_beside_the_lock(cache: Path, index: Index, tmp_path: Path) -> None:
    """One's own project is in no lock; what it needs has to be."""
    mine = wheel(tmp_path / "mine", "skymine", "3.0", requires=["skydeep"])
    image = Image(pip=[str(mine)], lock=str(locked_pylock(tmp_path)))
    found = installed(on_client(image))
    assert (found["skymine"], found["skydeep"]) == ("3.0", "1.0")


def test_a_lock_with_names_of_a_private_index_takes_them_from_there(cache: Path, index: Index, tmp_path: Path) -> None:
    private = Index(tmp_path / "private")
    try:
        file = private.add("skydeep", "1.0", more="private = True\n")
        lock = locked_requirements(tmp_path)
        public = hashlib.sha256((index.root / "files" / file.name).read_bytes()).hexdigest()
        lock.write_text(lock.read_text().replace(public, hashlib.sha256(file.read_bytes()).hexdigest()))
        image = Image(lock=str(lock), pip_indexes=[PipIndex(private.url, ["skydeep"])])
        code = "import skydeep; print(skydeep.private)"
        said = subprocess.run([on_client(image), "-c", code], capture_output=True, text=True, check=True)
        assert said.stdout == "True\n"
    finally:
        private.close()


# ------------------------------------------------------------------------------------------------------ the record


def recorded(text: str) -> dict[str, str]:
    """Names and versions that a record lists, also those that are commented out."""
    lines = [line.removeprefix("# ").partition(" ")[0] for line in text.splitlines() if "==" in line]
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("install", [on_client, on_host])
def test_the_record_is_what_is_installed_and_can_be_the_lock(
    cache: Path, index: Index, tmp_path: Path, install: Callable[[Image], str]
) -> None:
    """SEC-27: names, versions, hashes; an image with it as its lock gets the same, whatever the index has by then."""
    mine = wheel(tmp_path / "mine", "skymine", "3.0")
    python = install(Image(pip=["skylocked", str(mine)]))
    record = (Path(python).parents[1] / "packages.txt").read_text()
    have = installed(python)
    assert recorded(record) == have
    deep = index.root / "files" / "skydeep-1.5-py3-none-any.whl"
    assert f"skydeep==1.5 --hash=sha256:{hashlib.sha256(deep.read_bytes()).hexdigest()}\n" in record
    (tmp_path / "locked.txt").write_text(record)
    index.add("skylocked", "3.0")
    index.add("skydeep", "1.9")
    assert installed(install(Image(pip=["skylocked", str(mine)], lock=str(tmp_path / "locked.txt")))) == have


def test_what_was_resolved_for_hosts_is_listed_on_the_client(cache: Path, index: Index) -> None:
    packages = Packages(Image(pip=["skylocked"]))
    deadline = time.monotonic() + 300
    made = packages.recipe("x86_64-manylinux_2_28", "/x", deadline)
    (path,) = packages.new_records
    assert Path(path).read_text() == made.files["packages.txt"]
    assert Path(path).stat().st_mode & 0o077 == 0 or Path(path).parent.stat().st_mode & 0o077 == 0
    again = Packages(Image(pip=["skylocked"]))
    again.recipe("x86_64-manylinux_2_28", "/x", deadline)
    assert again.new_records == []


def test_a_pool_says_once_that_its_packages_are_not_locked(cache: Path, index: Index, tmp_path: Path) -> None:
    """SEC-27: when versions have just been chosen; not for every pool that uses them, and not where there is a lock."""

    def said(image: Image) -> list[str]:
        heard: list[str] = []

        def listen(event: sky.events.Event) -> None:
            if isinstance(event, sky.events.Notice):
                heard.append(event.text)

        pool = sky.ComputePool(provider=sky.Local(), nodes=1, image=image, console=False)
        pool.on_event(listen)
        with pool:
            pass
        return heard

    image = Image(pip=["skylocked"])
    (text,) = [text for text in said(image) if "not locked" in text]
    record = text.partition(" are in ")[2].partition(". ")[0]
    assert recorded(Path(record).read_text())["skylocked"] == "2.0"
    assert not [text for text in said(image) if "not locked" in text]
    copy = shutil.copy(record, tmp_path / "requirements.txt")
    assert not [text for text in said(Image(pip=["skylocked"], lock=str(copy))) if "not locked" in text]
    assert not [text for text in said(Image(pip=["packaging"])) if "not locked" in text]
