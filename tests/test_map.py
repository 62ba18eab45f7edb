"""The answers of docs/map.md lead to code that exists; every file says what it is for and is short enough to read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAP = ROOT / "docs" / "map.md"
SOURCE = ROOT / "src" / "skyward"


def purpose(file: Path) -> str:
    """The first line of a file's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert text, f"{file.relative_to(SOURCE)} has no docstring"
    return text.partition("\n")[0]


def test_every_file_says_what_it_is_for() -> None:
    for file in SOURCE.rglob("*.py"):
        assert purpose(file)


def test_every_answer_of_the_map_is_a_function_that_exists() -> None:
    answers = re.findall(r"`((?:\w+/)*\w+\.py): ([\w.]+)`", MAP.read_text())
    assert len(answers) > 20
    for file, name in answers:
        found = ast.parse((SOURCE / file).read_text()).body
        for part in name.split("."):
            node = next((n for n in found if getattr(n, "name", None) == part or part in assigned(n)), None)
            assert node is not None, f"{file} has no {name}"
            found = getattr(node, "body", [])


def assigned(node: ast.stmt) -> set[str]:
    """The names that a statement gives a value to."""
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


def test_no_file_is_longer_than_seven_hundred_lines() -> None:
    """But for the class that users know, with the types and examples of its methods."""
    for file in SOURCE.rglob("*.py"):
        lines, most = len(file.read_text().splitlines()), 1050 if file == SOURCE / "pool" / "pool.py" else 700
        assert lines <= most, f"{file.relative_to(SOURCE)} has {lines} lines: split it by what it does"
