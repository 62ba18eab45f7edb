"""Large buffers as files: written once, mapped where they are used, gone afterwards."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.errors import PoolClosed
from skyward.transport import blobs
from skyward.transport.blobs import Store, read, remove, write
from tests.support.forked import run_forked
from tests.support.waiting import until


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(limit=1000)
    yield made
    made.close()


def files(store: Store) -> list[str]:
    """The blobs of a store."""
    return sorted(name for name in os.listdir(store.directory) if name != "lock")


def test_a_blob_comes_back_equal_and_private(tmp_path: Path) -> None:
    blob = write(str(tmp_path), b"content" * 1000)
    assert stat.S_IMODE(os.stat(blob[0]).st_mode) == 0o600
    view = read(blob)
    assert bytes(view) == b"content" * 1000
    view[0:1] = b"X"
    assert bytes(read(blob))[:3] == b"con"


def test_an_empty_blob_is_read_as_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert bytes(blobs.read((str(path), 0))) == b""


def test_a_reader_may_remove_what_it_reads(tmp_path: Path) -> None:
    blob = write(str(tmp_path), b"once")
    view = read(list(blob), unlink=True)
    assert not os.path.exists(blob[0])
    assert bytes(view) == b"once"


def test_removing_what_is_gone_is_no_error(tmp_path: Path) -> None:
    blob = write(str(tmp_path), b"x")
    remove([blob[0], blob[0], str(tmp_path / "never")])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """Names of results are random, those of arguments say the content: one that exists already is somebody else's."""
    write(str(tmp_path), b"x", "name")
    with pytest.raises(FileExistsError):
        write(str(tmp_path), b"y", "name")
    os.symlink("name", tmp_path / "link")
    with pytest.raises(OSError):
        write(str(tmp_path), b"y", "link")
    assert (tmp_path / "name").read_bytes() == b"x"


def test_a_full_memory_file_system_spills_to_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory, disk = tmp_path / "shm" / "skyward-x", tmp_path / "tmp"
    memory.mkdir(parents=True)
    disk.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    plain_write = os.write

    def full(fd: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(memory)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain_write(fd, data)

    monkeypatch.setattr(blobs.os, "write", full)
    blob = write(str(memory), b"content")
    spill = Path(blob[0]).parent
    assert spill.parent == disk
    assert spill.name.startswith("skyward-x-")  # and what nobody can guess
    assert bytes(read(blob)) == b"content"
    assert Path(write(str(memory), b"more")[0]).parent == spill
    assert [path.is_symlink() for path in memory.iterdir()] == [True]
    assert stat.S_IMODE(spill.stat().st_mode) == 0o700
    blobs.remove_directory(str(memory))
    assert list(disk.iterdir()) == []


def full_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *full: str) -> dict[str, Path]:
    """A memory file system and two disks, some of which have no room."""
    places = {name: tmp_path / name for name in ("shm", "tmp", "var")}
    for place in places.values():
        place.mkdir(exist_ok=True)
    (places["shm"] / "skyward-x").mkdir(mode=0o700)
    monkeypatch.setattr(blobs, "_DISKS", (str(places["tmp"]), str(places["var"])))
    monkeypatch.setattr("tempfile.tempdir", str(places["tmp"]))

    def refusing(plain: Any) -> Any:
        def act(fd: int, *args: Any) -> Any:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(tuple(f"{places[name]}/" for name in full)):
                raise OSError(errno.ENOSPC, "No space left on device")
            return plain(fd, *args)

        return act

    monkeypatch.setattr(blobs.os, "write", refusing(os.write))
    monkeypatch.setattr(blobs.os, "pwrite", refusing(os.pwrite))
    return places


def test_a_disk_that_is_full_too_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = full_places(monkeypatch, tmp_path, "shm", "tmp")
    memory = str(places["shm"] / "skyward-x")
    for _ in range(2):
        blob = write(memory, b"content")
        assert places["var"] in Path(blob[0]).parents
        assert bytes(read(blob)) == b"content"
    assert len(blobs.directories(memory)) == 3
    blobs.remove_directory(memory)
    assert [list(place.iterdir()) for place in places.values()] == [[], [], []]


def test_what_comes_in_pieces_continues_on_a_disk_that_has_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    incoming = blobs.Incoming(str(tmp_path / "shm" / "skyward-x"), ".part")
    with monkeypatch.context() as patched:
        places = full_places(patched, tmp_path)
        incoming.write("name", 0, b"begin ")
        assert places["shm"] in Path(incoming.path("name")).parents
    (places["shm"] / "skyward-x").rename(places["shm"] / "kept")
    full_places(monkeypatch, tmp_path, "shm", "tmp")
    (places["shm"] / "kept" / "name.part").rename(places["shm"] / "skyward-x" / "name.part")
    incoming.write("name", 6, b"and end")
    assert places["var"] in Path(incoming.path("name")).parents
    assert Path(incoming.path("name")).read_bytes() == b"begin and end"
    assert list((places["shm"] / "skyward-x").glob("*.part")) == []


def test_what_is_larger_than_the_room_in_memory_goes_to_a_disk_from_its_first_piece(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The loop that takes the pieces would stand still while gigabytes of them moved later."""
    places = full_places(monkeypatch, tmp_path)
    memory = places["shm"] / "skyward-x"
    plain = os.statvfs

    def statvfs(path: Any) -> Any:
        small = SimpleNamespace(f_blocks=100, f_bavail=10, f_frsize=1)
        return small if Path(path) == memory else plain(path)

    monkeypatch.setattr(blobs.os, "statvfs", statvfs)
    incoming = blobs.Incoming(str(memory), ".part")
    incoming.write("small", 0, b"begin ", 10)
    incoming.write("large", 0, b"begin ", 11)
    assert (memory / "small.part").exists()
    assert places["tmp"] in Path(incoming.path("large")).parents
    incoming.write("large", 6, b"e end", 11)
    assert Path(incoming.path("large")).read_bytes() == b"begin e end"
    incoming.write("large", 0, b"again", 5)  # of the attempt before, nothing stays
    assert sorted(path.name for path in tmp_path.rglob("*.part")) == ["large.part", "small.part"]
    incoming.write("huge", 0, b"begin ", 1 << 60)  # larger than every place: it is tried
    assert (memory / "huge.part").exists()


def test_a_piece_of_a_file_that_somebody_has_removed_is_an_error_and_makes_no_file_with_zeros(tmp_path: Path) -> None:
    incoming = blobs.Incoming(str(tmp_path))
    incoming.write("name", 0, b"begin ")
    (tmp_path / "name").unlink()
    with pytest.raises(FileNotFoundError):
        incoming.write("name", 6, b"and end")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_cut_before_it_moves_to_a_disk_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = full_places(monkeypatch, tmp_path, "shm")
    part = places["shm"] / "skyward-x" / "name"
    part.write_bytes(b"beg")
    with pytest.raises(OSError, match="3 bytes instead of 6"):
        blobs.Incoming(str(part.parent)).write("name", 6, b"and end")
    assert [path.name for path in places["tmp"].rglob("*") if path.is_file()] == []


def test_no_room_anywhere_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = full_places(monkeypatch, tmp_path, "shm", "tmp", "var")
    memory = str(places["shm"] / "skyward-x")
    with pytest.raises(OSError, match="No space left"):
        write(memory, b"content")
    with pytest.raises(OSError, match="No space left"):
        blobs.Incoming(memory).write("name", 0, b"content")
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size] == []


def test_other_errors_of_the_disk_are_raised_and_leave_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(fd: int, data: Any) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(blobs.os, "write", broken)
    with pytest.raises(OSError, match="broken"):
        write(str(tmp_path), b"x")
    assert list(tmp_path.iterdir()) == []


def test_the_same_content_is_written_once(store: Store) -> None:
    first, blob = store.put(b"a" * 100)
    second, again = store.put(bytearray(b"a" * 100))
    assert (first, blob) == (second, again)
    assert len(files(store)) == 1
    assert store.put(b"b" * 100)[0] != first
    assert stat.S_IMODE(os.stat(store.directory).st_mode) == 0o700


def test_what_no_call_needs_goes_first_when_room_is_short(store: Store) -> None:
    keep, kept = store.put(b"k" * 400)
    old, _ = store.put(b"o" * 400)
    store.release([old])
    _, new = store.put(b"n" * 400)
    assert files(store) == sorted(os.path.basename(path) for path, _ in (kept, new))
    assert keep in kept[0]
    assert bytes(read(store.put(b"o" * 400)[1])) == b"o" * 400


def test_what_is_in_use_stays_however_short_the_room(store: Store) -> None:
    made = [store.put(bytes([i]) * 400) for i in range(5)]
    assert len(files(store)) == 5
    store.release(digest for digest, _ in made)
    until(lambda: len(files(store)) == 2)


def test_a_blob_stays_until_its_last_use_ends(store: Store) -> None:
    digest, blob = store.put(b"a" * 600)
    store.retain([digest])
    store.put(b"a" * 600)
    for _ in range(2):
        store.release([digest])
        store.put(b"filler" * 100)
        assert os.path.exists(blob[0])
    store.release([digest])
    assert not os.path.exists(blob[0])


def test_releasing_too_often_is_no_error(store: Store) -> None:
    digest, blob = store.put(b"a" * 10)
    store.release([digest, digest, "unknown"])
    assert os.path.exists(blob[0])


def test_closing_removes_everything_and_may_be_repeated() -> None:
    made = Store()
    made.put(b"x" * 100)
    made.close()
    made.close()
    assert not os.path.exists(made.directory)


def test_threads_may_put_the_same_content_at_once() -> None:
    made = Store()
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(made.put(b"same" * 1000)[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len(set(found)) == 1
        assert len(found) == 8
    finally:
        made.close()


def test_the_blobs_of_a_kept_result_have_names_of_their_own_however_many_they_are() -> None:
    key = "ab" * 10
    for attempt in (0, 1, 70_000):
        names = blobs.kept_names(key, attempt, 100_000)
        assert names == sorted(set(names))
        assert {blobs.key_of(name) for name in names} == {key}
    assert blobs.kept_names(key, 7, 1) != blobs.kept_names(key, 8, 1)


def test_a_container_keeps_no_more_than_a_part_of_the_memory_that_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its /dev/shm may be as large as the machine's; what lies there counts as its memory."""
    own = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)
    version = ("", "memory.max") if not own[1] else ("memory", "memory.limit_in_bytes")
    if own[1] and "memory" not in own[1].split(","):
        pytest.skip("this process's control group says nothing of memory")
    folder = tmp_path / version[0] / own[2].lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(blobs, "_CGROUPS", tmp_path)
    for text, most in (("80000000", 10_000_000), ("max", float("inf")), ("8", blobs.LARGE)):
        (folder / version[1]).write_text(text)
        blobs._memory_limit.cache_clear()
        assert blobs.LARGE <= blobs.room(str(tmp_path)) <= most
    blobs._memory_limit.cache_clear()


def test_a_forked_child_removes_nothing_of_its_parents(store: Store) -> None:
    """Workers of multiprocessing unwind frames and collect garbage: what they let go of is a copy."""
    digest, blob = store.put(b"a" * 600)
    filler, other = store.put(b"b" * 600)

    def let_go() -> None:
        store.release([digest, filler])
        store.discard([digest])
        store.close()

    assert run_forked(let_go) == 0
    assert bytes(read(blob)) == b"a" * 600
    assert bytes(read(other)) == b"b" * 600


def held_writes(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Has every file written only after the second event is set; the first says that one is about to be."""
    writing, go_on = threading.Event(), threading.Event()
    plain = blobs.write

    def slow(*args: Any) -> blobs.Blob:
        writing.set()
        assert go_on.wait(60)
        return plain(*args)

    monkeypatch.setattr(blobs, "write", slow)
    return writing, go_on


def test_the_end_of_a_call_does_not_wait_for_what_is_being_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The I/O thread lets go of arguments for every call that ends; a large one takes seconds to write."""
    writing, go_on = held_writes(monkeypatch)
    put: list[tuple[str, blobs.Blob]] = []
    writers = [threading.Thread(target=lambda: put.append(store.put(b"large"))) for _ in range(2)]
    for writer in writers:
        writer.start()
    assert writing.wait(60)
    ends = threading.Thread(target=store.release, args=([],))
    ends.start()
    ends.join(60)
    assert not ends.is_alive()
    assert put == []
    go_on.set()
    for writer in writers:
        writer.join(60)
    assert put[0] == put[1]
    assert len(files(store)) == 1


def test_the_end_of_a_call_does_not_wait_for_what_is_being_hashed_or_removed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing a large file takes as long as giving back its memory."""
    blocked: list[str] = []
    for module, name in ((blobs, "digest"), (blobs, "write"), (os, "unlink"), (shutil, "rmtree")):
        done = getattr(module, name)

        def watched(*args: Any, name: str = name, done: Any = done) -> Any:
            if store._lock.locked():
                blocked.append(name)
            return done(*args)

        monkeypatch.setattr(module, name, watched)
    first, second = store.put(b"a" * 600)[0], store.put(b"b" * 600)[0]
    store.release([first])
    until(lambda: len(files(store)) == 1)
    store.put(b"b" * 600)
    store.discard([second, second])
    assert files(store) == []
    assert blocked == []


def test_what_somebody_else_has_removed_is_written_again(store: Store) -> None:
    """As systemd does with all of a user's files in /dev/shm when the user logs out."""
    name, blob = store.put(b"x" * 100)
    os.unlink(blob[0])
    assert store.put(b"x" * 100) == (name, blob)
    assert bytes(read(blob)) == b"x" * 100
    shutil.rmtree(store.directory)
    assert bytes(read(store.put(b"x" * 100)[1])) == b"x" * 100
    sweep()
    assert os.path.exists(blob[0])


def test_a_directory_that_another_thread_has_made_again_meanwhile_is_used(tmp_path: Path) -> None:
    assert blobs.make_again(str(tmp_path / "a"))
    assert not blobs.make_again(str(tmp_path / "a"))
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_a_directory_that_another_user_has_made_instead_is_not_used(store: Store) -> None:
    """In /dev/shm everybody may make one of that name, once it is gone."""
    os.rename(store.directory, store.directory + "-away")
    try:
        os.mkdir(store.directory)
        os.chmod(store.directory, 0o777)
        with pytest.raises(PermissionError, match="other users can write to the directory"):
            store.put(b"x")
        assert os.listdir(store.directory) == []
        os.rmdir(store.directory)
    finally:
        os.rename(store.directory + "-away", store.directory)


def test_closing_waits_for_what_is_being_written_and_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = held_writes(monkeypatch)
    put: list[tuple[str, blobs.Blob]] = []
    writer = threading.Thread(target=lambda: put.append(store.put(b"large")))
    writer.start()
    assert writing.wait(60)
    closer = threading.Thread(target=store.close)
    closer.start()
    until(lambda: store.closed, 60)
    with pytest.raises(PoolClosed):
        store.put(b"another")
    assert os.path.isdir(store.directory)
    go_on.set()
    for thread in (writer, closer):
        thread.join(60)
    assert [name for name, _ in put] == [blobs.digest(b"large")]
    assert not os.path.exists(store.directory)


def test_a_closed_store_takes_nothing(store: Store) -> None:
    store.close()
    with pytest.raises(PoolClosed):
        store.put(b"x")
    assert not os.path.exists(store.directory)


def test_what_cannot_be_written_is_written_when_it_is_put_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, data: Any) -> int:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(blobs.os, "write", broken)
        with pytest.raises(OSError, match="broken"):
            store.put(b"x" * 10)
    assert files(store) == []
    assert bytes(read(store.put(b"x" * 10)[1])) == b"x" * 10


MADE_ELSEWHERE = "from skyward.transport import blobs; blobs.remove_directory(blobs.make_directory())"
HELD = """
import os, time
from skyward.transport.blobs import Store
store = Store()
if os.fork() == 0:
    print(store.directory, os.getpid(), flush=True)  # only now the child is a process of its own
time.sleep(600)
"""


def sweep() -> None:
    """What every pool does first."""
    blobs.remove_directory(blobs.make_directory())


def test_the_directory_of_a_process_in_another_pid_namespace_stays() -> None:
    """As of containers that share /dev/shm (docker --ipc=host, pods): there our process id means nothing."""
    outside = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*outside, "true"], capture_output=True).returncode:
        pytest.skip("another PID namespace takes root")
    made = Store()
    try:
        _, blob = made.put(b"x" * 100)
        subprocess.run([*outside, sys.executable, "-c", MADE_ELSEWHERE], check=True, timeout=120)
        assert bytes(read(blob)) == b"x" * 100
    finally:
        made.close()


def test_the_directory_of_a_killed_process_is_removed_though_a_child_of_it_lives() -> None:
    with subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        directory, child = program.stdout.readline().split()
        try:
            sweep()
            assert os.path.isdir(directory)
            program.kill()
            program.wait()
            sweep()
            assert not os.path.exists(directory)
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_directory_whose_lock_cannot_be_asked_for_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def opened(path: Any, *args: Any, **more: Any) -> int:
        if Path(path) == Path(store.directory, "lock"):
            raise OSError(errno.EMFILE, "Too many open files")
        return plain(path, *args, **more)

    monkeypatch.setattr(os, "open", opened)
    sweep()
    assert os.path.isdir(store.directory)


def test_a_directory_that_has_no_lock_yet_is_removed_after_a_week_at_the_earliest(tmp_path: Path) -> None:
    """It is being made this moment, or a pool of an older version uses it."""
    young, old, strange = tmp_path / "skyward-1-young", tmp_path / "skyward-1-old", tmp_path / "skyward-x-old"
    for path in (young, old, strange):
        path.mkdir(mode=0o700)
    for path in (old, strange):
        os.utime(path, (time.time() - 8 * 86_400,) * 2)
    blobs._sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == [young, strange]


def test_a_file_system_without_locks_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    made = Store()
    try:
        assert os.listdir(made.directory) == []
        sweep()
        assert bytes(read(made.put(b"x")[1])) == b"x"
    finally:
        made.close()
