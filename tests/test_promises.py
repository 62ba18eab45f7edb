"""docs/promises.md names every promise, and the tests that hold it: those whose docstrings name its number."""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.seeds.blocks import ABSENT, checklist

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"
ROW = re.compile(r"^\| (S\d-\d\d) \| (.*?) \| ?(.*?) ?\|$", re.M)
CITED = re.compile(r"\bS(\d)-(\d\d)(?: to S\1-(\d\d))?")


def cited() -> dict[str, list[str]]:
    """Promise -> the tests whose docstrings name it, as file and function."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for item in ast.walk(ast.parse(path.read_text())):
            if isinstance(item, ast.FunctionDef) and item.name.startswith("test_"):
                for document, first, last in CITED.findall(ast.get_docstring(item) or ""):
                    for number in range(int(first), int(last or first) + 1):
                        found[f"S{document}-{number:02}"].append(f"{path.relative_to(ROOT / 'tests')}::{item.name}")
    return found


def rows() -> dict[str, tuple[str, str]]:
    return {number: (words, tests) for number, words, tests in ROW.findall(PAGE.read_text())}


def test_every_promise_is_held_by_tests_that_name_it() -> None:
    found = cited()
    if "SKYWARD_GOLDEN" in os.environ:
        shown = {number: "<br>".join(f"`{test}`" for test in dict.fromkeys(found[number])) for number in rows()}
        PAGE.write_text(ROW.sub(lambda row: f"| {row[1]} | {row[2]} | {shown[row[1]]} |", PAGE.read_text()))
    named = {number: re.findall(r"`([^`]+)`", tests) for number, (_, tests) in rows().items()}
    again = "run it once with SKYWARD_GOLDEN=1"
    assert [number for number, tests in named.items() if not tests] == [], again
    gone = {number: wrong for number, tests in named.items() if (wrong := set(tests) - set(found[number]))}
    assert gone == {}, again
    assert set(cited()) <= set(rows()), "tests name promises that are not on the page"


def test_what_cannot_be_seen_here_is_told() -> None:
    marked = {number for number, (words, _) in rows().items() if "▲" in words}
    told = set(re.findall(r"S\d-\d\d", PAGE.read_text().rpartition("## ")[2]))
    assert marked == told


def test_no_promise_of_the_documents_is_missing() -> None:
    text = checklist()
    if text is None:
        pytest.skip(ABSENT)
    promised = text.partition("## D5")[0]
    assert set(re.findall(r"\bS\d-\d\d\b", promised)) == set(rows())
