"""From bytes to lines."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.client.output_lines import Lines, Transcript


def fed(*chunks: bytes) -> list[str]:
    """The finished lines, with the rest."""
    lines = Lines()
    found = [item for chunk in chunks for item in lines.feed(chunk)] + lines.rest()
    return [text for text, progress in found if not progress]


def test_lines_come_when_they_are_complete() -> None:
    lines = Lines()
    assert lines.feed(b"on") == []
    assert lines.feed(b"e\ntwo\nth") == [("one", False), ("two", False)]
    assert lines.rest() == [("th", False)]
    assert lines.rest() == []


def test_empty_lines_are_lines() -> None:
    assert fed(b"\n\na\n\n") == ["", "", "a", ""]


@settings(deadline=None, max_examples=80)
@given(
    texts=st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8)),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_however_the_bytes_are_cut_the_lines_are_the_same(texts: list[str], cuts: list[int]) -> None:
    """A character of several bytes may be cut in the middle."""
    data = "".join(f"{text}\n" for text in texts).encode()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert fed(*(data[a:b] for a, b in pairwise(places))) == texts


def test_windows_line_ends_are_line_ends() -> None:
    assert fed(b"a\r\nb\r\n") == ["a", "b"]
    assert fed(b"a\r", b"\nb\r", b"\n") == ["a", "b"]


def test_a_carriage_return_rewrites_the_line() -> None:
    assert fed(b"10%\r20%\r100%\n") == ["100%"]
    assert fed(b"\r10%", b"\r20%", b"\r100%\ndone\n") == ["100%", "done"]
    assert fed(b"50%\r") == ["50%"]


def test_a_progress_bar_shows_now_and_then() -> None:
    lines = Lines()
    shown = [text for i in range(1000) for text, progress in lines.feed(f"\r{i}".encode()) if progress]
    assert shown[0] == "0"
    assert 1 <= len(shown) < 100
    assert lines.rest() == [("999", False)]


def test_a_progress_bar_that_is_never_ended_does_not_grow() -> None:
    lines = Lines()
    for i in range(2000):
        lines.feed(b"\r" + str(i).encode() * 1000)
    assert len(lines._rest) < 20_000


def test_a_line_without_end_is_cut() -> None:
    lines = Lines()
    pieces = [text for _ in range(100) for text, _ in lines.feed(b"z" * (1 << 16))]
    whole = "".join([*pieces, *(text for text, _ in lines.rest())])
    assert whole == "z" * (100 << 16)
    assert len(pieces) >= 5


def test_a_cut_never_splits_a_character() -> None:
    """Three bytes a character do not fit evenly into any chunk."""
    data = "€".encode() * 800_000
    lines = Lines()
    pieces = [text for at in range(0, len(data), 1 << 16) for text, _ in lines.feed(data[at : at + (1 << 16)])]
    assert "".join([*pieces, *(text for text, _ in lines.rest())]) == "€" * 800_000


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert fed(b"\xff\xfe\nok\n") == ["\ufffd\ufffd", "ok"]


def test_a_transcript_keeps_streams_and_calls_apart() -> None:
    book = Transcript()
    assert book.feed("stdout", "a", b"one ") == []
    assert book.feed("stdout", "b", b"two\n") == [("two", False)]
    assert book.feed("stderr", "a", b"err") == []
    assert book.feed("stdout", "a", b"more\nleft") == [("one more", False)]
    assert book.end("a") == [("stdout", "left", False), ("stderr", "err", False)]
    assert book.end("a") == []
    assert book.end("never heard of") == []


def test_a_transcript_forgets_calls_that_have_ended() -> None:
    book = Transcript()
    for number in range(1000):
        book.feed("stdout", str(number), b"x\n")
        book.end(str(number))
    assert len(book._lines) == 0
