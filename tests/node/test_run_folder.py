"""Reading a run's folder, on this computer and as a program that is sent to another machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyward.node import run_folder
from skyward.node.run_folder import RunFolder


def asked(*questions: list[Any]) -> list[tuple[str, bytes]]:
    """What the program answers, which another machine gets as a text."""
    lines = b"".join(json.dumps(question).encode() + b"\n" for question in questions)
    argv = [sys.executable, "-I", "-S", "-c", Path(run_folder.__file__).read_text()]
    left = subprocess.run(argv, input=lines, capture_output=True, timeout=60, check=True).stdout
    answers: list[tuple[str, bytes]] = []
    while left:
        head, _, left = left.partition(b"\n")
        worked, size = head.decode().split()
        answers.append((worked, left[: int(size)]))
        left = left[int(size) :]
    return answers


def test_the_program_reads_from_an_offset_and_says_what_does_not_work(tmp_path: Path) -> None:
    (tmp_path / "output").write_bytes(b"first\nsecond\n")
    place = [str(tmp_path), str(tmp_path / "none")]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "model").write_bytes(b"abc")
    for name in ("runs", "history", "pools"):
        (tmp_path / "state" / name).mkdir(parents=True)
        (tmp_path / "state" / name / "journal").write_bytes(b"")
    read, nothing, failed, listed, unknown, removed = asked(
        ["piece", *place, "output", 6],
        ["piece", *place, "journal", 0],
        ["ask", *place, {"do": "status"}],
        ["listing", *place],
        ["destroy", *place],
        ["remove", *place],
    )
    assert read == ("ok", b"second\n")
    assert nothing == ("ok", b"")
    assert failed[0] == "failed"
    assert "No such file" in failed[1].decode()
    entries = {path: (kind, size) for path, kind, size, *_ in json.loads(listed[1])["entries"]}
    assert entries == {
        "results": ("d", 0), "results/model": ("f", 3),
        "state": ("d", 0), "state/runs": ("d", 0), "state/runs/journal": ("f", 0),
        "state/history": ("d", 0), "state/history/journal": ("f", 0),
    }  # fmt: skip
    assert unknown == ("failed", b"there is no word destroy")
    assert removed == ("ok", b"")
    assert not tmp_path.exists()


def test_a_run_whose_steward_is_gone_gives_its_reserve_back(tmp_path: Path) -> None:
    (tmp_path / "reserve").write_bytes(b"\0" * 1000)
    with pytest.raises(FileNotFoundError):
        RunFolder(str(tmp_path), str(tmp_path / "steward")).ask({"do": "status"})
    assert not (tmp_path / "reserve").exists()


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("elsewhere")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "output").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        RunFolder(str(folder), "").piece("output", 0)
