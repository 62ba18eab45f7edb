from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyward.view import terminal
from skyward.view.terminal import Feed, clean, plain, styled, table
from tests.support.programs import load_program

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import contextlib, io, logging, os, subprocess, sys, time
from skyward.view.console import attach
from skyward.events import *

def opened(name, nodes=2):
    console = attach()
    console(PoolOpening(name, nodes, "Local"))
    console(PoolOpened(name, nodes, nodes, 0.1))
    return console
"""


recorder = load_program(ROOT / "docs" / "record_view.py")


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


class Gate:
    """A sink that takes batches only while it is open."""

    def __init__(self) -> None:
        self.open, self.entered, self.text = threading.Event(), threading.Event(), ""

    def __call__(self, batch: list[tuple[str, str]]) -> None:
        self.entered.set()
        self.open.wait()
        self.text += "".join(text for _, text in batch)


def test_what_moves_the_cursor_is_removed_and_colours_stay() -> None:
    assert clean("plain [red]text[/red]") == "plain [red]text[/red]"
    assert clean("a\x1b[2J\x1b[3;4Hb\x07\x1b]0;title\x07c\rd\x1b7e") == "abcde"
    assert clean("\x1b[31mred") == "\x1b[31mred\x1b[0m"
    assert clean("\x1b[31mred\ttab", colours=False) == "red tab"
    assert clean("cut \x1b[") == "cut "


def test_what_turns_text_around_is_removed() -> None:
    """SEC-35: after U+202E a terminal shows `txt.exe` as `exe.txt`; words of other scripts stay as they are."""
    for character in "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069":
        assert clean(f"a{character}b") == "ab"
        assert clean(f"\x1b[31ma{character}b", colours=False) == "ab"
    hello = "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627"
    assert clean(hello) == hello


class _Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def fileno(self) -> int:
        return 1


def test_plain_lines_are_cleaned_on_a_terminal_and_kept_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-35: what nodes print must not act on the terminal; a file has every byte of it."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    told = "[node-0] a\x1b]0;title\x07\u202eb\x1b[2J\n[node-1] \x1b[31mred\x1b[0m\n"
    terminal, file = _Stream(terminal=True), _Stream(terminal=False)
    plain(terminal)([("stdout", told)])
    plain(file)([("stdout", told)])
    assert terminal.getvalue() == "[node-0] ab\n[node-1] \x1b[31mred\x1b[0m\x1b[0m\n"
    assert file.getvalue() == told


def test_the_user_can_refuse_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert styled("a", "31") == "\x1b[31ma\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("a", "31") == "a"


def test_a_table_fits_its_width_also_with_wide_characters() -> None:
    rows = [
        [("節点", ""), ("up", ""), ("a long text that has no room", "")],
        [("n", ""), ("down", "")],
        [("one cell", "")],
    ]
    assert table(rows, 20) == ["節点  up  a long tex", "n     down", "one cell"]
    assert table(rows, 3)[0] == "節 "


def test_a_feed_makes_the_producer_wait_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_LIMIT", 10_000)
    gate = Gate()
    feed = Feed(gate)
    lines = [f"line {i}\n" for i in range(2_000)]
    producer = threading.Thread(target=lambda: [feed.put("stdout", line) for line in lines])
    producer.start()
    assert gate.entered.wait(60)
    gate.open.set()
    producer.join(60)
    feed.close()
    assert gate.text == "".join(lines)


def test_a_feed_that_cannot_write_at_all_counts_what_it_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults row 41: memory stays bounded, and what is dropped is counted and shown."""
    monkeypatch.setattr(terminal, "_LIMIT", 10_000)
    monkeypatch.setattr(terminal, "_STALL", 0.05)
    gate = Gate()
    feed = Feed(gate)
    for i in range(2_000):
        feed.put("stdout", f"line {i}\n")
    monkeypatch.setattr(terminal, "_STALL", 30.0)
    gate.open.set()
    feed.close()
    shown = gate.text.splitlines()
    said = [line for line in shown if line.startswith("skyward: ")]
    kept = [line for line in shown if line.startswith("line ")]
    assert len(said) == 1
    assert said[0] == f"skyward: {2_000 - len(kept):,} lines were not shown: nothing could be written"
    assert kept == [f"line {i}" for i in range(len(kept))]
    assert len(kept) < 200


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_a_feed_goes_silent_when_nobody_reads(error: Exception) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    feed = Feed(plain(Gone()))
    feed.put("stdout", "first\n")
    feed.flush()
    assert feed.broken
    for _ in range(1_000):
        feed.put("stdout", "x" * 100_000)
    feed.close()


def test_a_failing_sink_is_logged_once_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def sink(batch: list[tuple[str, str]]) -> None:
        raise RuntimeError("odd stream")

    feed = Feed(sink)
    for _ in range(3):
        feed.put("stdout", "text\n")
        feed.flush()
    feed.close()
    assert [record.message for record in caplog.records] == ["the console failed and prints nothing more"]


def test_characters_that_the_stream_cannot_encode_are_escaped() -> None:
    raw = io.BytesIO()
    write = plain(io.TextIOWrapper(raw, encoding="ascii"))
    write([("stdout", "naïve │ \udcff\n"), ("stdout", "fine\n")])
    assert raw.getvalue() == b"na\\xefve \\u2502 \\udcff\nfine\n"


def test_lines_are_written_whole() -> None:
    class Recording(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.pieces: list[str] = []

        def write(self, text: str) -> int:
            self.pieces.append(text)
            return len(text)

    file = Recording()
    feed = Feed(plain(file))
    for i in range(1_000):
        feed.put("stdout", f"line {i}\n")
    feed.close()
    assert all(piece.endswith("\n") for piece in file.pieces)
    assert list(itertools.chain(*(piece.splitlines() for piece in file.pieces))) == [f"line {i}" for i in range(1_000)]


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
    assert any(line.startswith("skyward demo · Local · 12 nodes · 12 slots · 0 ok, 0 failed · ") for line in seen)
    assert any(re.match(r"●  node-3   up  +\d+% busy    97 % CPU      123 MB  fit\[red\] ", line) for line in seen)
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
    import warnings
    warnings.simplefilter("ignore")  # from Python 3.12 on a fork beside threads is warned of
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
