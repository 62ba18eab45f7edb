"""What a tab that was left open says when the program of the pool ends, by itself or killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.history.recorder import Recorder
from skyward.history.store import find
from skyward.view.page.server import PageServer, Streams
from tests.support import browser as support
from tests.support.waiting import until

needs_browser = pytest.mark.skipif(bool(support.unavailable()), reason=support.unavailable() or "there is one")

_PROGRAM = """
import sys, time
from pathlib import Path
import skyward as sky
from skyward.view.page import server

server._TOLD = server._SHOWN = 60.0  # the browser of a busy machine is slow

@sky.compute
def wait(path):
    step = 0
    while not Path(path).exists():
        step += 1
        print("still here", step)
        sky.progress(min(step, 999), 1000)
        time.sleep(0.1)
    return 1

with sky.ComputePool(nodes=2, console=False, name=sys.argv[1]) as pool:
    print(pool.view(), flush=True)
    assert sum(wait(sys.argv[2]) @ pool) == 2
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with support.browser() as driver:
        yield driver


def _text(driver: Any, id: str) -> str:
    return driver.execute_script("return document.getElementById(arguments[0]).textContent", id)


def _start(name: str, gate: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, name, str(gate)], stdout=subprocess.PIPE, text=True)


def _address(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def _running(driver: Any) -> bool:
    return "running2" in _text(driver, "figures")


@needs_browser
@pytest.mark.parametrize("hidden", [False, True], ids=["in sight", "in the background"])
def test_a_tab_that_was_left_open_shows_how_the_pool_ended(chromium: Any, tmp_path: Path, hidden: bool) -> None:
    gate = tmp_path / "gate"
    with _start("ends", gate) as program:
        try:
            chromium.get(_address(program))
            until(lambda: _running(chromium), what="two ranks that run")
            if hidden:
                chromium.execute_script(
                    "Object.defineProperty(document, 'hidden', { value: true });"
                    "document.dispatchEvent(new Event('visibilitychange'))"
                )
                until(lambda: chromium.execute_script("return source.readyState") == 1, what="its quiet stream")
            gate.touch()
            assert program.wait(120) == 0
        finally:
            program.kill()
    until(lambda: _text(chromium, "state") == "closed")
    assert "done2" in _text(chromium, "figures")
    until(lambda: "The program has ended. `sky view ends` shows the whole run." in _text(chromium, "problem"))
    assert "running" not in _text(chromium, "calls")
    assert _text(chromium, "nodes").count("gone") == 2


@needs_browser
def test_a_running_call_says_how_far_it_is_and_a_killed_program_is_said_to_be_gone(
    chromium: Any, tmp_path: Path
) -> None:
    with _start("killed", tmp_path / "gate") as program:
        try:
            chromium.get(_address(program))
            until(lambda: _running(chromium) and "of 1000 (" in _text(chromium, "calls"), what="how far it is")
            took = "return document.querySelector('#calls tr td:nth-child(5)').textContent"
            first = str(chromium.execute_script(took))
            until(lambda: chromium.execute_script(took) not in ("", first), what="seconds that go on")
            chromium.execute_script("document.querySelector('#calls tr').click()")
            until(lambda: "still here" in _text(chromium, "details"), what="output of a call that runs")
            lines = _text(chromium, "details").count("still here")
            until(lambda: _text(chromium, "details").count("still here") > lines, what="more of its output")
            assert "of 1000 (" in _text(chromium, "details")
        finally:
            program.kill()
    until(lambda: "If it has ended, `sky view killed` shows the whole run." in _text(chromium, "problem"))
    assert _text(chromium, "state") == "no answer"
    assert float(chromium.execute_script("return getComputedStyle(document.querySelector('header')).opacity")) < 1


def test_a_pool_that_closes_does_not_wait_when_no_page_is_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("skyward.view.page.server._TOLD", 3600.0)
    monkeypatch.setattr("skyward.view.page.server._SHOWN", 3600.0)
    recorder = Recorder("alone", tmp_path)
    server = PageServer(find("alone", tmp_path))
    server.show_end()
    server.close()
    recorder.close()


def test_closing_waits_for_pages_that_were_told_and_not_for_one_that_went_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.view.page.server._TOLD", 3600.0)
    monkeypatch.setattr("skyward.view.page.server._SHOWN", 3600.0)
    streams = Streams()
    assert streams.begin("a")
    assert streams.begin("b")
    streams.wake()
    streams.tell("a")
    streams.show("a")
    streams.end("b")
    streams.wait_shown()
    streams.end("a")
    streams.wait_ended()


def test_there_are_only_so_many_streams_at_a_time() -> None:
    streams = Streams()
    assert all(streams.begin(f"k{number}") for number in range(32))
    assert not streams.begin("one more")
    streams.end("k0")
    assert streams.begin("one more")
