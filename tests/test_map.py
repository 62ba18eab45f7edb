"""docs/map.md names every file with the first line of its docstring. SKYWARD_GOLDEN=1 writes the lists again."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAP = ROOT / "docs" / "map.md"
SOURCE = ROOT / "src" / "skyward"
MARK = "<!-- from here on written by tests/test_map.py -->\n"


def purpose(file: Path) -> str:
    """The first line of a file's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert text, f"{file.relative_to(SOURCE)} has no docstring"
    return text.partition("\n")[0].replace("|", "\\|")


def lists() -> str:
    """A heading for each folder, a row for each file."""
    parts: list[str] = []
    folders = [SOURCE, *sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)]
    for folder in folders:
        title = folder.relative_to(SOURCE).as_posix() if folder != SOURCE else "skyward"
        parts += [f"\n## {title}/\n", f"{purpose(folder / '__init__.py')}\n", "| file | what it is for |", "|---|---|"]
        parts += [
            f"| `{file.name}` | {purpose(file)} |" for file in sorted(folder.glob("*.py")) if file.stem != "__init__"
        ]
        parts += [f"| `{file.name}` | {script_purpose(file)} |" for file in sorted(folder.glob("*/*.sh"))]
    return "\n".join(parts) + "\n"


def script_purpose(file: Path) -> str:
    """The first comment of a shell script."""
    lines = [line for line in file.read_text().splitlines() if line.startswith("# ")]
    return lines[0].removeprefix("# ").replace("|", "\\|")


def test_the_map_names_every_file_and_what_it_is_for() -> None:
    written, mark, listed = MAP.read_text().partition(MARK)
    if os.environ.get("SKYWARD_GOLDEN"):
        MAP.write_text(written + MARK + lists())
        return
    assert mark, "docs/map.md has lost its mark"
    assert listed == lists(), "docs/map.md is out of date: SKYWARD_GOLDEN=1 pytest tests/test_map.py writes it again"


def test_every_answer_of_the_map_is_a_function_that_exists() -> None:
    written = MAP.read_text().partition(MARK)[0]
    answers = re.findall(r"`((?:\w+/)*\w+\.py): ([\w.]+)`", written)
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


def test_no_file_is_longer_than_four_hundred_lines() -> None:
    for file in SOURCE.rglob("*.py"):
        lines = len(file.read_text().splitlines())
        assert lines <= 400, f"{file.relative_to(SOURCE)} has {lines} lines: split it by what it does"
