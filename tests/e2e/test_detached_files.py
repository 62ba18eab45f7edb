"""What a detached run leaves, copied while it runs and afterwards: output, result, the files of its program."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import pytest

import skyward as sky
from skyward.cli.main import main
from skyward.errors import InvalidArgument, SkywardError
from skyward.node.run_folder import RunFolder
from skyward.pool.run import Run
from tests.support.detached_runs import elsewhere, program, submit, text_of  # noqa: F401 - a fixture
from tests.support.waiting import until

RESULTS = "os.environ['SKYWARD_RUN_FOLDER'] + '/results/'"


def files(directory: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()
    }


def test_output_and_files_of_a_run_are_copied_once_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    file = program(f"""
        os.makedirs({RESULTS} + "deep")
        open({RESULTS} + "deep/model.pt", "wb").write(bytes(3_000_000))
        open({RESULTS} + "empty", "wb").close()
        os.symlink("deep/model.pt", {RESULTS} + "last.pt")
        os.symlink("/etc/hostname", {RESULTS} + "elsewhere")
        print("saved", flush=True)
        """)
    assert submit(file, "--name", "grid").returncode == 0
    assert Run("grid").wait(120).stage == "finished"
    assert main(["fetch", "grid"]) == 0
    told = capsys.readouterr().out
    assert "grid: 3 new or changed files (3 MB) in grid" in told
    assert "left out, since they lead elsewhere: results/elsewhere" in told
    found = files("grid")
    assert found["output"].splitlines()[0] == b"saved"
    assert found["results/deep/model.pt"] == bytes(3_000_000)
    assert found["results/empty"] == b""
    assert os.readlink("grid/results/last.pt") == "deep/model.pt"
    assert main(["fetch", "grid", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "grid",
        "path": "grid",
        "files": 0,
        "size": 0,
        "writing": [],
        "left_out": ["results/elsewhere"],
    }


def test_of_a_run_that_is_not_over_it_is_said_what_is_still_being_written() -> None:
    file = program(f"""
        open({RESULTS} + "first", "w").write("first")
        os.utime({RESULTS} + "first", (0, 0))
        open({RESULTS} + "second.part", "w").write("half")
        open({RESULTS} + "third", "w").write("half")
        print("ready", flush=True)
        while not os.path.exists("continue"):
            time.sleep(0.05)
            open({RESULTS} + "third", "a").write("x")
        open({RESULTS} + "third", "w").write("whole")
        os.rename({RESULTS} + "second.part", {RESULTS} + "second")
        """)
    assert submit(file, "--name", "grid").returncode == 0
    run = Run("grid")
    until(lambda: "ready" in text_of(run), 120)
    fetched = run.fetch("copy")
    assert fetched.writing == ["output", "results/second.part", "results/third"]
    assert files("copy")["results/first"] == b"first"
    assert "results/second.part" not in files("copy")
    Path("continue").touch()
    assert run.wait(120).stage == "finished"
    assert run.fetch("copy").writing == []
    found = files("copy")
    assert (found["results/second"], found["results/third"]) == (b"half", b"whole")
    assert found["output"].decode() == text_of(run)


def test_a_copy_that_was_interrupted_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    file = program(f"open({RESULTS} + 'large', 'wb').write(os.urandom(5 << 20))")
    assert submit(file, "--name", "grid").returncode == 0
    run = Run("grid")
    run.wait(120)
    real, left = RunFolder.piece, [3]

    def breaks(folder: RunFolder, name: str, offset: int) -> bytes:
        if name.endswith("large"):
            left[0] -= 1
            if left[0] < 0:
                raise ConnectionError("the connection is gone")
        return real(folder, name, offset)

    monkeypatch.setattr(RunFolder, "piece", breaks)
    with pytest.raises(SkywardError, match=r"the connection is gone.*fetch it again to continue"):
        run.fetch()
    assert "results/large" not in files("grid"), "a file has its name when it is whole"
    left[0] = 100
    assert run.fetch().size == 2 << 20, "only what was missing"
    assert files("grid")["results/large"] == Path("state/runs/grid/folder/results/large").read_bytes()


def test_files_of_another_run_or_of_anybody_are_not_overwritten() -> None:
    file = program("pass")
    for name in ("one", "two"):
        assert submit(file, "--name", name).returncode == 0
        Run(name).wait(120)
    Run("one").fetch("copy")
    with pytest.raises(InvalidArgument, match="copy has the files of a run other than two"):
        Run("two").fetch("copy")
    Path("mine").mkdir()
    Path("mine/output").write_text("precious")
    with pytest.raises(InvalidArgument, match="mine is not empty"):
        Run("two").fetch("mine")
    assert files("mine") == {"output": b"precious"}


def in_run(body: str, name: str = "call") -> Run:
    """A detached function of the module `work`, as the program of a user has it."""
    Path("work.py").write_text(f"import os, sys\n\ndef work():\n    {body}\n")
    sys.path.insert(0, os.getcwd())
    try:
        sys.modules.pop("work", None)
        import work  # pyright: ignore[reportMissingImports]

        return sky.detach(work.work, pool=sky.ComputePool(console=False, history=False), name=name)
    finally:
        sys.path.remove(os.getcwd())


def test_the_returned_value_is_a_pickle_among_the_files() -> None:
    run = in_run("return {'loss': 0.5}")
    assert run.result(timeout=120) == {"loss": 0.5}
    run.fetch("copy")
    assert pickle.loads(files("copy")["results/return.pkl"]) == {"loss": 0.5}


@pytest.mark.parametrize(("code", "stage"), [("0", "finished"), ("'no data'", "failed")])
def test_a_function_that_calls_sys_exit_has_returned_nothing_and_that_is_said(code: str, stage: str) -> None:
    run = in_run(f"sys.exit({code})")
    with pytest.raises(SkywardError, match=rf"called sys.exit\({code}\), so it returned nothing"):
        run.result(timeout=120)
    assert run.status.stage == stage


FULL = "os.symlink('/dev/full', os.environ['SKYWARD_RUN_FOLDER'] + '/results/return.part')"


def test_a_small_result_is_kept_on_a_full_disk() -> None:
    """There is room for it that was reserved when the run began."""
    run = in_run(f"{FULL}; return 'small'")
    assert run.result(timeout=120) == "small"


def test_a_large_result_on_a_full_disk_is_a_failure_that_says_so() -> None:
    run = in_run(f"{FULL}; return bytes(20 << 20)")
    with pytest.raises(SkywardError, match=r"does not take the 21\.0 MB .*No space left on device"):
        run.result(timeout=120)
    assert run.status.stage == "failed"


def test_at_its_end_the_files_of_a_run_are_copied_to_where_its_user_wants_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = program(f"open({RESULTS} + 'model.pt', 'wb').write(bytes(3_000_000)); print('saved')")
    submitted = submit(file, "--name", "grid", "--results", "kept")
    assert f"At its end its files are copied to {os.getcwd()}/kept/grid on node 0." in submitted.stdout
    assert main(["attach", "grid"]) == 0
    found, there = files("kept/grid"), files("state/runs/grid/folder")
    assert found["results/model.pt"] == bytes(3_000_000)
    assert found["output"] == there["output"]
    assert b'"ended"' in found["journal"]
    assert there["journal"].startswith(found["journal"])
    assert main(["runs", "drop", "grid"]) == 0
    again = submit(file, "--name", "grid", "--results", "kept")
    assert again.returncode == 1
    assert "results= cannot be used: " in again.stderr
    assert "kept/grid has the files of a run other than grid" in again.stderr
    assert files("kept/grid") == found


def test_a_copy_that_finds_no_room_is_named_and_the_files_stay_where_they_are(
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = program(f"""
        open({RESULTS} + 'model.pt', 'w').write('model')
        os.unlink('kept/grid/output')
        os.symlink('/dev/full', 'kept/grid/output')
        print("saved", flush=True)
        """)
    assert submit(file, "--name", "grid", "--results", "kept").returncode == 0
    assert main(["attach", "grid"]) == 1
    said = capfd.readouterr().err
    assert f"its files are not in {os.getcwd()}/kept/grid: copying" in said
    assert "No space left on device" in said
    assert "grid is over: finished" in said
    assert Run("grid").fetch("copy").files >= 2
    assert files("copy")["results/model.pt"] == b"model"


def test_what_results_and_hold_cannot_mean_is_refused_at_submission(capfd: pytest.CaptureFixture[str]) -> None:
    file = program("pass")
    Path("kept").write_text("a file")
    assert main(["run", "--detach", file, "--results", "kept"]) == 1
    assert "results= cannot be used: copying" in capfd.readouterr().err
    assert main(["run", "--detach", file, "--hold", "60"]) == 1
    assert "hold= is for machines that are let go at the end; with Local a run's files stay" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["run", file, "--hold", "60"])
    assert "--hold is for runs with --detach" in capfd.readouterr().err
