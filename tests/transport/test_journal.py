"""Journals: append-only lines with checksums, one writer, readable whatever happened to some of them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyward.transport.journal import Journal, Tail, content, line, parsed, read
from tests.support.forked import run_forked


def written(path: Path, count: int) -> list[dict[str, Any]]:
    facts = [{"fact": "n", "value": number, "text": "a\nb ü"} for number in range(count)]
    journal = Journal(path, create=True)
    journal.append(*facts)
    journal.close()
    return facts


def test_what_is_written_is_read(tmp_path: Path) -> None:
    facts = written(tmp_path / "j", 5)
    assert read(content(tmp_path / "j")) == (facts, 0)


def test_a_cut_or_changed_line_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    facts = written(tmp_path / "j", 20)
    whole = content(tmp_path / "j")
    starts = [0, *(at + 1 for at, byte in enumerate(whole) if byte == 10)]
    random_ = random.Random(7)
    for _ in range(200):
        cut = random_.randrange(1, len(whole))
        found, damaged = read(whole[:cut])
        complete = sum(1 for start in starts[1:] if start - 1 <= cut)
        assert found == facts[:complete]
        assert damaged == (0 if cut in (*starts, *(s - 1 for s in starts)) else 1)
        changed = bytearray(whole)
        changed[cut] ^= 1 << random_.randrange(8)
        found, damaged = read(bytes(changed))
        assert damaged >= 1
        assert all(each in facts for each in found)
        assert len(found) >= 18


def test_a_cut_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    facts = written(tmp_path / "j", 3)
    whole = content(tmp_path / "j")
    (tmp_path / "j").write_bytes(whole[:-4])
    journal = Journal(tmp_path / "j", create=False)
    journal.append({"fact": "after"})
    journal.close()
    assert read(content(tmp_path / "j")) == ([*facts[:2], {"fact": "after"}], 1)


def test_one_process_writes_and_a_fork_of_it_does_not(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", create=True)
    with pytest.raises(BlockingIOError):
        Journal(tmp_path / "j", create=False)
    assert run_forked(lambda: os._exit(1 if journal.is_open else 0)) == 0
    journal.append({"fact": "still here"})
    journal.close()
    with pytest.raises(ValueError, match="closed"):
        journal.append({"fact": "late"})
    Journal(tmp_path / "j", create=False).close()


def test_the_lock_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from skyward.transport.journal import Journal\n"
        "j = Journal(Path(sys.argv[1]), create=True); j.append({'fact': 'x'}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "j")], check=False)
    journal = Journal(tmp_path / "j", create=False)
    journal.close()
    assert read(content(tmp_path / "j")) == ([{"fact": "x"}], 0)


def test_a_file_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    written(tmp_path / "j", 1)
    (tmp_path / "link").symlink_to(tmp_path / "j")
    with pytest.raises(OSError):
        content(tmp_path / "link")
    (tmp_path / "j").chmod(0o666)
    with pytest.raises(PermissionError):
        content(tmp_path / "j")


def test_what_json_does_not_know_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", create=True)
    with pytest.raises(TypeError):
        journal.append({"fact": "x", "value": object()})
    journal.close()
    assert content(tmp_path / "j") == b""


def test_a_reader_beside_the_writer_sees_each_complete_line_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", create=True)
    tail = Tail(tmp_path / "j")
    assert list(tail.lines()) == []
    journal.append({"n": 1}, {"n": 2})
    assert [parsed(each) for each in tail.lines()] == [{"n": 1}, {"n": 2}]
    half = line({"n": 3})
    with (tmp_path / "j").open("ab") as file:
        file.write(half[:9])
    assert list(tail.lines()) == []
    with (tmp_path / "j").open("ab") as file:
        file.write(half[9:])
    assert [parsed(each) for each in tail.lines()] == [{"n": 3}]
    journal.close()
