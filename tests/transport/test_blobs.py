"""Large buffers as files: written once, mapped where they are used, gone afterwards."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.transport import blobs
from skyward.transport.blobs import Store, read, remove, write


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(limit=1000)
    yield made
    made.close()


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
    os.symlink("/etc/hostname", tmp_path / "link")
    with pytest.raises(OSError):
        write(str(tmp_path), b"y", "link")


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
    assert len(os.listdir(store.directory)) == 1
    assert store.put(b"b" * 100)[0] != first
    assert stat.S_IMODE(os.stat(store.directory).st_mode) == 0o700


def test_what_no_call_needs_goes_first_when_room_is_short(store: Store) -> None:
    keep, kept = store.put(b"k" * 400)
    old, _ = store.put(b"o" * 400)
    store.release([old])
    _, new = store.put(b"n" * 400)
    assert sorted(os.listdir(store.directory)) == sorted(os.path.basename(path) for path, _ in (kept, new))
    assert keep in kept[0]
    assert bytes(read(store.put(b"o" * 400)[1])) == b"o" * 400


def test_what_is_in_use_stays_however_short_the_room(store: Store) -> None:
    made = [store.put(bytes([i]) * 400) for i in range(5)]
    assert len(os.listdir(store.directory)) == 5
    store.release(digest for digest, _ in made)
    assert len(os.listdir(store.directory)) == 2


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
