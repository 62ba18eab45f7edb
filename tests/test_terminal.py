from __future__ import annotations

import io
import itertools
import threading

import pytest

from skyward import terminal
from skyward.terminal import Feed, clean, plain, styled, table


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
    assert gate.entered.wait(30)
    gate.open.set()
    producer.join(30)
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
    assert [record.message for record in caplog.records] == ["the console failed and says no more"]


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
