"""docs/security.md: every sentence of its lists has a row with tests, or says that it has none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.citations import Rows, citing

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "security.md"
ROWS = ROOT / "tests" / "security.md"
CITED = re.compile(r"\bSEC-(\d+)(?: to SEC-(\d+))?")
UNTESTED = frozenset({"SEC-29"})
"""There is no release yet."""


def numbers(text: str) -> Iterator[str]:
    for first, last in CITED.findall(text):
        for number in range(int(first), int(last or first) + 1):
            yield f"SEC-{number}"


def sentences() -> list[str]:
    text = PAGE.read_text()
    return [" ".join(item.split()) for item in re.findall(r"^- (.*?)(?=\n- |\n\n|\n#|\s*\Z)", text, re.M | re.S)]


def test_every_row_is_held_by_tests_that_name_it() -> None:
    Rows(ROWS, r"SEC-\d+").compare(citing(numbers), UNTESTED)


def test_no_row_is_missing() -> None:
    assert list(Rows(ROWS, r"SEC-\d+").words()) == [f"SEC-{number}" for number in range(1, 39)]


def test_every_sentence_names_its_rows_or_says_that_it_has_no_test() -> None:
    wrong = [item for item in sentences() if not re.search(r"\((?:SEC-\d+(?:, SEC-\d+)*|no test: [^()]+)\)$", item)]
    assert wrong == []


def test_every_row_is_told_in_a_sentence() -> None:
    told = {number for item in sentences() for number in numbers(item)}
    assert told == set(Rows(ROWS, r"SEC-\d+").words())
