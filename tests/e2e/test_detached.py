"""Detached runs on this computer: they go on without the process that submitted them, and end by themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree

import pytest

import skyward as sky
from skyward.cli.main import main
from skyward.errors import InvalidArgument, SkywardError
from skyward.pool.run import Run
from skyward.transport.journal import content, read
from tests.support.detached_runs import PROGRAM, elsewhere, program, submit, text_of  # noqa: F401 - a fixture
from tests.support.leftovers import leftover_processes
from tests.support.programs import load_program
from tests.support.waiting import until


def test_a_run_goes_on_when_whoever_submitted_it_is_gone() -> None:
    file = program("for i in range(5):\n    time.sleep(0.1)\n    print(square(i) >> pool, flush=True)")
    done = submit(file, "--name", "grid")
    assert done.returncode == 0, done.stderr
    assert "sky attach grid" in done.stdout
    run = Run("grid")
    status = run.wait(120)
    assert (status.stage, status.code) == ("finished", 0)
    lines = text_of(run).splitlines()
    assert [line for line in lines if line.isdigit()] == ["0", "1", "4", "9", "16"]
    assert lines[-1] == "the end"


def test_the_program_may_open_its_pool_again_but_not_two_at_a_time() -> None:
    file = program("print(square(2) >> pool)")
    Path(file).write_text(
        Path(file)
        .read_text()
        .replace(
            '    print("the end", flush=True)',
            dedent("""
            with sky.ComputePool(nodes=2, console=False, history=False) as pool:
                print("again", square(3) @ pool, flush=True)
                try:
                    sky.ComputePool(nodes=2, console=False, history=False).open()
                except sky.errors.PoolClosed as exc:
                    print("refused:", exc)
            try:
                sky.ComputePool(nodes=3, console=False, history=False).open()
            except sky.errors.PoolClosed as exc:
                print("refused:", exc)
            """).replace("\n", "\n    "),
        )
    )
    assert submit(file, "--name", "twice").returncode == 0
    run = Run("twice")
    assert run.wait(120).stage == "finished", text_of(run)
    text = text_of(run)
    assert "again [9, 9]" in text
    assert "A run has one pool at a time" in text
    assert "asks for nodes=3 instead of 2" in text


def test_the_pool_of_sky_run_is_detached_with_a_program_that_opens_none(capfd: pytest.CaptureFixture[str]) -> None:
    source = "import skyward as sky\n\n@sky.compute\ndef f(x):\n    return x + 1\n\nprint(f(1) @ pool)\n"
    Path("plain.py").write_text(source)
    assert submit("plain.py", "--nodes", "2", "--console", "silent").returncode == 0
    assert main(["attach", "plain"]) == 0
    assert "[2, 2]" in capfd.readouterr().out
    assert main(["attach", "plain"]) == 0
    assert "[2, 2]" not in capfd.readouterr().out, "it continues where one left"
    assert main(["attach", "plain", "--all"]) == 0
    assert "[2, 2]" in capfd.readouterr().out


def test_attach_ends_like_the_program_and_logs_do_not_move_where_it_continues(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert submit(program("print('first words', flush=True)\nos.kill(os.getpid(), 9)"), "--name", "hit").returncode == 0
    assert Run("hit").wait(120).code == -9
    assert main(["logs", "hit"]) == 0
    assert "first words" in capfd.readouterr().out
    assert main(["attach", "hit"]) == 128 + 9
    assert "first words" in capfd.readouterr().out


def test_the_example_of_the_guide_runs_detached() -> None:
    example = Path(__file__).parents[2] / "examples" / "guides" / "31_detached_runs.py"
    assert submit(str(example), "--name", "example").returncode == 0
    run = Run("example")
    assert run.wait(120).stage == "finished", text_of(run)
    assert "epoch 2: [0.333" in text_of(run)
    run.fetch("copy")
    assert json.loads(Path("copy/results/losses.json").read_text())[0] == [1.0, 0.5]


def test_the_function_of_the_guide_returns_what_it_computes() -> None:
    example = Path(__file__).parents[2] / "examples" / "guides" / "31_detached_function.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split()[-1] == "14", done.stderr


def test_a_program_that_fails_is_a_failed_run_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    file = program("raise ValueError('no data')")
    assert submit(file, "--name", "fails").returncode == 0
    run = Run("fails")
    status = run.wait(120)
    assert (status.stage, status.code) == ("failed", 1)
    assert "ValueError: no data" in text_of(run)
    assert main(["attach", "fails"]) == 1
    assert main(["runs"]) == 0
    assert "failed" in capfd.readouterr().out
    assert main(["runs", "drop", "fails"]) == 0
    with pytest.raises(InvalidArgument, match="there is no run"):
        Run("fails")


def test_a_program_that_fails_is_started_again_as_often_as_was_said() -> None:
    file = program(
        "print('start', os.environ['SKYWARD_RESTART'], square(3) >> pool, flush=True)\n"
        "if os.environ['SKYWARD_RESTART'] != '2':\n    os._exit(3)"
    )
    assert submit(file, "--name", "again", "--restarts", "2").returncode == 0
    run = Run("again")
    status = run.wait(180)
    assert (status.stage, status.restarts) == ("finished", 2)
    assert [line for line in text_of(run).splitlines() if line.startswith("start")] == [
        "start 0 9",
        "start 1 9",
        "start 2 9",
    ]


def test_a_map_with_resume_goes_on_where_the_program_of_a_run_died() -> None:
    file = program(
        """
        @sky.compute
        def noted(x):
            with open("computed", "a") as file:
                file.write(f"{x} ")
            return x * x

        pool.on_event(lambda event: print(getattr(event, "text", ""), flush=True))
        if os.environ["SKYWARD_RESTART"] == "0":
            pool.map(noted, range(3), resume="squares")
            os._exit(3)
        print(pool.map(noted, range(6), resume="squares"), flush=True)
        """
    )
    assert submit(file, "--name", "sweep", "--restarts", "1").returncode == 0
    run = Run("sweep")
    status = run.wait(180)
    assert (status.stage, status.restarts) == ("finished", 1)
    text = text_of(run)
    assert "3 of 6 taken from squares, 3 to compute." in text
    assert "[0, 1, 4, 9, 16, 25]" in text
    assert sorted(Path("computed").read_text().split()) == list("012345")


def test_stopping_a_run_lets_its_program_clean_up() -> None:
    file = program(
        "try:\n    print('ready', flush=True)\n    time.sleep(600)\nfinally:\n    print('clean', flush=True)"
    )
    assert submit(file, "--name", "long").returncode == 0
    run = Run("long")
    until(lambda: "ready" in text_of(run), 120)
    with pytest.raises(InvalidArgument, match="is not over"):
        run.check_over()
    assert run.stop().stage == "stopped"
    assert "clean" in text_of(run)


def test_a_run_whose_time_is_over_ends() -> None:
    source = Path(program("time.sleep(600)")).read_text().replace("history=False", "history=False, ttl=20, grace=1")
    Path("train.py").write_text(source)
    assert submit("train.py", "--name", "short").returncode == 0
    assert Run("short").wait(120).stage == "expired"


def test_a_run_whose_steward_is_killed_is_lost_and_nothing_of_it_stays(capfd: pytest.CaptureFixture[str]) -> None:
    file = program("print('ready', flush=True)\ntime.sleep(600)")
    assert submit(file, "--name", "lost").returncode == 0
    run = Run("lost")
    until(lambda: "ready" in text_of(run), 120)
    (steward,) = [line for line in leftover_processes() if "node.steward" in line]
    os.kill(int(steward.partition(":")[0]), signal.SIGKILL)
    until(lambda: run.status.stage == "lost")
    assert main(["attach", "lost"]) == 1
    assert "lost is over: lost, since its machine or its steward is gone." in capfd.readouterr().err
    until(lambda: not leftover_processes(), 120)


def test_on_a_terminal_one_attaches_to_the_output_and_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = load_program(Path(__file__).parents[2] / "docs" / "record_view.py")
    for name in ("CI", "TF_BUILD", "TEAMCITY_VERSION", "JENKINS_URL"):
        monkeypatch.delenv(name, raising=False)
    file = program("print('ready', flush=True)\npool.map(lambda _: time.sleep(600), range(2))")
    Path(file).write_text(Path(file).read_text().replace(", history=False", ", name='lambdas'"))
    assert submit(file, "--name", "grid").returncode == 0
    screen, stops = recorder.Screen(100, 24), list[threading.Thread]()

    def look(data: bytes, terminal: int) -> None:
        lines = screen.text()
        if not stops and "ready" in lines and any(line.startswith("●  node-1") and "lambda" in line for line in lines):
            stops.append(threading.Thread(target=Run("grid").stop))
            stops[0].start()

    code = recorder.play([sys.executable, "-m", "skyward", "attach", "grid"], screen, look)
    stops[0].join()
    assert code == Run("grid").status.code == 143
    assert screen.everything() == ["ready", "sky: grid is over: stopped, exit status 143."]


def test_the_recording_of_the_guide_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    recorder = load_program(Path(__file__).parents[2] / "docs" / "record_run.py")
    frames = recorder.record()
    assert any("node-1" in line for line in frames[1])
    assert "grid is over: stopped." in frames[-1][-1]
    drawn = ElementTree.fromstring(recorder.animation(frames, "a run"))
    assert [child.get("class") for child in drawn][1:] == [f"frame-{number}" for number in range(len(frames))]


STEPS = {
    "the record": ("skyward.pool.run_record", "Submission.write"),
    "the machines": ("skyward.pool.detached", "place_nodes"),
    "the steward": ("skyward.setup.keeper_client", "KeeperClient.hold"),
    "the start": ("skyward.setup.keeper_client", "KeeperClient.go"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_submission_that_is_killed_leaves_a_whole_run_or_nothing(step: str, when: str) -> None:
    module, name = STEPS[step]
    holder, _, attribute = f"module.{name}".rpartition(".")
    killed = dedent(f"""
        import os, sys, importlib
        import skyward.pool.detached, skyward.setup.hosts
        for each in (skyward.pool.detached, skyward.setup.hosts):
            each.LOCAL_LEASE = 5.0
        skyward.pool.detached._GO_WITHIN = 3.0
        module = importlib.import_module({module!r})
        real = {holder}.{attribute}
        def dies(*args, **named):
            if {when!r} == "after":
                real(*args, **named)
            os.kill(os.getpid(), 9)
        {holder}.{attribute} = dies
        """)
    file = program("print(square(3) >> pool, flush=True)")
    assert submit(file, "--name", "cut", before=killed).returncode == -9
    if (step, when) == ("the start", "after"):
        run = Run("cut")
        assert run.wait(120).stage == "finished"
        assert "9" in text_of(run).splitlines()
        return
    until(lambda: not leftover_processes(), 180)
    if (step, when) != ("the record", "before") or Path("state/runs/cut").exists():
        assert Run("cut").status.over or not Path("state/runs/cut").exists()
        assert "9" not in text_of(Run("cut")).splitlines()


def test_what_would_need_this_computer_is_refused_at_submission(capsys: pytest.CaptureFixture[str]) -> None:
    Path("remote.py").write_text("import skyward as sky\nwith sky.ComputePool(provider=sky.Ray()):\n    pass\n")
    assert main(["run", "--detach", "remote.py"]) == 1
    assert "a detached run with Ray is not possible: it works with" in capsys.readouterr().err
    assert main(["runs"]) == 0
    assert "no run has kept anything" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "why"), [("grid", "there is a run grid already"), ("a/b", "is not the name of a run")]
)
def test_a_name_that_cannot_be_had_is_refused_before_the_program_runs(
    name: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = program("pass")
    assert submit(file, "--name", "grid").returncode == 0
    Run("grid").wait(120)
    Path(file).write_text("print('it runs')\n" + Path(file).read_text())
    assert main(["run", "--detach", "--name", name, file]) == 1
    said = capfd.readouterr()
    assert why in said.err
    assert said.out == ""


def test_the_pool_of_a_run_has_its_name_and_its_program_no_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """The GPUs are for the nodes' processes; the program could take one that they need."""
    file = program("print('gpus', repr(os.environ['CUDA_VISIBLE_DEVICES']), pool.name, square(2) >> pool)")
    Path(file).write_text(Path(file).read_text().replace(", history=False", ""))
    assert submit(file, "--name", "grid").returncode == 0
    run = Run("grid")
    assert run.wait(120).stage == "finished", text_of(run)
    assert "gpus '' grid 4" in text_of(run)
    assert main(["logs", "grid", "--node", "0"]) == 0
    assert "node 0  body 2" in capsys.readouterr().out
    assert main(["history", "--json"]) == 0
    assert '"pool": "grid"' in capsys.readouterr().out


def test_a_run_may_have_got_any_of_the_machines_that_its_pool_names() -> None:
    file = program("print(square(3) @ pool)")
    specs = "sky.Spec(nodes=2), sky.Spec(nodes=1), console=False"
    Path(file).write_text(Path(file).read_text().replace("nodes=2, console=False", specs))
    before = "import skyward.pool.opening as o\nreal = o.get_machines\n"
    before += "import skyward.pool.detached as d\n"
    before += "d.get_machines = lambda base, found, *rest: real(base, found[1:], *rest)"
    assert submit(file, "--name", "second", before=before).returncode == 0
    run = Run("second")
    assert run.wait(120).stage == "finished", text_of(run)
    assert "[9]" in text_of(run)


def test_a_process_that_the_program_starts_does_not_take_its_machines() -> None:
    file = program(
        """
        import subprocess
        code = "import skyward as sky; sky.ComputePool(nodes=2, console=False).open()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        print("child:", "one pool at a time" in done.stderr, square(4) >> pool, flush=True)
        """
    )
    assert submit(file, "--name", "child").returncode == 0
    run = Run("child")
    assert run.wait(120).stage == "finished", text_of(run)
    assert "child: True 16" in text_of(run)


def test_a_program_of_a_run_submits_no_other() -> None:
    file = program("sky.detach(lambda: 1, name='inner')")
    assert submit(file, "--name", "outer").returncode == 0
    assert Run("outer").wait(120).stage == "failed"
    assert "cannot submit another run" in text_of(Run("outer"))


def test_a_long_time_after_the_submission_the_machines_are_still_there() -> None:
    """The lease of a local run is renewed by its steward, also while the program has no pool."""
    shorter = (
        "import skyward.pool.detached, skyward.setup.hosts\n"
        "for each in (skyward.pool.detached, skyward.setup.hosts):\n    each.LOCAL_LEASE = 4.0"
    )
    file = program("print('ready', flush=True)")
    text = Path(file).read_text()
    again = "    time.sleep(12)\n    with sky.ComputePool(nodes=2, console=False, history=False) as pool:\n"
    again += "        print('still', square(5) @ pool, flush=True)\n"
    Path(file).write_text(text.replace('    print("the end"', again + '    print("the end"'))
    began = time.monotonic()
    assert submit(file, "--name", "idle", before=shorter).returncode == 0
    run = Run("idle")
    assert run.wait(180).stage == "finished", text_of(run)
    assert time.monotonic() - began > 12
    assert "still [25, 25]" in text_of(run)


def test_the_folder_and_the_socket_of_a_run_are_its_users_alone() -> None:
    """SEC-37."""
    file = program("print('ready', flush=True)\ntime.sleep(600)")
    assert submit(file, "--name", "mine").returncode == 0
    run = Run("mine")
    until(lambda: "ready" in text_of(run), 120)
    folder = Path("state/runs/mine/folder").resolve()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_file()} == {0o600}
    (head,) = [fact for fact in read(content(folder / "journal"))[0] if fact["fact"] == "head"]
    socket = Path(head["socket"])
    assert socket.stat().st_mode & 0o777 == 0o600
    assert socket.parent.stat().st_mode & 0o777 == 0o700
    assert run.stop().over


DETACH = """
import os, sys
import skyward as sky

@sky.compute
def double(x):
    return 2 * x

class Lacking(Exception):
    pass

def work(base, fail=False):
    values = [double(base + n) >> sky for n in range(3)]
    if fail:
        raise Lacking("no such data", base)
    return {"values": values, "both": double(1) @ sky, "process": os.getpid()}

if __name__ == "__main__":
    pool = sky.ComputePool(nodes=2, console=False, history=False)
    sky.detach(work, 10, fail=sys.argv[2] == "fail", pool=pool, name=sys.argv[1])
    os.kill(os.getpid(), 9)
"""


def detached(name: str, *words: str) -> None:
    Path("notebook.py").write_text(DETACH)
    done = subprocess.run([sys.executable, "notebook.py", name, *words], capture_output=True, timeout=300, check=False)
    assert done.returncode == -9, done.stderr.decode()


def test_a_function_returns_its_value_to_another_process() -> None:
    detached("value", "return")
    found = sky.attach("value").result(timeout=120)
    assert found["values"] == [20, 22, 24]
    assert found["both"] == [2, 2]
    assert found["process"] != os.getpid()


def test_a_function_raises_its_own_exception_in_another_process() -> None:
    detached("error", "fail")
    run = sky.attach("error")
    with pytest.raises(Exception, match="no such data") as caught:
        run.result(timeout=120)
    assert type(caught.value).__name__ == "Lacking"
    assert "raise Lacking" in "".join(caught.value.__notes__)
    assert (run.status.stage, run.status.code) == ("failed", 1)


def test_a_result_that_cannot_be_pickled_is_a_failure_that_says_so() -> None:
    run = sky.detach(threading.Lock, pool=sky.ComputePool(console=False, history=False), name="lock")
    with pytest.raises(SkywardError, match="returned a lock that cannot be pickled"):
        run.result(timeout=120)


def test_a_program_has_no_result_and_says_what_it_has() -> None:
    file = program("print('only this')")
    assert submit(file, "--name", "plain").returncode == 0
    with pytest.raises(SkywardError, match="no return value, only its output"):
        Run("plain").result(timeout=120)


def test_a_compute_function_is_not_detached() -> None:
    with pytest.raises(InvalidArgument, match="expected a plain function"):
        sky.detach(sky.compute(len), "x")
