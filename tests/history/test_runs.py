"""Run folders: made privately, opened by one process at a time, listed and removed by name."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

import skyward as sky
from skyward.cli.main import main
from skyward.history import runs


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_run_is_made_once_and_opened_again_with_what_it_has() -> None:
    first = runs.open_run("grid-1", "results")
    assert not first.facts
    first.journal.append({"fact": "result", "item": "a"})
    first.journal.close()
    again = runs.open_run("grid-1", "results")
    assert [fact["fact"] for fact in again.facts] == ["run", "open", "result"]
    assert stat.S_IMODE(os.stat(again.path).st_mode) == 0o700
    again.journal.close()


def test_two_programs_on_one_run_the_second_is_told_who_has_it() -> None:
    first = runs.open_run("grid-1", "results")
    with pytest.raises(sky.SkywardError, match=rf"run 'grid-1' is in use by process {os.getpid()} \(.*\) on .* since "):
        runs.open_run("grid-1", "results")
    with pytest.raises(sky.SkywardError, match="in use"):
        runs.drop(runs.find("grid-1"))
    first.journal.close()
    runs.open_run("grid-1", "results").journal.close()


def test_a_run_of_another_kind_and_a_bad_name_are_refused() -> None:
    runs.open_run("sweep", "other").journal.close()
    with pytest.raises(sky.SkywardError, match=r"of another kind \(other\)"):
        runs.open_run("sweep", "results")
    runs.open_run("sweep", "other").journal.close()
    for name in ("../x", "", "a b", ".x"):
        with pytest.raises(sky.SkywardError, match="not the name of a run"):
            runs.open_run(name, "results")


def test_a_full_disk_is_said_when_a_run_is_opened_and_the_run_is_free_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(
            sky.SkywardError, match=rf"cannot be kept in {state}/runs: No space left on device\. Make room"
        ):
            runs.open_run("grid-1", "results")
    runs.open_run("grid-1", "results").journal.close()
    monkeypatch.setenv("SKYWARD_STATE", "/proc/nowhere")
    with pytest.raises(sky.SkywardError, match="have the variable SKYWARD_STATE name a folder that can be written to"):
        runs.open_run("grid-1", "results")


def test_runs_are_listed_the_last_one_first_and_dropped_by_name(
    capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    assert main(["runs"]) == 0
    assert "no run" in capsys.readouterr().out
    for number, name in enumerate(("old", "new")):
        made = runs.open_run(name, "results")
        made.journal.append({"fact": "result", "item": "a", "version": "v", "nth": 0})
        made.journal.close()
        os.utime(made.path / "journal", (1e9 + number, 1e9 + number))
    study = runs.open_run("detached", "other")
    for fact in ({"fact": "asked", "number": 0}, {"fact": "told", "number": 0}, {"fact": "asked", "number": 1}):
        study.journal.append(fact)
    study.journal.close()
    assert [run.name for run in runs.runs("results")] == ["new", "old"]
    assert main(["runs"]) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["detached", "other", "1"],
        ["new", "results", "1"],
        ["old", "results", "1"],
    ]
    assert main(["runs", "drop", "old", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"dropped": "old"}
    assert not (state / "runs" / "old").exists()
    assert main(["runs", "drop", "nwe"]) == 1
    assert "Did you mean new?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["runs", "drop"])


def test_what_is_no_run_is_left_out(state: Path) -> None:
    runs.open_run("good", "results").journal.close()
    (state / "runs" / "empty").mkdir(mode=0o700)
    (state / "runs" / "torn").mkdir(mode=0o700)
    (state / "runs" / "torn" / "journal").write_bytes(b"\x00\x01garbage\n")
    assert [run.name for run in runs.runs()] == ["good"]
