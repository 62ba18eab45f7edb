"""The user's files on their way to a node (SEC-19, SEC-20, fault 53)."""

from __future__ import annotations

import copy
import io
import logging
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from skyward.api.image import Image
from skyward.errors import BootstrapError, InvalidArgument
from skyward.transport import includes
from skyward.transport.includes import import_paths, pack, unpack


def collected(image: Image, root: Path, dest: Path) -> tuple[str, ...]:
    """Packs an image's includes and unpacks them, as goes on over a shell; gives the import paths that they need."""
    with (root.parent / "packed").open("w+b") as archive:
        pack(image, root, archive)
        archive.seek(0)
        unpack(archive, dest)
    return tuple(os.path.normpath(dest / path) for path in import_paths(image, root))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    write(project / "mypkg" / "__init__.py", "from mypkg.inner import answer")
    write(project / "mypkg" / "inner.py", "answer = 42")
    write(project / "mod.py", "name = 'mod'")
    write(project / "src" / "deep" / "__init__.py", "name = 'deep'")
    return project


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def sent(project: Path, *names: str, excludes: tuple[str, ...] = ()) -> set[str]:
    """The files that would be sent."""
    archive = io.BytesIO()
    pack(Image(includes=names, excludes=excludes), project, archive)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        return {member.name for member in tar if member.isreg()}


def hostile(*members: tarfile.TarInfo) -> io.BytesIO:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    archive.seek(0)
    return archive


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
    return member


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["mypkg"], "import mypkg; assert mypkg.answer == 42"),
        (["mod.py"], "import mod; assert mod.name == 'mod'"),
        (["./mypkg/", "mod.py"], "import mypkg, mod"),
        (["src/deep"], "import deep; assert deep.name == 'deep'"),
        (["src"], "import deep"),
        (["."], "import mypkg, mod"),
    ],
)
def test_includes_are_importable_by_their_names(root: Path, tmp_path: Path, names: list[str], code: str) -> None:
    paths = collected(Image(includes=names), root, tmp_path / "dest")
    assert paths[0] == str(tmp_path / "dest")
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", code], env=variables, cwd=tmp_path, check=True)


def test_without_includes_there_is_nothing_to_import_from(root: Path) -> None:
    assert import_paths(Image(), root) == ()


def test_only_the_owner_can_read_the_copy(root: Path, tmp_path: Path) -> None:
    """SEC-21, and no setuid bit arrives (SEC-19)."""
    (root / "mod.py").chmod(0o4777)
    collected(Image(includes=["mod.py", "mypkg"]), root, tmp_path / "dest")
    assert stat.S_IMODE((tmp_path / "dest").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "dest" / "mod.py").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "dest" / "mypkg" / "inner.py").stat().st_mode) == 0o600


def test_a_missing_path_is_refused_and_near_ones_listed(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"'mypgk'.*near ones: mypkg"):
        collected(Image(includes=["mypgk"]), root, tmp_path / "dest")
    with pytest.raises(InvalidArgument, match="does not exist"):
        collected(Image(includes=["no/such/thing"]), root, tmp_path / "dest")
    assert not (tmp_path / "dest").exists()


def test_noise_and_secrets_stay_at_home(root: Path) -> None:
    """SEC-20."""
    for decoy in (
        "mypkg/.git/config",
        "mypkg/.venv/lib/x.py",
        "mypkg/odd_env/pyvenv.cfg",
        "mypkg/odd_env/lib/y.py",
        "mypkg/__pycache__/inner.cpython-311.pyc",
        "mypkg/.mypy_cache/x",
        "mypkg/.env",
        "mypkg/.env.local",
        "mypkg/server.pem",
        "mypkg/id_ed25519",
        "mypkg/id_rsa.pub",
        "mypkg/.aws/credentials",
        "mypkg/.config/gcloud/x",
        "mypkg/.ssh/known_hosts",
        "mypkg/.netrc",
    ):
        write(root / decoy)
    write(root / "mypkg" / "id_map.py")
    assert sent(root, "mypkg") == {"mypkg/__init__.py", "mypkg/inner.py", "mypkg/id_map.py"}
    with pytest.raises(InvalidArgument, match="left out"):
        sent(root, "mypkg/.env")
    with pytest.raises(InvalidArgument, match="left out"):
        sent(root, "mypkg/.git")


def test_what_looks_like_a_secret_is_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SEC-20: a warning lists it."""
    write(root / "mypkg" / "credentials.json")
    write(root / "mypkg" / "tokenizer.json")
    with caplog.at_level(logging.WARNING, logger="skyward.includes"):
        sent(root, "mypkg")
    assert "mypkg/credentials.json" in caplog.text
    assert "tokenizer" not in caplog.text


@pytest.mark.parametrize("pattern", ["data", "data/", "*.csv", "mypkg/data/*", "mypkg/data"])
def test_excludes_are_names_patterns_or_paths(root: Path, pattern: str) -> None:
    write(root / "mypkg" / "data" / "big.csv")
    assert sent(root, "mypkg", excludes=(pattern,)) == {"mypkg/__init__.py", "mypkg/inner.py"}


def test_a_link_out_of_the_project_is_refused(root: Path, tmp_path: Path) -> None:
    """SEC-19."""
    outside = write(tmp_path / "outside" / "secret.txt", "canary")
    for target in (outside, outside.parent):
        link = root / "mypkg" / "link"
        link.symlink_to(target)
        with pytest.raises(InvalidArgument, match="outside the project"):
            sent(root, "mypkg")
        assert sent(root, "mypkg", excludes=("link",))
        link.unlink()
    (root / "whole").symlink_to(outside.parent)
    with pytest.raises(InvalidArgument, match="outside the project"):
        sent(root, "whole")


def test_a_link_inside_the_project_becomes_what_it_shows(root: Path) -> None:
    write(root / "shared" / "table.txt")
    (root / "mypkg" / "table.txt").symlink_to("../shared/table.txt")
    (root / "mypkg" / "shared").symlink_to("../shared")
    assert {"mypkg/table.txt", "mypkg/shared/table.txt"} <= sent(root, "mypkg")


def test_a_link_does_not_smuggle_out_what_is_left_out(root: Path) -> None:
    """SEC-20."""
    write(root / ".env", "canary")
    (root / "mypkg" / "settings.txt").symlink_to("../.env")
    assert "mypkg/settings.txt" not in sent(root, "mypkg")


def test_circles_depths_pipes_and_dead_links_are_refused(root: Path) -> None:
    """SEC-19."""
    (root / "circle" / "a").mkdir(parents=True)
    (root / "circle" / "a" / "back").symlink_to("..")
    (root / "deep").joinpath(*"d" * 100).mkdir(parents=True)
    (root / "piped").mkdir()
    os.mkfifo(root / "piped" / "fifo")
    (root / "dead").symlink_to("nowhere")
    for name, words in (("circle", "circle"), ("deep", "too deep"), ("piped", "neither"), ("dead", "neither")):
        with pytest.raises(InvalidArgument, match=words):
            sent(root, name)


def test_odd_names_and_hard_links_arrive(root: Path, tmp_path: Path) -> None:
    """SEC-19."""
    odd = ["two\nlines", "$(touch pwned)", "ünï cödé", "-rf", "quote'\"", "a" * 200]
    for name in odd:
        write(root / "odd" / name, name)
    os.link(root / "mod.py", root / "odd" / "hard.py")
    collected(Image(includes=["odd", "odd/-rf"]), root, tmp_path / "dest")
    assert {path.name for path in (tmp_path / "dest" / "odd").iterdir()} == {*odd, "hard.py"}
    assert all((tmp_path / "dest" / "odd" / name).read_text() == name for name in odd)


def test_too_much_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-19."""
    monkeypatch.setattr(includes, "MAX_BYTES", 1000)
    write(root / "mypkg" / "big.bin", "x" * 2000)
    with pytest.raises(InvalidArgument, match=r"big\.bin"):
        sent(root, "mypkg")
    monkeypatch.setattr(includes, "MAX_BYTES", 10_000)
    monkeypatch.setattr(includes, "MAX_FILES", 2)
    with pytest.raises(InvalidArgument, match="2 files"):
        sent(root, "mypkg")


@pytest.mark.parametrize(
    "member",
    [
        entry("../out"),
        entry("a/../../out"),
        entry("{}/out"),
        entry("link", tarfile.SYMTYPE, "{}/out"),
        entry("hard", tarfile.LNKTYPE, "../out"),
        entry("fifo", tarfile.FIFOTYPE),
        entry("device", tarfile.CHRTYPE),
    ],
)
def test_a_hostile_archive_writes_nothing(tmp_path: Path, member: tarfile.TarInfo) -> None:
    """SEC-19, at the receiving side."""
    member = copy.copy(member)
    member.name, member.linkname = (text.replace("{}", str(tmp_path)) for text in (member.name, member.linkname))
    with pytest.raises(BootstrapError, match="not a plain file"):
        unpack(hostile(entry("good"), member), tmp_path / "inside" / "dest")
    assert list((tmp_path / "inside").iterdir()) == []
    assert not (tmp_path / "out").exists()


def test_an_archive_that_is_too_large_or_broken_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-19, fault 53: partial is never used."""
    monkeypatch.setattr(includes, "MAX_FILES", 2)
    with pytest.raises(BootstrapError, match="more than"):
        unpack(hostile(*(entry(f"f{i}") for i in range(5))), tmp_path / "dest")
    whole = hostile(entry("a"), entry("b")).getvalue()
    for length in (0, 100, 512, 1000, 1024, 1100, 1536, 2000, 2048, 2100):
        with pytest.raises(BootstrapError):
            unpack(io.BytesIO(whole[:length]), tmp_path / "dest")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_not_filled(tmp_path: Path) -> None:
    write(tmp_path / "dest" / "mine.txt")
    with pytest.raises(BootstrapError, match="new or empty"):
        unpack(hostile(entry("a")), tmp_path / "dest")
    assert [path.name for path in tmp_path.iterdir()] == ["dest"]
