from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pty
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from skyward import console as consoles
from skyward.console import attach
from skyward.errors import InvalidArgument
from skyward.events import (
    CallEnded,
    CallStarted,
    Event,
    NodeDown,
    NodePhase,
    NodeSample,
    NodeUp,
    Notice,
    Output,
    PoolClosed,
    PoolClosing,
    PoolOpened,
    PoolOpening,
)

ROOT = Path(__file__).resolve().parent.parent
PRELUDE = """
import contextlib, io, logging, os, subprocess, sys, time
from skyward.console import attach
from skyward.events import *

def opened(name, nodes=2):
    console = attach()
    console(PoolOpening(name, nodes, "Local"))
    console(PoolOpened(name, nodes, nodes, 0.1))
    return console
"""


def _load_recorder() -> Any:
    spec = importlib.util.spec_from_file_location("record_view", ROOT / "docs" / "record_view.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recorder = _load_recorder()


def on_terminal(
    script: str, tmp_path: Path, each: Callable[[Any, int], None] = lambda screen, terminal: None, columns: int = 80
) -> tuple[Any, bytes]:
    """The screen after the script has run on a terminal, and all that was written to it."""
    path = tmp_path / "script.py"
    path.write_text(PRELUDE + textwrap.dedent(script))
    screen, written = recorder.Screen(columns, 24), bytearray()

    def look(data: bytes, terminal: int) -> None:
        written.extend(data)
        each(screen, terminal)

    status = recorder.play([sys.executable, str(path)], screen, look, limit=60)
    assert status == 0, "\n".join(screen.everything())
    assert screen.cursor_shown
    assert screen.wraps
    return screen, bytes(written)


def plain(*events: Event) -> list[str]:
    file = io.StringIO()
    console = attach("plain", file=file)
    for event in events:
        console(event)
    console.close()
    return file.getvalue().splitlines()


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    outer, inner = pty.openpty()
    with open(inner, "w") as file:
        yield file
    os.close(outer)


def test_plain_lines_tell_the_story_of_a_pool() -> None:
    assert plain(
        PoolOpening("demo", 2, "Local"),
        NodePhase("demo", None, "finding machines"),
        NodePhase("demo", 0, "starting"),
        NodePhase("demo", 0, "starting"),
        NodePhase("demo", 1, "starting"),
        PoolOpened("demo", 2, 4, 1.23),
        CallStarted("demo", "c1", "fit", 0, 0),
        NodeSample("demo", 0, 98.0, 10**8, 1),
        Output("demo", 0, "stdout", "epoch 1 [bold]loss[/bold] 0.3"),
        Output("demo", 1, "stderr", "careful"),
        CallEnded("demo", "c1", "fit", 0, "ok", 0.5),
        CallEnded("demo", "c2", "fit", 1, "error", 0.5),
        NodeDown("demo", 1, "killed by SIGKILL"),
        NodeUp("demo", 1),
        Notice("demo", "one port is closed"),
        Notice("demo", "the disk is nearly full", "warning"),
        PoolClosing("demo"),
        PoolClosed("demo", 3.21, 12),
    ) == [
        "skyward: opening 2 nodes on Local",
        "skyward: finding machines",
        "skyward: node 0: starting",
        "skyward: node 1: starting",
        "skyward: pool open: 2 nodes, 4 slots, 1.2 s",
        "[node-0] epoch 1 [bold]loss[/bold] 0.3",
        "[node-1] careful",
        "skyward: node 1 is down: killed by SIGKILL",
        "skyward: node 1 is up again",
        "skyward: one port is closed",
        "skyward: warning: the disk is nearly full",
        "skyward: pool closed: 12 calls, 1 failed, 2 nodes, 3.2 s",
    ]


def test_plain_lines_go_to_the_stream_they_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    console = attach("plain")
    console(PoolOpening("demo", 1, "Local"))
    console(Output("demo", 0, "stdout", "result"))
    console(Output("demo", 0, "stderr", "complaint"))
    console.close()
    out, err = capsys.readouterr()
    assert out == "[node-0] result\n"
    assert err == "skyward: opening 1 node on Local\n[node-0] complaint\n"


def test_a_progress_bar_becomes_few_plain_lines() -> None:
    bar = [Output("demo", 0, "stderr", f"{i} %", progress=True) for i in range(100)]
    assert plain(*bar, Output("demo", 0, "stderr", "100 %")) == ["[node-0] 0 %", "[node-0] 100 %"]
    assert plain(*bar) == ["[node-0] 0 %", "[node-0] 99 %"], "the last state of a bar that was cut off"


def test_twenty_thousand_lines_from_four_threads_arrive_in_order() -> None:
    file = io.StringIO()
    console = attach("plain", file=file)

    def work(node: int) -> None:
        for i in range(5_000):
            console(Output("demo", node, "stdout", f"line {i}"))

    threads = [threading.Thread(target=work, args=(node,)) for node in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    console.close()
    lines = file.getvalue().splitlines()
    assert len(lines) == 20_000
    for node in range(4):
        assert [line for line in lines if line.startswith(f"[node-{node}]")] == [
            f"[node-{node}] line {i}" for i in range(5_000)
        ]


def test_a_silent_console_writes_nothing_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    for mode in (False, "silent"):
        console = attach(mode)
        console(PoolOpening("demo", 1, "Local"))
        console(Output("demo", 0, "stdout", "text"))
        console(PoolClosed("demo", 1.0, 1))
        assert threading.active_count() == before
        console.close()
        console.close()
    assert capsys.readouterr() == ("", "")


def test_an_unknown_mode_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"console='plian'.*perhaps 'plain' was meant.*'auto', 'live'"):
        attach("plian")


def test_a_reader_that_went_away_does_not_break_the_pool() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.suppress(BrokenPipeError), open(writing, "w") as file:
        console = attach("plain", file=file)
        for i in range(10_000):
            console(Output("demo", 0, "stdout", f"line {i}"))
        console.close()


@pytest.mark.parametrize(
    ("name", "value", "view"),
    [
        ("TERM", "xterm", True),
        ("TERM", "dumb", False),
        ("CI", "true", False),
        ("CI", "false", True),
        ("JENKINS_URL", "http://localhost", False),
    ],
)
def test_a_view_is_drawn_only_for_people(
    name: str, value: str, view: bool, terminal: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("CI", "TF_BUILD", "TEAMCITY_VERSION", "JENKINS_URL"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    console = attach(True, file=terminal)
    assert console.live is view
    console.close()


def test_notebooks_and_files_get_plain_lines(terminal: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    for file, mode in ((io.StringIO(), "auto"), (io.StringIO(), "live"), (terminal, "plain")):
        console = attach(mode, file=file)
        assert not console.live
        console.close()
    monkeypatch.setitem(sys.modules, "ipykernel", consoles)
    console = attach(file=terminal)
    assert not console.live
    console.close()


def test_plain_lines_do_without_rich() -> None:
    script = (
        PRELUDE + 'c = opened("demo"); c(Output("demo", 0, "stdout", "x")); c.close(); print("rich" in sys.modules)'
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[node-0] x\nFalse\n"


def test_on_a_terminal_lines_and_prints_are_intact_and_the_view_goes_away(tmp_path: Path) -> None:
    seen: list[str] = []
    script = """
    logging.basicConfig(format="%(message)s")
    real, real_err = sys.stdout, sys.stderr
    print("before")
    c = opened("demo", 12)
    assert sys.stdout is not real
    for i in range(12):
        c(CallStarted("demo", f"c{i}", "fit[red]", i, 0))
        c(NodeSample("demo", i, 97.0, 123_000_000, 1))
    c(Output("demo", 3, "stderr", " 50%|#####     |", progress=True))
    c(NodeDown("demo", 11, "killed by SIGKILL"))
    sys.stdin.readline()
    c(Output("demo", 0, "stdout", "loss [red]0.3[/red] \\x1b[32mgreen\\x1b[0m and \\x1b[2Jsafe"))
    c(Output("demo", 10, "stderr", "x" * 200))
    c(Output("demo", 1, "stdout", "日本語 👍 │"))
    c(Output("demo", 1, "stdout", "surrogate \\udcff"))
    print("unfinished", end="", flush=True)
    c(Output("demo", 3, "stdout", "50%"))
    print(", finished")
    print("step 1\\rstep 2", file=sys.stderr)
    logging.warning("logged")
    os.write(1, b"past Python\\n")
    sys.stdout.writelines(["one\\n", "two\\n"])
    for i in range(12):
        c(CallEnded("demo", f"c{i}", "fit", i, "ok", 0.1))
    c(PoolClosing("demo"))
    c(PoolClosed("demo", 3.2, 12))
    c.close()
    c.close()
    assert sys.stdout is real and sys.stderr is real_err
    assert logging.root.handlers[0].stream is real_err
    print("after")
    """

    def look(screen: Any, terminal: int) -> None:
        text = screen.text()
        if seen or not screen.cursor_shown or not text[screen.row + 14].startswith("✗"):
            return
        seen.extend(text)
        os.write(terminal, b"\n")

    screen, _ = on_terminal(script, tmp_path, look)
    assert any(line.startswith("skyward demo · Local · 12 nodes · 12 slots · 0 done, 0 failed · ") for line in seen)
    assert any(line.startswith("●  node-3   up      97 % CPU      123 MB  fit[red] ") for line in seen)
    assert "    50%|#####     |" in seen
    assert "✗  node-11  down  killed by SIGKILL" in seen
    lines = screen.everything()
    assert lines == [
        "before",
        "skyward: node 11 is down: killed by SIGKILL",
        "",
        "node-0  │ loss [red]0.3[/red] green and safe",
        "node-10 │ " + "x" * 70,
        "x" * 80,
        "x" * 50,
        "node-1  │ 日本語 👍 │",
        "node-1  │ surrogate ?",
        "node-3  │ 50%",
        "unfinished, finished",
        "step 2",
        "logged",
        "past Python",
        "one",
        "two",
        "skyward: pool closed: 12 calls, 0 failed, 12 nodes, 3.2 s",
        "after",
    ]
    assert screen.column == 0


def test_on_a_terminal_twenty_thousand_lines_scroll_by_and_none_is_lost(tmp_path: Path) -> None:
    script = """
    c = opened("demo", 4)
    for i in range(20_000):
        c(Output("demo", i % 4, "stdout", f"line {i}"))
        if i % 1000 == 0:
            print("mine", i)
    c.close()
    """
    screen, _ = on_terminal(script, tmp_path)
    lines = screen.everything()
    assert [line for line in lines if "│" in line] == [f"node-{i % 4} │ line {i}" for i in range(20_000)]
    assert [line for line in lines if "│" not in line] == [f"mine {i}" for i in range(0, 20_000, 1000)]


def test_two_pools_share_the_terminal(tmp_path: Path) -> None:
    seen: list[str] = []
    script = """
    real = sys.stdout
    a, b = opened("first"), opened("second")
    a(Output("first", 0, "stdout", "hello"))
    b(Output("second", 1, "stdout", "hello"))
    sys.stdin.readline()
    a(PoolClosed("first", 1.0, 1))
    a.close()
    assert sys.stdout is not real
    b(Output("second", 0, "stdout", "alone"))
    b(PoolClosed("second", 2.0, 2))
    b.close()
    assert sys.stdout is real
    """

    def look(screen: Any, terminal: int) -> None:
        text = "\n".join(screen.text())
        if not seen and screen.cursor_shown and "skyward first" in text and "skyward second" in text:
            seen.append(text)
            os.write(terminal, b"\n")

    screen, _ = on_terminal(script, tmp_path, look)
    lines = [line for line in screen.everything() if line]
    assert sorted(lines[:2]) == ["first node-0 │ hello", "second node-1 │ hello"]
    assert lines[2:] == [
        "skyward: pool first closed: 1 call, 0 failed, 2 nodes, 1.0 s",
        "node-0 │ alone",
        "skyward: pool closed: 2 calls, 0 failed, 2 nodes, 2.0 s",
    ]


def test_streams_that_the_script_replaced_stay_and_stale_ones_still_write(tmp_path: Path) -> None:
    script = """
    real = sys.stdout
    c = opened("demo")
    with contextlib.redirect_stdout(io.StringIO()) as mine:
        c.close()
        assert sys.stdout is mine
        print("captured")
    assert mine.getvalue() == "captured\\n"
    assert sys.stdout is not real and sys.stdout.isatty() and sys.stdout.fileno() == 1
    print("through the stale one")
    again = opened("demo")
    print("and once more")
    again.close()
    """
    screen, _ = on_terminal(script, tmp_path)
    assert screen.everything() == ["through the stale one", "and once more"]


def test_a_fork_prints_for_itself_and_an_exit_cleans_up(tmp_path: Path) -> None:
    """Faults rows on forks: the child has no thread that draws, and must not wait for one."""
    script = """
    c = opened("demo")
    child = os.fork()
    if child == 0:
        c(Output("demo", 0, "stdout", "not shown"))
        print("from the fork", flush=True)
        assert attach("plain").close() is None
        os._exit(0)
    os.waitpid(child, 0)
    print("from the script")
    """
    screen, _ = on_terminal(script, tmp_path)
    assert screen.everything() == ["from the fork", "from the script"]


def test_a_question_can_be_asked_above_the_view(tmp_path: Path) -> None:
    asked: list[str] = []
    script = """
    c = opened("demo")
    name = input("name? ")
    print("hello", name)
    c.close()
    """

    def look(screen: Any, terminal: int) -> None:
        text = screen.text()
        if not asked and "name?" in text and any(line.startswith("○  node-1") for line in text):
            asked.append(text[screen.row])
            os.write(terminal, b"bob\n")

    screen, _ = on_terminal(script, tmp_path, look)
    assert asked == ["name?"]
    assert screen.everything() == ["name? bob", "hello bob"]


def test_the_view_can_be_drawn_as_a_picture(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        PRELUDE
        + textwrap.dedent("""
        c = opened("demo")
        for i in range(2):
            c(CallStarted("demo", f"c{i}", "fit", i, 0))
            c(Output("demo", i, "stdout", f"loss 0.{i}"))
        print("drawn at once", flush=True)
        c.close()
        """)
    )
    picture = tmp_path / "view.svg"
    command = [sys.executable, str(ROOT / "docs" / "record_view.py"), "--output", str(picture), str(script)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    svg = picture.read_text().replace("&#160;", " ")
    assert "loss 0.1" in svg
    assert "skyward demo" in svg
    assert "url(http" not in svg
