"""`sky plan`: programs run up to their pool, and nothing is created."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from skyward.cli import main
from tests.support.cloud import Cloud

TRAINING = """
import sys
import skyward as sky

print("reading data", sys.argv[1:])
with sky.ComputePool(provider=sky.AWS(), nodes=int(sys.argv[1]), accelerator="T4", name="training") as pool:
    raise SystemExit("the pool was opened")
with sky.ComputePool(name="second"):
    raise SystemExit("the second pool was opened")
"""
LOCAL = """
import skyward as sky

try:
    with sky.ComputePool(nodes=3, name="here"{more}):
        raise SystemExit("the pool was opened")
except Exception as exc:
    raise SystemExit("it was taken for an error")
finally:
    print("cleaned up")
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _program(text: str, **more: str) -> str:
    Path("train.py").write_text(text.format(**more) if more else text)
    return "train.py"


def test_a_program_is_stopped_where_it_opens_its_first_pool(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", _program(TRAINING), "--", "2"]) == 0
    printed = capsys.readouterr().out
    assert "reading data ['2']" in printed
    assert "train.py, line 6: pool training, 2 nodes\n" in printed
    assert "1. 2 x g4dn.xlarge (spot, us-east-1a) with 1 x T4 (16GB), $0.3656 an hour" in printed
    assert "nothing was created: the program was stopped there" in printed
    assert "second" not in printed
    assert not cloud.machines.all
    assert not any(call.action.startswith(("Run", "Create", "Import")) for call in cloud.calls)


def test_json_is_one_object_whatever_the_program_prints(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", _program(TRAINING), "--json", "--", "2"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "reading data" in said.err
    assert (found["file"], found["line"], found["pool"], found["nodes"]) == ("train.py", 6, "training", 2)
    assert found["possible"] is True
    assert found["hourly_cost"] == pytest.approx(0.3656)
    (plan,) = found["plans"]
    assert plan["provider"] == "AWS"
    assert plan["offers"][0]["machine"] == "g4dn.xlarge"
    assert any("traffic" in note for note in plan["notes"])


def test_a_plan_that_cannot_be_carried_out_is_told_by_the_status(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--provider", "aws", "--accelerator", "MI300X"]) == 1
    assert "no machine in us-east-1 has it" in capsys.readouterr().out
    assert main(["plan", _program(LOCAL, more=', accelerator="MI300X"'), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["possible"] is False
    assert found["hourly_cost"] is None
    assert found["plans"][0]["ruled_out"][0]["what"] == "this computer"


def test_clean_up_runs_and_no_handler_of_errors_keeps_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", _program(LOCAL, more="")]) == 0
    printed = capsys.readouterr().out
    assert "cleaned up" in printed
    assert "line 5: pool here, 3 nodes\n  1. this computer, no price\n" in printed


@pytest.mark.parametrize(
    "program",
    [
        "import asyncio, skyward as sky\n\n\nasync def main():\n    async with sky.ComputePool(name='x'):\n"
        "        print('it is open')\n\n\nasyncio.run(main())\n",
        "import threading, skyward as sky\n\n\ndef work():\n    with sky.ComputePool(name='x'):\n"
        "        print('it is open')\n\n\nthread = threading.Thread(target=work)\nthread.start()\nthread.join()\n",
        "import skyward as sky\n\npool = sky.ComputePool(name='x')\npool.open()\nprint('it is open')\n",
    ],
    ids=["asyncio", "thread", "open()"],
)
def test_a_pool_is_seen_however_it_is_opened(program: str) -> None:
    """In a process of its own: how threads end is up to Python, and here to pytest."""
    command = [sys.executable, "-m", "skyward", "plan", _program(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "pool x, 1 node\n" in done.stdout
    assert "it is open" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("body", ["print(square(3) >> pool)", "print(square(3) >> sky)"])
def test_a_program_for_sky_run_has_the_pool_that_sky_run_opens(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sky.toml").write_text("[pools.two]\nnodes = 2\n")
    program = f"import skyward as sky\n\n\n@sky.compute\ndef square(n):\n    return n * n\n\n\n{body}\n"
    assert main(["plan", _program(program)]) == 0
    printed = capsys.readouterr().out
    assert ", 2 nodes\n" in printed
    assert "this is the pool that `sky run train.py` opens" in printed


def test_several_specs_are_listed_in_the_order_in_which_they_are_tried(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = "sky.Spec(provider=sky.AWS(), accelerator='A100'), sky.Spec(provider=sky.AWS(), accelerator='T4')"
    program = f"import skyward as sky\nwith sky.ComputePool({specs}):\n    pass\n"
    assert main(["plan", _program(program), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["plans"]
    assert first["offers"][0]["accelerator"] == "T4"
    assert second["offers"][0]["accelerator"] == "A100"
    assert found["hourly_cost"] == first["hourly_cost"] < second["hourly_cost"]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('done')\n", "opened no pool"),
        ("raise LookupError('of the program')\n", "LookupError: of the program"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)\n", "exited with 3 before it opened a pool"),
    ],
)
def test_a_program_without_a_pool_says_so(program: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", _program(program)]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert "runpy" not in err


def test_a_missing_file_and_a_missing_login_are_said_in_words(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "no.py"]) == 1
    assert "no.py: no such file" in capsys.readouterr().err
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert main(["plan", _program(TRAINING), "--", "2"]) == 1
    assert "no credentials were found" in capsys.readouterr().out
