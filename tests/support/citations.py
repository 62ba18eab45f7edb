"""Pages with a table of numbered rows, which tests cite in their docstrings."""

from __future__ import annotations

import ast
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
    """The rows of one page: `| number | words |`."""

    def __init__(self, page: Path, number: str) -> None:
        self._page = page
        self._row = re.compile(rf"^\| ({number}) \| (.*?) \|$", re.M)

    def words(self) -> dict[str, str]:
        """The words of each number, from the first table that has it."""
        found: dict[str, str] = {}
        for number, words in self._row.findall(self._page.read_text()):
            found.setdefault(number, words)
        return found

    def compare(self, found: dict[str, list[str]], without: frozenset[str] = frozenset()) -> None:
        """Fails unless tests cite every row, but for those `without`, and no row that is not there."""
        rows = set(self.words())
        assert rows - set(found) == without, "no test names these rows in its docstring"
        assert set(found) <= rows, "tests name rows that are not on the page"
