"""`sky history`, `sky logs`, `sky view`, `sky top`: what they say of pools that run, were closed, or were killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from skyward import events
from skyward.cli import main
from skyward.history.recorder import Recorder
from tests.support.programs import USUAL_SIGNALS
from tests.support.waiting import read_until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path))
    return tmp_path


def _record(pool: str, close: bool = True) -> Recorder:
    recorder = Recorder(pool)
    found = [
        events.PoolOpening(pool, 2, "Local"),
        events.PoolOpened(pool, 2, 2, 0.1),
        events.Output(pool, 0, "stdout", "hello \x1b[2Jworld", "c1"),
        events.Output(pool, 1, "stderr", "other", "c2"),
        events.CallStarted(pool, "c1", "train", 0, 0, 0, "3"),
        events.CallEnded(pool, "c1", "train", 0, "error", 0.5, 0, "Traceback\nValueError: no"),
    ]
    for event in found:
        recorder.record(event)
    if close:
        recorder.record(events.PoolClosed(pool, 1.0, 1))
        recorder.close()
    recorder.flush() if not close else None
    return recorder


def _sky(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*USUAL_SIGNALS, sys.executable, "-m", "skyward", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_pools_that_were_closed_and_killed_are_listed_with_their_calls(capsys: pytest.CaptureFixture[str]) -> None:
    _record("first")
    _record("second", close=False).close()
    assert main(["history"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split()[0] == "second"
    assert "killed" in printed[1]
    assert "closed" in printed[2]
    assert main(["history", "--json", "--limit", "1"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["pool"], row["nodes"], row["calls"], row["failed"]) == ("second", 2, 1, 1)


def test_an_empty_history_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history"]) == 0
    assert "no pool was opened" in capsys.readouterr().out
    assert main(["logs"]) == 1
    assert "none was opened" in capsys.readouterr().err


def test_logs_have_output_and_failures_and_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    _record("run")
    assert main(["logs", "run"]) == 0
    printed = capsys.readouterr().out
    assert "node 0  hello world" in printed
    assert "train has failed: ValueError: no" in printed
    assert "\x1b" not in printed
    assert main(["logs", "--node", "1"]) == 0
    assert capsys.readouterr().out.split()[1:] == ["node", "1", "other"]
    assert main(["logs", "run", "--json", "--node", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "other"


def test_logs_follow_a_pool_until_it_is_closed() -> None:
    recorder = _record("run", close=False)
    process = _sky("logs", "run", "--follow")
    try:
        read_until(process, "train has failed")
        recorder.record(events.Output("run", 0, "stdout", "later"))
        recorder.flush()
        read_until(process, "later")
        recorder.record(events.PoolClosed("run", 1.0, 1))
        recorder.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_pool_that_is_gone_has_a_page_too() -> None:
    _record("run")
    process = _sky("view", "run")
    try:
        address = read_until(process, "http://")[-1].split()[-1]
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert b"data-key" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_top_shows_a_pool_until_it_is_closed_and_refuses_one_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = _record("run", close=False)
    process = _sky("top", "run")
    try:
        read_until(process, "pool open")
        recorder.record(events.PoolClosed("run", 1.0, 1, time=time.time()))
        recorder.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert main(["top", "run"]) == 1
    assert "`sky view run` shows how it went" in capsys.readouterr().err
