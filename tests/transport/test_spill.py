"""How results become blobs: an argument that comes back is not written, and no draft is left behind."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from skyward.transport import blobs, tensors
from skyward.transport.blobs import Spill

DATA = random.randbytes(3_000_000)


@pytest.fixture
def argument(tmp_path: Path) -> blobs.Blob:
    return blobs.write(str(tmp_path), DATA, blobs.digest(DATA))


def test_an_argument_that_comes_back_unchanged_is_not_written_again(tmp_path: Path, argument: blobs.Blob) -> None:
    pieces: list[Any] = [b"head", memoryview(bytearray(DATA))]
    with Spill(str(tmp_path), [argument]) as spill:
        moved = spill.store(pieces)
    path, size = moved["1"]
    assert (pieces, size) == ([b"head", b""], len(DATA))
    assert os.path.samefile(path, argument[0])
    view = blobs.read((path, size), unlink=True)
    assert bytes(view) == DATA
    assert os.listdir(tmp_path) == [os.path.basename(argument[0])]


@pytest.mark.parametrize("place", [0, 1, 1_000_000, len(DATA) // 2, len(DATA) - 1])
def test_an_argument_that_was_changed_anywhere_is_written(tmp_path: Path, argument: blobs.Blob, place: int) -> None:
    changed = blobs.read(argument)
    changed[place] ^= 1
    with Spill(str(tmp_path), [argument]) as spill:
        moved = spill.store([changed])
    assert not os.path.samefile(moved["0"][0], argument[0])
    assert bytes(blobs.read(moved["0"])) == bytes(changed)
    assert bytes(blobs.read(argument)) == DATA


def test_an_argument_whose_file_is_gone_is_written(tmp_path: Path, argument: blobs.Blob) -> None:
    view = blobs.read(argument, unlink=True)
    with Spill(str(tmp_path), [argument]) as spill:
        moved = spill.store([view])
    assert bytes(blobs.read(moved["0"])) == DATA


def test_memory_that_was_asked_for_is_the_blob_itself(tmp_path: Path) -> None:
    with Spill(str(tmp_path)) as spill:
        assert tensors.local.room is not None
        room = tensors.local.room(len(DATA))
        room[:] = DATA
        unused = spill.room(2_000_000)
        moved = spill.store([room])
        assert len(os.listdir(tmp_path)) == 2
    assert tensors.local.room is None
    assert os.listdir(tmp_path) == [os.path.basename(moved["0"][0])]
    assert bytes(blobs.read(moved["0"])) == DATA
    unused[0] = 1  # it is memory still


def test_drafts_of_what_could_not_be_packed_are_removed(tmp_path: Path) -> None:
    with pytest.raises(ValueError), Spill(str(tmp_path)) as spill:
        spill.room(2_000_000)
        raise ValueError
    assert os.listdir(tmp_path) == []


def test_little_memory_is_no_file(tmp_path: Path) -> None:
    with Spill(str(tmp_path)) as spill:
        assert spill.room(100).nbytes == 100
        assert os.listdir(tmp_path) == []
