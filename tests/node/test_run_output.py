"""The output of a detached run: all of it, or its beginning and its end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from skyward.node.steward import OutputFile


def test_output_is_kept_as_it_came(tmp_path: Path) -> None:
    read, write = os.pipe()
    file = OutputFile(tmp_path / "output", reserve=1)
    file.follow(read)
    os.write(write, b"one\n\x00two")
    os.close(write)
    file.settle()
    assert (tmp_path / "output").read_bytes() == b"one\n\x00two"
    assert file.size == 8
    file.end()
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_of_too_much_output_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    file = OutputFile(tmp_path / "output", most=10, tail=6, reserve=1)
    for number in range(10):
        file.write(f"{number:03},".encode())
    file.settle()
    assert (tmp_path / "output").read_bytes() == b"000,001,\n[24 bytes are left out here]\n008,009,"


def test_a_full_disk_costs_output_and_not_the_end_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OutputFile(tmp_path / "output", reserve=1000)
    assert (tmp_path / "reserve").stat().st_size == 1000
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if (tmp_path / "reserve").exists():
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    file.write(b"the last line\n")
    file.settle()
    assert not (tmp_path / "reserve").exists()
    assert (tmp_path / "output").read_bytes().endswith(b"the last line\n")
