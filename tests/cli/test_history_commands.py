"""`sky history`, `sky logs`, `sky view`, `sky top`: what they say of pools that run, were closed, or were killed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
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
    assert all("no price" in line for line in printed[1:])
    assert main(["history", "--json", "--limit", "1"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["pool"], row["nodes"], row["calls"], row["failed"]) == ("second", 2, 1, 1)


def test_the_history_counts_calls_that_were_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = _record("run", close=False)
    recorder.record(events.CallEnded("run", "c2", "train", 0, "cancelled", 0.5, items=3))
    recorder.close()
    assert main(["history", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["calls"], row["failed"], row["stopped"]) == (4, 1, 3)


def test_the_cost_of_a_pool_is_said_where_machines_have_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    for pool, price in (("priced", 3600.0), ("mystery", float("inf"))):
        recorder = Recorder(pool)
        recorder.record(events.PoolOpening(pool, 1, "AWS", time=1000.0))
        recorder.record(events.PoolCost(pool, price, time=1000.0))
        recorder.record(events.PoolClosed(pool, 2.0, 0, time=1002.0))
        recorder.close()
    assert main(["history"]) == 0
    mystery, priced = sorted(capsys.readouterr().out.splitlines()[1:])
    assert " $2.00 " in priced
    assert " unknown " in mystery


def test_a_pool_that_is_not_there_gets_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for pool in ("sweep", "training", "other"):
        _record(pool)
    assert main(["logs", "swep"]) == 1
    assert capsys.readouterr().err == (
        "sky: there is no history of a pool 'swep' on this computer. Did you mean sweep? `sky history` lists pools.\n"
    )
    assert main(["logs", "zzzz"]) == 1
    assert "on this computer. `sky history` lists pools.\n" in capsys.readouterr().err


def test_an_empty_history_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history"]) == 0
    assert "no pool was opened" in capsys.readouterr().out
    assert main(["logs"]) == 1
    assert "none was opened" in capsys.readouterr().err
    for limit in ("0", "-3", "many"):
        with pytest.raises(SystemExit) as ended:
            main(["history", f"--limit={limit}"])
        assert ended.value.code == 2
        assert f"{limit} is not a whole number of at least 1" in capsys.readouterr().err


def test_logs_have_output_and_failures_and_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    _record("run")
    assert main(["logs", "run"]) == 0
    printed = capsys.readouterr().out
    assert "node 0  hello world" in printed
    assert ") failed on node 0: ValueError: no" in printed
    assert "\x1b" not in printed
    assert main(["logs", "--node", "1"]) == 0
    assert capsys.readouterr().out.split()[1:] == ["node", "1", "other"]
    assert main(["logs", "run", "--json", "--node", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "other"
    assert main(["logs", "run", "--node", "99"]) == 1
    assert "pool run has no node 99: it has nodes 0 to 1." in capsys.readouterr().err


def test_logs_follow_a_pool_until_it_is_closed() -> None:
    recorder = _record("run", close=False)
    process = _sky("logs", "run", "--follow")
    try:
        read_until(process, ") failed on node 0")
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


def _record_of_the_past(pool: str, now: float) -> Recorder:
    """A pool of 130 seconds with a call that runs since 70 and one that is over, as another program has written it."""
    recorder = Recorder(pool)
    for event in (
        events.PoolOpening(pool, 1, "Local", time=now - 130),
        events.NodePhase(pool, 0, "checking the host", time=now - 129),
        events.PoolOpened(pool, 1, 2, 1.0, time=now - 128),
        events.Notice(pool, "its page, for one browser: http://127.0.0.1:1/?token=secret", time=now - 128),
        events.CallStarted(pool, "c1", "load", 0, 0, 0, time=now - 100),
        events.Progress(pool, 0, 1, 9, {}, "c1", time=now - 99),
        events.CallEnded(pool, "c1", "load", 0, "ok", 10.0, 0, time=now - 90),
        events.CallStarted(pool, "c2", "train", 0, 0, 0, time=now - 70),
        events.Progress(pool, 0, 3, 12, {}, "c2", time=now - 69),
    ):
        recorder.record(event)
    recorder.flush()
    return recorder


def _minutes(text: str, pattern: str) -> int:
    """The seconds of the first time like 2:10 that follows the pattern."""
    minutes, seconds = re.findall(rf"{pattern}(\d+):(\d\d)", text)[0]
    return int(minutes) * 60 + int(seconds)


def test_top_in_a_pipe_prints_the_present_state_once_with_the_times_of_the_events() -> None:
    began = time.time()
    recorder = _record_of_the_past("run", began)
    process = _sky("top", "run")
    try:
        printed, _ = process.communicate(timeout=120)
    finally:
        recorder.close()
    late = time.time() - began + 1
    assert process.returncode == 0
    head, node, bar = printed.splitlines()
    assert head.startswith("skyward run · Local · 1 node · 2 slots · 1 ok, 0 failed · ")
    assert 130 <= _minutes(head, "· ") <= 130 + late
    assert 70 <= _minutes(node, "train ") <= 70 + late
    assert bar.strip() == "3/12 (25%)"
    assert "token" not in printed


def test_top_on_a_terminal_counts_from_the_events_until_the_pool_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.time()
    recorder = _record_of_the_past("run", began)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    command = [*USUAL_SIGNALS, sys.executable, "-m", "skyward", "top", "run"]
    env = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    found = ""
    try:
        while "train " not in found:
            found += os.read(ours, 1 << 16).decode(errors="replace")
        late = time.time() - began + 1
        assert 130 <= _minutes(found, "1 ok, 0 failed · ") <= 130 + late
        assert 70 <= _minutes(found, "train ") <= 70 + late
        recorder.record(events.Notice("run", "later"))
        recorder.record(events.PoolClosed("run", 131.0, 2))
        recorder.close()
        with contextlib.suppress(OSError):  # nobody has the terminal open any more
            while piece := os.read(ours, 1 << 16):
                found += piece.decode(errors="replace")
        assert process.wait(60) == 0
    finally:
        os.close(ours)
        process.kill()
        process.wait()
    assert "later" in found
    assert "closed: 2 calls" in found
    assert "token" not in found
    assert main(["top", "run"]) == 1
    assert "`sky view run` shows how it went" in capsys.readouterr().err
