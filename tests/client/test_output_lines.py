"""From bytes to lines."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.api import secret
from skyward.api.secret import hide
from skyward.client.output import Lines, Transcript
from skyward.node.logs import parsed, readable
from skyward.node.settings import MARK


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


LOG, WARNING, REPORT = (f"{MARK}{kind} {{}}" for kind in ("log", "warning", "progress"))


def said(text: str, cut: int | None = None) -> list[str]:
    """The lines in order, bars that are overwritten among them in brackets; `cut` is where the chunk was cut."""
    lines, data = Lines(), text.encode()
    chunks = [data] if cut is None else [data[:cut], data[cut:]]
    found = [item for chunk in chunks for item in lines.feed(chunk)] + lines.rest()
    return [f"[{text}]" if progress else text for text, progress in found]


def test_a_record_beside_a_progress_bar_is_a_line_of_its_own() -> None:
    assert said(f"\r 50%{LOG}\n") == ["[ 50%]", LOG, " 50%"]
    assert said(f"\r 50%{LOG}\n\r 60%{WARNING}\n\r100%\nnext\n") == (["[ 50%]", LOG, "[ 60%]", WARNING, "100%", "next"])
    assert said(f"50%\r{LOG}\n60%\r{LOG}\n") == ["[50%]", LOG, "[60%]", LOG, "60%"]


def test_records_do_not_break_a_bar_into_lines() -> None:
    """One bar, as without them: its last state."""
    text = "".join(f"\r{i:3d}%|{LOG}\n{REPORT}\n" for i in range(101)) + "\n"
    found = said(text)
    assert found.count(LOG) == found.count(REPORT) == 101
    assert [line for line in found if not line.startswith(("[", MARK))] == ["100%|"]
    assert found.index("[ 50%|]") < found.index("[ 51%|]")


def test_text_that_follows_a_record_does_not_join_the_bar_before_it() -> None:
    assert said(f"\r 50%{LOG}\n{LOG}\nhello\n") == ["[ 50%]", LOG, LOG, " 50%", "hello"]
    assert said(f"\r 50%{LOG}\n\n") == ["[ 50%]", LOG, " 50%"], "the line end is the bar's"


def test_unfinished_text_comes_before_the_record_that_follows_it() -> None:
    assert said(f"loading ... {LOG}\ndone\n") == ["loading ... ", LOG, "done"]
    assert said(f"{LOG}\nplain\n\n") == [LOG, "plain", ""]
    assert said(f"several{LOG}{WARNING}{REPORT}\n") == ["several", LOG, WARNING, REPORT]


def test_a_report_interrupts_no_line() -> None:
    assert said(f".{REPORT}\n.{REPORT}\n. done\n") == [REPORT, REPORT, "... done"]
    assert said(f"\r 50%{REPORT}\n\r 60%{REPORT}\n") == [REPORT, REPORT, "[ 60%]", " 60%"]


@settings(deadline=None, max_examples=200)
@given(
    parts=st.lists(
        st.sampled_from(["\r 10%|", "\r 20%|\n", "abc", "x\n", f"{LOG}\n", f"{REPORT}\n", "50%\r"]), max_size=6
    ),
    cut=st.integers(0, 200),
)
def test_wherever_a_mark_is_cut_the_lines_are_the_same(parts: list[str], cut: int) -> None:
    text = "".join(parts)
    whole, pieces = said(text), said(text, cut)
    assert [line for line in pieces if line[:1] != "["] == [line for line in whole if line[:1] != "["]
    assert not any(MARK[0] in line for line in pieces if line[:1] == "[")
    assert pieces.count(LOG) == text.count(LOG)
    assert pieces.count(REPORT) == text.count(REPORT)


def test_a_secret_that_is_a_word_of_ours_loses_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """`{"line": 3}` with *** in it says nothing any more."""
    monkeypatch.setattr(secret, "_forms_now", ("line",))  # a secret itself would be hidden in other tests, too
    record = (
        f'{MARK}log {{"logger": "my", "level": 30, "created": 1.0, "text": "a line of it", "path": "p", "line": 3,'
        ' "function": "f"}'
    )
    ((text, _),) = Lines().feed(f"{record}\n".encode())
    found = parsed(text, hide)
    assert found is not None
    assert (found[1]["line"], found[1]["text"]) == (3, "a *** of it")
    cut = Lines()
    cut.feed(f"{MARK}log a line".encode())
    assert cut.rest() == [(f"{MARK}log a ***", False)]


def test_a_mark_after_a_line_without_end_is_found() -> None:
    lines = Lines()
    found = [text for at in range(5) for text, _ in lines.feed(b"z" * (250 << 10))]
    found += [text for chunk in (f"{LOG[:3]}", f"{LOG[3:]}\n") for text, _ in lines.feed(chunk.encode())]
    assert found.count(LOG) == 1
    assert "".join(found) == "z" * (1250 << 10) + LOG


def test_the_stderr_that_an_error_quotes_has_text_and_records_apart() -> None:
    log = (
        f'{MARK}log {{"logger": "my", "level": 30, "created": 1.0, "text": "hello", "path": "p", "line": 1,'
        ' "function": "f"}'
    )
    report = f'{MARK}progress {{"step": 1, "total": 2, "metrics": {{}}}}'
    assert readable(f"..{report}\n..{log}{log}\nend") == "....\nWARNING my: hello\nWARNING my: hello\nend"
    assert readable(f"..{report}\n") == ".."


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
