"""Histories of detached runs on other machines, copied to this computer by offset."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from skyward.history.store import AWAY, FILE, entries, find
from skyward.node.run_folder import RunFolder
from skyward.pool.run_history import copy, repeated
from tests.support.waiting import until

ID = "grid-20260101-000000-abcd"
HEAD = json.dumps({"history": 1, "pool": "cubes", "began": 1.0, "run": "grid"}) + "\n"


class There(RunFolder):
    """A folder whose histories have any names."""

    def __init__(self, path: Path, *more: str) -> None:
        super().__init__(str(path), "")
        self.more = more

    def histories(self) -> list[str]:
        return [*super().histories(), *self.more]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("here", "there"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "here"))
    (tmp_path / "there" / "state" / "history" / ID).mkdir(parents=True)
    return tmp_path / "there"


def away(seconds: float = 60.0) -> dict[str, object]:
    return {"run": "grid", "until": time.time() + seconds, "machines": ""}


def test_what_is_new_is_added_and_it_is_open_until_the_run_is_over(there: Path) -> None:
    written = there / "state" / "history" / ID / FILE
    written.write_text(HEAD)
    copy(RunFolder(str(there), ""), away(), over=False)
    assert find("grid").running
    written.write_text(HEAD + "{}\n")
    copy(RunFolder(str(there), ""), away(), over=True)
    (entry,) = entries()
    assert (entry.path.read_text(), entry.running) == (HEAD + "{}\n", False)
    written.write_text(HEAD + "{}\n{}\n")
    copy(RunFolder(str(there), ""), away(), over=False)
    assert entry.path.read_text() == HEAD + "{}\n", "it was whole"


def test_a_run_of_which_nothing_is_heard_counts_as_running_until_its_time_is_over(there: Path) -> None:
    (there / "state" / "history" / ID / FILE).write_text(HEAD)
    copy(RunFolder(str(there), ""), away(-1.0), over=False)
    assert not find("cubes").running


def test_a_machine_cannot_choose_where_its_histories_are_written(there: Path, tmp_path: Path) -> None:
    """SEC-37: it adds histories of its own, and changes no other file."""
    own = tmp_path / "here" / "history" / "mine-20260101-000000-0001"
    own.mkdir(parents=True, mode=0o700)
    (own / FILE).write_text("mine\n")
    (there / "state" / "history" / own.name).mkdir()
    (there / "state" / "history" / own.name / FILE).write_text("mine\nand more\n")
    (there / "state" / "history" / ID / FILE).write_text(HEAD)
    copy(There(there, "../../evil-20260101-000000-0000", "/evil", "..", "a/b-20260101-000000-0000"), away(), over=True)
    assert sorted(path.name for path in (tmp_path / "here").rglob("*") if path.is_file()) == [FILE, FILE]
    assert (own / FILE).read_text() == "mine\n"
    assert not (own / AWAY).exists()


def test_it_is_repeated_until_one_leaves_also_while_nothing_can_be_reached() -> None:
    tried: list[float] = []

    def act() -> None:
        tried.append(time.monotonic())
        raise ConnectionError

    with repeated(act):
        until(lambda: len(tried) > 1)
    until(lambda: not any(thread.name == "skyward-look" for thread in threading.enumerate()))
