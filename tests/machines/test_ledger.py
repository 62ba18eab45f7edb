"""The ledger: on disk before the call, readable after anything that can happen to a file."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import InvalidArgument, SkywardError
from skyward.machines.ledger import Ledger, histories, in_use, pool_dir, read, remove, state_dir
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def test_it_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    assert state_dir() == state
    monkeypatch.delenv("SKYWARD_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert state_dir() == Path("/somewhere/skyward")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_dir() == Path.home() / ".local/state/skyward"


def test_an_intent_is_on_disk_before_the_call_and_its_answer_after() -> None:
    """Row 34: the journal is written before the create call."""
    ledger = Ledger.start("p", {"provider": "AWS"})
    call = ledger.intent("instance", region="us-east-1", token="t")
    before = read("p")
    assert before is not None
    assert [r.kind for r in before.unanswered] == ["instance"]
    assert not before.certain
    assert before.region == "us-east-1"
    ledger.answer(call, "instance", "i-1", "i-2", price=0.5)
    after = ledger.history
    assert after.certain
    assert after.left("instance") == ("i-1", "i-2")
    assert after.made("instance")["i-2"].data["price"] == 0.5
    ledger.gone("instance", "i-1")
    assert ledger.history.left("instance") == ("i-2",)
    ledger.refused(ledger.intent("group"), "group", "AccessDenied")
    assert ledger.history.certain
    ledger.remove()
    assert read("p") is None


def test_nobody_else_can_read_it_whatever_the_umask() -> None:
    """SEC-21."""
    old = os.umask(0)
    try:
        ledger = Ledger.start("p", {})
    finally:
        os.umask(old)
    assert os.stat(pool_dir("p")).st_mode & 0o777 == 0o700
    assert os.stat(pool_dir("p") / "ledger").st_mode & 0o777 == 0o600
    ledger.remove()


def test_a_name_is_taken_once() -> None:
    first = Ledger.start("p", {})
    with pytest.raises(InvalidArgument, match="sky down p"):
        Ledger.start("p", {})
    first.let_go()
    with pytest.raises(InvalidArgument):
        Ledger.start("p", {})
    assert not [name for name in os.listdir(pool_dir("p").parent) if name.startswith(".")]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 200, "a b"])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        Ledger.start(name, {})


def test_every_truncation_leaves_the_lines_before_it_readable() -> None:
    """Row 58."""
    ledger = Ledger.start("p", {"provider": "AWS"})
    for i in range(5):
        ledger.answer(ledger.intent("instance", region="eu-west-1"), "instance", f"i-{i}")
    ledger.let_go()
    path = pool_dir("p") / "ledger"
    whole = path.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        found = read("p")
        assert found is not None
        complete = sum(1 for end in ends if end <= cut)  # a line without its line end is complete as well
        assert len(found.records) == complete
        assert found.damaged == (0 if cut == 0 or cut in ends or cut - 1 in ends else 1)


def test_a_line_after_a_torn_one_is_read() -> None:
    """Row 58: a crash in the middle of a line."""
    ledger = Ledger.start("p", {"provider": "AWS"})
    ledger.intent("group")
    ledger.let_go()
    path = pool_dir("p") / "ledger"
    path.write_bytes(path.read_bytes()[:-9])
    again = Ledger.resume("p")
    assert again is not None
    again.answer(again.intent("instance"), "instance", "i-1")
    assert again.history.left("instance") == ("i-1",)
    assert again.history.damaged == 1
    assert not again.history.certain
    again.remove()


def test_damage_anywhere_is_noticed_and_never_believed() -> None:
    """Row 58: 200 random damages; no record is read that was not written."""
    ledger = Ledger.start("p", {"provider": "AWS"})
    for i in range(5):
        ledger.answer(ledger.intent("instance"), "instance", f"i-{i}")
    ledger.let_go()
    path = pool_dir("p") / "ledger"
    whole = path.read_bytes()
    written = read("p")
    assert written is not None
    draw = random.Random(7)
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] ^= draw.randint(1, 255)
        path.write_bytes(bytes(damaged))
        found = read("p")
        assert found is not None
        assert all(record in written.records for record in found.records)
        assert found.damaged
        assert not found.certain


def test_a_living_process_holds_its_ledger_and_a_dead_one_does_not() -> None:
    """Row 59."""
    code = (
        "import os, sys; from skyward.machines.ledger import Ledger; ledger = Ledger.start('p', {}); "
        "pid = os.fork(); print('ready', pid, flush=True) if pid else None; sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline().startswith(b"ready")
        assert in_use("p")
        with pytest.raises(SkywardError, match=f"in use by process {child.pid}"):
            Ledger.resume("p")
        assert in_use("p")
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=120)
        until(lambda: not in_use("p"), what="a forked child that is still alive must not count, once it has run")
        taken = Ledger.resume("p")
        assert taken is not None
        taken.remove()


def test_asking_in_the_same_process_does_not_unlock() -> None:
    ledger = Ledger.start("p", {})
    assert in_use("p")
    assert in_use("p")
    ledger.let_go()
    assert not in_use("p")


def test_a_ledger_that_cannot_be_asked_counts_as_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what runs there would be ended, and its keys removed."""
    Ledger.start("p", {}).let_go()
    plain = os.open

    def opened(path: Any, *args: Any, **more: Any) -> int:
        if os.path.basename(path) == "ledger":
            raise OSError(errno.EMFILE, "Too many open files")
        return plain(path, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", opened)
        assert in_use("p")
        remove("p")
    assert not in_use("p")
    assert pool_dir("p").exists()


def test_all_ledgers_are_listed_and_strange_files_are_not() -> None:
    assert list(histories()) == []
    for name in ("b", "a"):
        Ledger.start(name, {"n": name}).let_go()
    (state_dir() / "pools" / "stray").write_text("x")
    (state_dir() / "pools" / "empty").mkdir()
    assert [found.pool for found in histories()] == ["a", "b"]


def test_a_process_that_died_while_making_its_ledger_leaves_nothing_for_long() -> None:
    half = state_dir() / "pools" / ".p.1.2"
    half.mkdir(parents=True)
    (half / "ledger").write_bytes(b"")
    Ledger.start("q", {}).remove()
    assert half.exists(), "another process may be making it at this moment"
    os.utime(half, (0, 0))
    Ledger.start("q", {}).remove()
    assert not half.exists()


def test_many_ledgers_can_be_started_at_once() -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda i: Ledger.start(f"p{i}", {}), range(100)))
    assert len(list(histories())) == 100
    for ledger in made:
        ledger.remove()


def test_a_missing_ledger_is_none() -> None:
    assert read("nothing") is None
    assert Ledger.resume("nothing") is None
    assert not in_use("nothing")


def test_writing_after_letting_go_is_refused() -> None:
    ledger = Ledger.start("p", {})
    ledger.let_go()
    with pytest.raises(SkywardError, match="was released"):
        ledger.note(x=1)
