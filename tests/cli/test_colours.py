"""Colours of the commands and of the live view: on a terminal, with NO_COLOR, with FORCE_COLOR, in a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyward import events
from skyward.history.recorder import Recorder

COLOUR = re.compile(r"\x1b\[(?!0?m)[0-9;:]*m")  # a reset is none


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path))
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return tmp_path


def _record(*more: events.Event) -> Recorder:
    recorder = Recorder("run")
    for event in (
        events.PoolOpening("run", 1, "Local"),
        events.PoolOpened("run", 1, 1, 0.1),
        events.Output("run", 0, "stdout", "\x1b[31mred\x1b[0m", "c1"),
        *more,
    ):
        recorder.record(event)
    recorder.flush()
    return recorder


def _on_a_terminal(*words: str, **env: str) -> str:
    """What a command writes to a terminal, until it ends."""
    return _written_to_a_terminal([sys.executable, "-m", "skyward", *words], env)


def _written_to_a_terminal(command: list[str], env: dict[str, str]) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **env})
    os.close(theirs)
    found = b""
    try:
        while piece := os.read(ours, 1 << 16):
            found += piece
    except OSError:
        pass  # nobody has the terminal open any more
    finally:
        os.close(ours)
        process.wait(60)
    return found.decode()


def _in_a_pipe(*words: str, **env: str) -> str:
    command = [sys.executable, "-m", "skyward", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=120, check=True)
    return done.stdout


def test_logs_keep_the_colours_of_bodies_on_a_terminal_unless_none_are_wanted() -> None:
    _record().close()
    assert "\x1b[31mred" in _on_a_terminal("logs", "run")
    assert "red" in (bare := _on_a_terminal("logs", "run", NO_COLOR="1"))
    assert not COLOUR.search(bare)
    assert not COLOUR.search(_in_a_pipe("logs", "run"))
    assert "\x1b[31mred" in _in_a_pipe("logs", "run", FORCE_COLOR="1")
    assert not COLOUR.search(_in_a_pipe("logs", "run", FORCE_COLOR="1", NO_COLOR="1"))
    assert "\x1b[31mred" in _on_a_terminal("logs", "run", NO_COLOR=""), "an empty variable counts as none"


@pytest.mark.parametrize("words", [("--help",), ("ps", "--here"), ("history",), ("doctor",), ("exec", "--help")])
def test_commands_write_no_colour_where_none_is_wanted(words: tuple[str, ...]) -> None:
    printed = _on_a_terminal(*words, NO_COLOR="1")
    assert len(printed) > 5
    assert not COLOUR.search(printed)


def test_the_live_view_of_a_pool_has_colours_unless_none_are_wanted() -> None:
    """The view itself, and what bodies write above it."""
    source = (
        "import sys, time\n"
        "from skyward import events\n"
        "from skyward.view.console import attach\n"
        "console = attach('live')\n"
        "for event in (events.PoolOpening('run', 1, 'Local'), events.PoolOpened('run', 1, 1, 0.1),\n"
        "    events.Output('run', 0, 'stdout', '\\x1b[31mred\\x1b[0m'), events.Notice('run', 'careful', 'warning'),\n"
        "    events.NodeSample('run', 0, 50.0, 1 << 20, 1)):\n"
        "    console(event)\n"
        "time.sleep(0.6)\n"
        "console(events.PoolClosed('run', 1.0, 1))\n"
        "console.close()\n"
    )
    shown = {
        setting: _written_to_a_terminal([sys.executable, "-c", source], {"NO_COLOR": setting}) for setting in ("", "1")
    }
    assert all("red" in text and "careful" in text for text in shown.values())
    assert COLOUR.search(shown[""])
    assert "\x1b[31mred" in shown[""]
    assert not COLOUR.search(shown["1"])
