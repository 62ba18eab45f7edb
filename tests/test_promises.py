"""promises.md names every promise, and tests hold each: those whose docstrings name its number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.seeds.blocks import ABSENT, checklist
from tests.support.citations import Rows, citing

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "promises.md"
CITED = re.compile(r"\bS(\d)-(\d\d)(?: to S\1-(\d\d))?")


def numbers(text: str) -> Iterator[str]:
    for document, first, last in CITED.findall(text):
        for number in range(int(first), int(last or first) + 1):
            yield f"S{document}-{number:02}"


ROWS = Rows(PAGE, r"S\d-\d\d")


def test_every_promise_is_held_by_tests_that_name_it() -> None:
    ROWS.compare(citing(numbers))


def test_what_cannot_be_seen_here_is_told() -> None:
    marked = {number for number, words in ROWS.words().items() if "▲" in words}
    told = set(re.findall(r"S\d-\d\d", PAGE.read_text().rpartition("## ")[2]))
    assert marked == told


def test_no_promise_of_the_documents_is_missing() -> None:
    text = checklist()
    if text is None:
        pytest.skip(ABSENT)
    promised = text.partition("## D5")[0]
    assert set(re.findall(r"\bS\d-\d\d\b", promised)) == set(ROWS.words())
