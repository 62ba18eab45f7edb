"""`sky down` of a pool that a program has open in another terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyward.cli import main
from tests.support.waiting import read_until

_PROGRAM = """
import time
import skyward as sky

@sky.compute
def work():
    time.sleep(600)

with sky.ComputePool(nodes=1, name="lab-{pid}", console="plain") as pool:
    waiting = work() > pool
    print("opened", flush=True)
    try:
        waiting.result()
    except sky.errors.PoolClosed:
        print("call ended", flush=True)
"""


def test_a_pool_of_another_terminal_is_closed_by_its_program_which_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, file = f"lab-{os.getpid()}", tmp_path / "train.py"  # a name that no other test run has
    file.write_text(_PROGRAM.format(pid=os.getpid()))
    command = [sys.executable, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        try:
            read_until(program, "opened")
            assert main(["down", name]) == 0
            planned = capsys.readouterr().out.splitlines()
            assert main(["down", name, "--yes", "--json"]) == 0
            (line,) = capsys.readouterr().out.splitlines()
            output = program.communicate(timeout=60)[0]
        finally:
            program.kill()
    who = f"open in train.py, process {program.pid}"
    assert planned == [
        f"{name}: would end (it is {who}; its calls are stopped)",
        "nothing was ended; add --yes to do it",
    ]
    place = {"kind": "pool", "pool": name, "provider": "Local", "region": ""}
    assert json.loads(line) == {**place, "did": "ended", "why": f"it was {who}", "receipt": None}
    assert program.returncode == 0
    assert "`sky down` in another terminal closes this pool." in output
    assert "1 call was stopped: the pool was closed before it ended." in output
    assert "call ended" in output


def test_without_names_the_command_line_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["down"])
    assert ended.value.code == 2
    assert "no pools named. Name some, or use --all, --expired or --warm" in capsys.readouterr().err
