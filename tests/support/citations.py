"""Pages with a table of numbered rows, whose last column names the tests that cite the number in their docstrings."""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["Rows", "citing"]

ROOT = Path(__file__).parents[2]


def citing(numbers: Callable[[str], Iterator[str]]) -> dict[str, list[str]]:
    """Number -> the tests whose docstrings name it, as file and function; `numbers` finds them in a docstring."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for item in ast.walk(ast.parse(path.read_text())):
            if isinstance(item, ast.FunctionDef) and item.name.startswith("test_"):
                for number in dict.fromkeys(numbers(ast.get_docstring(item) or "")):
                    found[number].append(f"{path.relative_to(ROOT / 'tests')}::{item.name}")
    return found


class Rows:
    """The rows of one page: `| number | words | tests |`."""

    def __init__(self, page: Path, number: str) -> None:
        self._page = page
        self._row = re.compile(rf"^\| ({number}) \| (.*?) \| ?(.*?) ?\|$", re.M)

    def words(self) -> dict[str, str]:
        return {number: words for number, words, _ in self._row.findall(self._page.read_text())}

    def tests(self) -> dict[str, list[str]]:
        return {
            number: re.findall(r"`([^`]+::[^`]+)`", tests)
            for number, _, tests in self._row.findall(self._page.read_text())
        }

    def compare(self, found: dict[str, list[str]], without: frozenset[str] = frozenset()) -> None:
        """Fails unless every row names only tests that cite it, one at least; SKYWARD_GOLDEN writes them first."""
        if "SKYWARD_GOLDEN" in os.environ:
            shown = {number: "<br>".join(f"`{test}`" for test in found.get(number, [])) for number in self.words()}
            page = self._row.sub(lambda row: f"| {row[1]} | {row[2]} | {shown[row[1]]} |", self._page.read_text())
            self._page.write_text(page)
        named = self.tests()
        again = "run it once with SKYWARD_GOLDEN=1"
        assert {number for number, tests in named.items() if not tests} <= without, again
        gone = {number: wrong for number, tests in named.items() if (wrong := set(tests) - set(found.get(number, [])))}
        assert gone == {}, again
        assert set(found) <= set(named), "tests name rows that are not on the page"
