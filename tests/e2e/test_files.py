"""`pool.push` and `pool.pull`, and the working directory, with nodes on this computer: hosts take the same path."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.client.files import Pull, Push
from skyward.errors import InvalidArgument, TransferError
from tests.support.listener import Listener

NODES = 2


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sky.ComputePool]:
    """A pool whose program works in a directory of its own."""
    before, work = Path.cwd(), tmp_path_factory.mktemp("work")
    os.chdir(work)
    try:
        with sky.ComputePool(nodes=NODES, console=False) as opened:
            yield opened
    finally:
        os.chdir(before)


@pytest.fixture
def there(pool: sky.ComputePool) -> Path:
    """The working directory of the nodes."""
    return Path.cwd()


@sky.compute
def where() -> str:
    return os.getcwd()


@sky.compute
def text_of(path: str) -> str:
    with open(path) as file:
        return file.read()


@sky.compute
def grow(path: str) -> None:
    """Writes until there is a file that says to stop."""
    end = time.monotonic() + 120
    with open(path, "ab", buffering=0) as file:
        while not os.path.exists(f"{path}.stop") and time.monotonic() < end:
            file.write(b"x" * 1000)
            time.sleep(0.001)


def tree(folder: Path) -> dict[str, Any]:
    """Everything below a folder: contents, targets of links, modes."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = oct(stat.S_IMODE(path.stat().st_mode))
        else:
            found[name] = (path.read_bytes(), oct(stat.S_IMODE(path.stat().st_mode)), path.stat().st_mtime_ns)
    return found


ODD = (" spaces and\nlines ", "-rf", "名前", "a'b\"c", "x" * 200, "*", "$HOME", "\\")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all that a folder can have."""
    made = tmp_path / "data"
    (made / "sub" / "deep").mkdir(parents=True)
    (made / "empty folder").mkdir()
    (made / "closed").mkdir(mode=0o750)
    (made / "x.csv").write_text("1,2,3\n")
    (made / "empty").touch()
    (made / "run.sh").write_text("#!/bin/sh\n")
    (made / "run.sh").chmod(0o755)
    (made / "sub" / "private").write_bytes(os.urandom(1000))
    (made / "sub" / "private").chmod(0o400)
    (made / "large").write_bytes(os.urandom((9 << 20) + 17))
    for name in ODD:
        (made / "sub" / name).write_text(name)
    Path(os.fsdecode(os.fsencode(made / "sub") + b"/\xff\xfe")).write_text("no text is called so")
    (made / "sub" / "up").symlink_to("../x.csv")
    (made / "latest").symlink_to("sub/deep")
    return made


def test_a_folder_arrives_as_it_is_and_comes_back_as_it_was(
    pool: sky.ComputePool, there: Path, folder: Path, tmp_path: Path
) -> None:
    done = pool.push(folder, "in/data")
    assert (done.files, done.unchanged, done.left_out) == (5 + len(ODD) + 1, 0, ())
    assert tree(there / "in" / "data") == tree(folder)
    back = pool.pull("in/data", tmp_path / "back", node=1)
    assert (back.files, back.bytes) == (done.files, done.bytes)
    assert tree(tmp_path / "back") == tree(folder)


def test_only_what_has_changed_is_copied(pool: sky.ComputePool, there: Path, folder: Path, tmp_path: Path) -> None:
    first = pool.push(folder, "changing")
    pool.pull("changing", tmp_path / "copy", node=0)
    assert pool.push(folder, "changing").files == 0
    assert pool.pull("changing", tmp_path / "copy", node=0).files == 0
    (folder / "x.csv").write_text("4,5,6\n")
    (folder / "run.sh").chmod(0o700)
    again = pool.push(folder, "changing")
    assert (again.files, again.bytes, again.unchanged) == (1, 6, first.files - 1)
    assert tree(there / "changing") == tree(folder)
    assert pool.pull("changing", tmp_path / "copy", node=0).files == 1
    assert tree(tmp_path / "copy") == tree(folder)


def test_all_nodes_are_pulled_from_into_a_folder_for_each(pool: sky.ComputePool, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("one file")
    pool.push(tmp_path / "x", "several/x")
    done = pool.pull("several", tmp_path / "all")
    assert done.files == NODES
    assert [(tmp_path / "all" / f"node-{n}" / "x").read_text() for n in range(NODES)] == ["one file"] * NODES
    pool.pull("several/x", tmp_path / "files")
    assert (tmp_path / "files" / "node-1" / "x").read_text() == "one file"


def test_a_pull_leaves_out_and_names_nodes_that_are_lost(
    pool: sky.ComputePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("one file")
    pool.push(tmp_path / "x", "several/x")
    monkeypatch.setattr(pool._engine._core.nodes.all[1], "gone", "no answer")
    done = pool.pull("several", tmp_path / "all")
    assert (done.files, done.left_out) == (1, ("node 1, which is lost: pull again when it is back",))
    assert (tmp_path / "all" / "node-0" / "x").read_text() == "one file"
    with pytest.raises(TransferError, match=r"'several' on node 1: the node is lost \(no answer\)"):
        pool.pull("several", tmp_path / "one", node=1)


def test_a_file_gets_the_name_that_is_given_or_goes_into_a_folder(
    pool: sky.ComputePool, there: Path, tmp_path: Path
) -> None:
    (tmp_path / "x").write_text("one file")
    pool.push(tmp_path / "x", "named/y")
    assert (there / "named" / "y").read_text() == "one file"
    pool.push(tmp_path / "x", "named")
    pool.push(tmp_path / "x", "into/")
    pool.push(tmp_path / "x")
    for name in ("named/x", "into/x", "x"):
        assert (there / name).read_text() == "one file"
    pool.pull("x", tmp_path / "z", node=0)
    assert (tmp_path / "z").read_text() == "one file"
    (tmp_path / "folder").mkdir()
    pool.pull("x", tmp_path / "folder", node=0)
    assert (tmp_path / "folder" / "x").read_text() == "one file"
    assert (text_of("named/y") >> pool) == "one file"


def test_bodies_start_where_relative_paths_lead(pool: sky.ComputePool, there: Path) -> None:
    assert where() @ pool == [str(there)] * NODES


def test_links_that_lead_out_and_what_is_no_file_are_left_out_and_named(
    pool: sky.ComputePool, there: Path, tmp_path: Path
) -> None:
    made = tmp_path / "odd"
    (made / "sub").mkdir(parents=True)
    (made / "file").write_text("file")
    outside = tmp_path / "outside"
    outside.write_text("not sent")
    (made / "out").symlink_to(outside)
    (made / "sub" / "up").symlink_to("../../else")
    (made / "sub" / "round").symlink_to("../sub/../../else")
    os.mkfifo(made / "pipe")
    listening = socket.socket(socket.AF_UNIX)
    os.chdir(made)
    listening.bind("socket")
    os.chdir(there)
    listening.close()
    listener = Listener(pool)
    done = pool.push(made, "odd")
    assert sorted(text.split(" ")[0] for text in done.left_out) == ["out", "pipe", "socket", "sub/round", "sub/up"]
    assert sorted(tree(there / "odd")) == ["file", "sub"]
    pool._user.listeners.flush()
    assert f"leaves out: out (a link that leads out of the folder, to {outside})" in listener.notices()
    (there / "odd" / "out").symlink_to(outside)
    assert pool.pull("odd", tmp_path / "back", node=0).left_out[0].startswith("out (a link")
    assert sorted(tree(tmp_path / "back")) == ["file", "sub"]


def test_nothing_is_written_through_a_link_that_lies_in_the_way(
    pool: sky.ComputePool, there: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (there / "way").mkdir()
    (there / "way" / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TransferError, match="something other than a folder is there"):
        pool.push(folder, "way")
    pool.push(folder, "good")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TransferError, match="something other than a folder is there"):
        pool.pull("good", tmp_path / "here", node=0)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_half_a_file_is_never_seen_and_the_rest_follows(pool: sky.ComputePool, there: Path, tmp_path: Path) -> None:
    """What was written before an attempt ended is not sent again."""
    source = tmp_path / "big"
    source.write_bytes(os.urandom(40 << 20))  # more than may be under way
    settled, real = 0, Push._settle

    def stopped(self: Push) -> None:
        nonlocal settled
        real(self)
        settled += 1
        if settled == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Push, "_settle", stopped)
        with pytest.raises(KeyboardInterrupt):
            pool.push(source, "halves/big")
    assert not (there / "halves" / "big").exists()
    done = pool.push(source, "halves/big")
    assert 8 << 20 <= done.bytes <= 32 << 20
    assert (there / "halves" / "big").read_bytes() == source.read_bytes()
    assert [path.name for path in (there / "halves").iterdir()] == ["big"]


@contextmanager
def growing(copying: type[Push] | type[Pull], path: Path) -> Iterator[None]:
    """Appends to a file as soon as the first piece of it has been copied, whatever else the machine does."""
    real = copying._settle

    def settle(self: Any, *args: Any) -> None:
        real(self, *args)
        with path.open("ab") as file:
            file.write(b"more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_settle", settle)
        yield


def test_a_file_that_changes_while_it_is_pushed_is_said_and_not_put_in_place(
    pool: sky.ComputePool, there: Path, tmp_path: Path
) -> None:
    source = tmp_path / "log"
    source.write_bytes(b"x" * (40 << 20))  # more than may be under way
    with growing(Push, source), pytest.raises(TransferError, match="changed while it was read"):
        pool.push(source, "growing")
    assert not (there / "growing").exists()
    pool.push(source, "growing")
    assert (there / "growing").stat().st_size == source.stat().st_size


def test_a_file_that_grows_while_it_is_pulled_comes_as_it_was_listed_and_is_said(
    pool: sky.ComputePool, there: Path, tmp_path: Path
) -> None:
    source, listener = there / "growing.log", Listener(pool)
    source.write_bytes(b"y" * (20 << 20))  # more than may be under way
    with growing(Pull, source):
        pool.pull("growing.log", tmp_path / "log", node=0)
    assert (tmp_path / "log").stat().st_size == 20 << 20
    pool._user.listeners.flush()
    assert "growing.log changed while it was read" in listener.notices()
    assert pool.pull("growing.log", tmp_path / "log", node=0).files == 1
    assert (tmp_path / "log").read_bytes() == source.read_bytes()


def test_files_are_copied_while_all_slots_are_busy(pool: sky.ComputePool, there: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("now")
    busy = [grow(f"busy-{n}") > pool for n in range(NODES)]
    pool.push(tmp_path / "x", "while-busy")
    pool.pull("while-busy", tmp_path / "y", node=0)
    assert not any(future.done() for future in busy)
    assert (tmp_path / "y").read_text() == "now"
    for n, future in enumerate(busy):
        (there / f"busy-{n}.stop").touch()
        future.result(60)


def test_what_is_wrong_is_said_with_the_path_and_the_node(pool: sky.ComputePool, there: Path, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=r"nowhere' on node 0: no such file or directory"):
        pool.pull("nowhere", tmp_path / "x", node=0)
    with pytest.raises(TransferError, match=r"missing' on this computer: no such file or directory"):
        pool.push(tmp_path / "missing", "x")
    with pytest.raises(InvalidArgument, match="nodes 0 to 1"):
        pool.pull("x", tmp_path / "x", node=2)
    (there / "taken").mkdir(exist_ok=True)
    (there / "taken" / "x").mkdir()
    (tmp_path / "x").write_text("x")
    with pytest.raises(TransferError, match=r"'x' on node 0: is a directory"):
        pool.push(tmp_path, "taken")
    assert list((there / "taken" / "x").iterdir()) == []


def test_progress_is_shown_in_megabytes_unless_it_is_not_wanted(pool: sky.ComputePool, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(9_000_000))
    listener = Listener(pool)
    pool.push(tmp_path / "big", "shown")
    pool.pull("shown", tmp_path / "back", node=0, progress=False)
    pool._user.listeners.flush()
    shown = listener.of(events.GroupProgress)
    assert {event.name for event in shown} == {"push big (MB)"}
    assert (shown[-1].done, shown[-1].total) == (9, 9)


def test_nothing_of_what_was_copied_stays_in_memory(pool: sky.ComputePool, tmp_path: Path) -> None:
    before = set(os.listdir(pool._store.directory))
    (tmp_path / "big").write_bytes(os.urandom(20 << 20))
    pool.push(tmp_path / "big", "gone-from-memory")
    assert set(os.listdir(pool._store.directory)) == before


def test_a_closed_pool_copies_nothing(tmp_path: Path) -> None:
    pool = sky.ComputePool(console=False)
    with pytest.raises(sky.errors.PoolClosed):
        pool.push(tmp_path, "x")
    with pytest.raises(sky.errors.PoolClosed):
        pool.pull("x", tmp_path)


def test_large_includes_hint_at_push_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("skyward.setup.hosts._LARGE_INCLUDES", 1 << 20)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_bytes(bytes(2 << 20))
    pool = sky.ComputePool(nodes=2, image=sky.Image(includes=["data"]), console=False)
    listener = Listener(pool)
    with pool:
        pass
    assert listener.notices().count("includes hold 2 MB, which are sent to every machine at every opening.") == 1
    assert "pool.push(local, remote)" in listener.notices()


def test_min_nodes_means_nothing_on_this_computer_and_is_accepted() -> None:
    with sky.ComputePool(nodes=2, min_nodes=1, console=False) as pool:
        assert len(where() @ pool) == 2
