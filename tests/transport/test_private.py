"""Directories for this user alone: at every level, whatever the umask, and whatever others have planted (SEC-21)."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.machines.ledger import Ledger, Record, histories, in_use, line, read
from skyward.setup.env.uv import cache_root, own_directory
from skyward.setup.ssh.connection import private_directory
from skyward.transport import blobs, private

STRANGER = 65533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=lambda mask: f"umask {mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with our own above it, whatever the umask of a test is."""
    made = tmp_path / "place"
    made.mkdir(mode=0o755)
    made.chmod(0o755)
    return made


def modes(top: Path) -> dict[str, str]:
    found = {str(path.relative_to(top)): path for path in [*top.rglob("*")] if path.is_dir()}
    return {name: f"{stat.S_IMODE(path.lstat().st_mode):o}" for name, path in found.items()}


def test_every_level_that_is_made_is_for_this_user_alone(place: Path, umask: int) -> None:
    """SEC-21."""
    made = private.make(place / "a" / "b", "c", "d")
    assert made == place / "a" / "b" / "c" / "d"
    assert modes(place) == {"a": "700", "a/b": "700", "a/b/c": "700", "a/b/c/d": "700"}


def test_state_and_cache_are_private_at_every_level(place: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-21: the attack that worked: with umask 000 `skyward` itself was open to everybody."""
    monkeypatch.delenv("SKYWARD_STATE", raising=False)
    monkeypatch.delenv("SKYWARD_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    ledger = Ledger.start("p", {"provider": "AWS"})
    own_directory(cache_root(), "envs")
    found = modes(place)
    assert set(found.values()) == {"700"}
    assert {".local/state/skyward", ".local/state/skyward/pools/p", ".cache/skyward/envs"} <= set(found)
    assert stat.S_IMODE((ledger.directory / "ledger").stat().st_mode) & 0o077 == 0
    ledger.remove()


def test_temporary_directories_are_private_and_not_to_be_guessed(umask: int) -> None:
    """SEC-21."""
    for make in (private_directory, blobs.make_directory, lambda: private.fresh("skyward-test-")):
        first, second = make(), make()
        try:
            assert first != second
            assert private.is_private(first)
            assert stat.S_IMODE(os.lstat(first).st_mode) == 0o700
        finally:
            shutil.rmtree(first)
            shutil.rmtree(second)


def test_what_older_versions_left_open_is_closed(place: Path) -> None:
    (place / "skyward" / "pools").mkdir(parents=True)
    (place / "skyward").chmod(0o755)
    private.make(place / "skyward", "pools")
    assert modes(place) == {"skyward": "700", "skyward/pools": "700"}
    # a directory that the user has named may serve other things, too
    (place / "shared").mkdir(mode=0o755)
    private.make(place / "shared", "pools")
    assert modes(place)["shared"] == "755"
    assert modes(place)["shared/pools"] == "700"


@pytest.mark.parametrize("level", ["", "a", "a/b"])
def test_a_level_that_others_can_write_to_is_refused(place: Path, level: str) -> None:
    """SEC-21."""
    (place / "a" / "b").mkdir(parents=True)
    (place / level).chmod(0o777)
    with pytest.raises(private.NotPrivate, match="others can write into"):
        private.make(place / "a" / "b")
    with pytest.raises(private.NotPrivate, match="others can write into"):
        private.check(place / "a" / "b")
    if level != "a/b":
        (place / level).chmod(0o1777)  # as /tmp
        assert private.make(place / "a" / "b", "c").is_dir()


def test_what_nobody_else_reaches_may_be_open_but_belongs_to_nobody_else(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-21: the volumes of a pod belong to root, and their mode is 2777."""
    for name in ("volume", "volumes"):
        (place / name).mkdir()
        (place / name).chmod(0o2777)
    monkeypatch.setenv("SKYWARD_OWN", f"/home/skyward {place / 'volume'}")
    assert private.make(place / "volume" / "below").is_dir()
    assert Path(private.fresh("skyward-", str(place / "volume"))).parent == place / "volume"
    with pytest.raises(private.NotPrivate, match="others can write into"):
        private.make(place / "volumes" / "below")
    if os.geteuid() == 0:
        os.chown(place / "volume", 65533, -1)
        with pytest.raises(private.NotPrivate, match="belongs to another user"):
            private.make(place / "volume" / "below")


def test_a_group_of_others_counts_as_others(place: Path) -> None:
    below = place / "a"
    below.mkdir()
    try:
        os.chown(place, -1, 65533)
    except PermissionError:
        pytest.skip("only root can give a directory to another group")
    place.chmod(0o775)
    with pytest.raises(private.NotPrivate, match="others can write into"):
        private.make(below)
    os.chown(place, -1, 0)
    private.make(below)


def test_links_of_our_own_are_followed_and_circles_are_not(place: Path) -> None:
    (place / "disk").mkdir()
    (place / "link").symlink_to("disk")
    assert private.make(place / "link" / "x") == place / "disk" / "x"
    (place / "up").symlink_to("../place/disk")
    assert private.make(place / "up" / "x") == place / "disk" / "x"
    (place / "circle").symlink_to("circle")
    with pytest.raises(private.NotPrivate):
        private.make(place / "circle" / "x")
    (place / "file").touch()
    with pytest.raises(private.NotPrivate, match="is not a directory"):
        private.make(place / "file" / "x")


@as_root
@pytest.mark.parametrize("plant", ["directory", "link", "parent"])
def test_what_another_user_has_planted_is_refused(place: Path, plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-21: in a shared directory, under the name that we would use."""
    place.chmod(0o1777)
    (own := place.parent / "own").mkdir()
    target = place / "skyward"
    if plant == "link":
        target.symlink_to(own)
        os.chown(target, STRANGER, STRANGER, follow_symlinks=False)
    else:
        target.mkdir(mode=0o755)
        os.chown(target, STRANGER, STRANGER)
    root = target / "deeper" if plant == "parent" else target
    monkeypatch.setenv("SKYWARD_STATE", str(root))
    monkeypatch.setenv("SKYWARD_CACHE", str(root))
    from skyward.errors import BootstrapError, SkywardError

    with pytest.raises(SkywardError, match=r"belongs to another user.*SKYWARD_STATE"):
        Ledger.start("p", {})
    for look in (lambda: list(histories()), lambda: read("p"), lambda: Ledger.resume("p")):
        with pytest.raises(SkywardError, match="SKYWARD_STATE"):
            look()
    with pytest.raises(BootstrapError, match=r"belongs to another user.*SKYWARD_CACHE"):
        own_directory(cache_root(), "envs")
    assert list(own.iterdir()) == []
    assert plant == "link" or list(target.iterdir()) == []


@as_root
def test_a_forged_ledger_in_an_open_directory_is_not_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-21: as an earlier version made it under umask 000, and another user found it."""
    from skyward.errors import SkywardError

    state = place / "state"
    monkeypatch.setenv("SKYWARD_STATE", str(state))
    Ledger.start("real", {"provider": "AWS"}).let_go()
    state.chmod(0o777)
    (state / "pools").chmod(0o777)
    forged = line(Record("open", data={"provider": "AWS", "endpoint_url": "http://127.0.0.1:1"}))
    for above in (place, *place.parents):
        if above.is_relative_to("/tmp") and above != Path("/tmp"):
            above.chmod(above.stat().st_mode | 0o711)
    plant = ["sh", "-c", 'umask 000; mkdir "$1" && cat > "$1/ledger"', "sh", str(state / "pools" / "forged")]
    subprocess.run(plant, input=forged, user=STRANGER, group=STRANGER, extra_groups=[], check=True)
    assert (state / "pools" / "forged" / "ledger").exists()  # the attack as such works
    for look in (lambda: list(histories()), lambda: read("forged"), lambda: Ledger.resume("forged")):
        with pytest.raises(SkywardError, match=r"others can write into.*chmod -R go-rwx"):
            look()
    # closed, as the message says: what the other user owns is still not believed
    subprocess.run(["chmod", "-R", "go-rwx", str(state)], check=True)
    assert [history.pool for history in histories()] == ["real"]


def test_no_link_or_pipe_in_the_place_of_a_ledger_is_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-21."""
    monkeypatch.setenv("SKYWARD_STATE", str(place / "state"))
    Ledger.start("real", {"provider": "AWS"}).let_go()
    pools = place / "state" / "pools"
    for name in ("link", "pipe", "directory", "open"):
        (pools / name).mkdir(mode=0o700)
    (pools / "link" / "ledger").symlink_to(pools / "real" / "ledger")
    os.mkfifo(pools / "pipe" / "ledger")
    (pools / "directory" / "ledger").mkdir()
    shutil.copy(pools / "real" / "ledger", pools / "open" / "ledger")
    (pools / "open" / "ledger").chmod(0o666)
    assert [history.pool for history in histories()] == ["real"]
    assert not in_use("link")
    assert not in_use("pipe")


def test_a_full_disk_of_memory_leads_to_a_name_that_nobody_can_guess(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-21: others see the name of our directory in /dev/shm, and may have made one like it where we go next."""
    import errno

    memory, disk = place / "shm" / "skyward-1-x", place / "tmp"
    memory.mkdir(parents=True, mode=0o700)
    disk.mkdir()
    (disk / memory.name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    plain = blobs._made_in

    def full(directory: str, *rest: object) -> object:
        if directory == str(memory):
            raise OSError(errno.ENOSPC, "full")
        return plain(directory, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(blobs, "_made_in", full)
    path, _ = blobs.write(str(memory), b"x")
    assert list((disk / memory.name).iterdir()) == []
    assert private.is_private(os.path.dirname(path))
    blobs.remove_directory(str(memory))
    assert [entry.name for entry in disk.iterdir()] == [memory.name]


def test_a_place_for_temporary_files_that_others_can_change_is_passed_over(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SEC-21: as /dev/shm is in some containers: open to all, and not sticky."""
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    (place / "fit").mkdir()
    made = private.fresh("skyward-", str(place / "open"), str(place / "fit"))
    assert Path(made).parent == place / "fit"
    assert "others can write into" in caplog.text
    with pytest.raises(private.NotPrivate, match="Set TMPDIR"):
        private.fresh("skyward-", str(place / "open"), str(place / "nowhere"))
    assert list((place / "open").iterdir()) == []
