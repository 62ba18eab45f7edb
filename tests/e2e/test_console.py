"""What a program shows of a real pool, on a terminal and without one: every line once, whole, and in time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import load_program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import logging, sys, time, warnings
logging.basicConfig(format="%(levelname)s %(message)s")
import skyward as sky

@sky.compute
def talk():
    print("printed once")
    print("complained once", file=sys.stderr)
    logging.getLogger("mine").warning("logged once")
    warnings.warn("warned {}\\nin two lines".format("once"))

@sky.compute
def train(n):
    sky.progress(n, 40, loss=0.5)
    time.sleep(0.1)

print("before")
with sky.ComputePool(name="demo") as pool:
    print("the pool is open")
    pool.on_event(lambda event: None)
    pool._emit(sky.events.Notice("demo", "noticed once\\nin two lines", "warning"))
    talk() >> pool
    print("after the call")
    sky.gather(*(train(n) for n in range(40))) >> pool
    print("after the group")
print("the end")
"""

recorder = load_program(ROOT / "docs" / "record_view.py")
ONCE = ("printed once", "complained once", "logged once", "warned once", "noticed once", "the pool is open", "the end")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("CI", "TF_BUILD", "TEAMCITY_VERSION", "JENKINS_URL"):
        monkeypatch.delenv(name, raising=False)
    return path


def test_without_a_terminal_everything_is_said_once_and_in_order(program: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    lines = done.stdout.splitlines()
    for text in ONCE:
        assert sum(text in line for line in lines) == 1, f"{text}: {done.stdout}"
    at = {text: next(i for i, line in enumerate(lines) if text in line) for text in (*ONCE, "pool open:", "after the")}
    assert lines[at["warned once"] + 1] == "[node-0] in two lines"
    assert lines[at["noticed once"] + 1] == "in two lines"
    assert lines[at["pool open:"] + 1] == "the pool is open" or at["pool open:"] < at["printed once"]
    assert at["printed once"] < at["after the"]
    assert [line for line in lines if "39/40" in line] == ["[node-0] 39/40 (98%) loss 0.5"]
    assert "pool closed" in lines[at["the end"] - 1]


def test_standard_output_alone_is_in_order(program: Path) -> None:
    done = subprocess.run([sys.executable, "-u", str(program)], capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if "(" not in line]  # reports of progress have per cent
    assert lines == [
        "before",
        "the pool is open",
        "[node-0] printed once",
        "after the call",
        "after the group",
        "the end",
    ]


def test_on_a_terminal_everything_is_said_once_and_warnings_keep_their_lines(program: Path) -> None:
    views: list[str] = []
    screen = recorder.Screen(160, 30)

    def look(data: bytes, terminal: int) -> None:
        if screen.cursor_shown:
            views.extend(screen.text())

    status = recorder.play([sys.executable, str(program)], screen, look, limit=240)
    lines: list[Any] = screen.everything()
    assert status == 0, "\n".join(lines)
    for text in ONCE:
        assert sum(text in line for line in lines) == 1, f"{text}: {lines}"
    at = {text: next(i for i, line in enumerate(lines) if text in line) for text in ("warned once", "noticed once")}
    assert lines[at["warned once"] + 1] == "node-0 │ in two lines"
    assert lines[at["noticed once"] + 1] == "in two lines"
    assert any(re.search(r"  train: \d+/40, [\d.]+/s, [\d.]+ s left", line) for line in views)
    assert any(re.search(r"· \d+ queued ·", line) for line in views)
    assert any(re.search(r"node-0  up  +(\d\d|100)% busy", line) for line in views)
    assert any("/40 (" in line and "loss 0.5" in line for line in views)


FAILING = """
import os
import skyward as sky

known = sky.Secret("correct-horse-battery")

@sky.compute
def train(number, text="", token=""):
    if number == 1:
        raise ValueError("no luck")
    if number == 2:
        os._exit(3)
    return number

with sky.ComputePool(console="plain", history=False) as pool:
    results = sky.gather(
        train(0), train(1, "correct-horse-battery", token="abc"), train(2), return_exceptions=True
    ) >> pool
    print("after the group", flush=True)
    pool.map(train, [3, 1], return_exceptions=True)
"""


def test_failures_in_the_place_of_results_are_shown_with_arguments_and_without_secrets(program: Path) -> None:
    program.write_text(FAILING)
    done = subprocess.run(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    lines = done.stdout.splitlines()
    shown = [line for line in lines if " failed on node 0: " in line]
    assert shown[0] == "skyward: train(1, '***', token=***) failed on node 0: ValueError: no luck", done.stdout
    assert shown[1].startswith("skyward: train(2) failed on node 0: TaskCrashed: ")
    assert shown[2:] == ["skyward: train(1) failed on node 0: ValueError: no luck"]
    assert lines.index(shown[1]) < lines.index("after the group")
