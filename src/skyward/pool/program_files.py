"""Which of the user's files a program needs on another machine: modules that it imports from its own folders."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from skyward.transport.payload import Packer

__all__ = ["imported", "loaded", "own_folders"]


def imported(programs: Sequence[Path], folders: Sequence[Path]) -> list[Path]:
    """Also indirectly, or inside functions."""
    found: dict[Path, None] = {}
    left = [*programs]
    while left:
        for name in _names(left.pop()):
            places = [place for folder in folders for place in (folder / f"{name}.py", folder / name)]
            here = next((place for place in places if place.is_file() or any(place.glob("*.py"))), None)
            if here is not None and here not in found:
                found[here] = None
                left += [here] if here.is_file() else here.rglob("*.py")
    return list(found)


def loaded(root: Path) -> list[Path]:
    """The modules of this process below a folder, without those of its environment."""
    packer, files = Packer(), [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = {Path(file).resolve() for file in files if file and packer.is_foreign_file(file)}
    return sorted(path for path in paths if path.is_relative_to(root.resolve()))


def own_folders(folders: Sequence[Path], root: Path) -> list[Path]:
    """Those below a folder that are no part of an environment, which may lie there, too."""
    packer, root = Packer(), root.resolve()
    return [path for path in folders if path.is_relative_to(root) and packer.is_foreign_file(str(path / "any.py"))]


def _names(program: Path) -> Iterator[str]:
    """The first parts of a file's imports; none of its own package."""
    try:
        nodes = list(ast.walk(ast.parse(program.read_bytes())))
    except (SyntaxError, ValueError):
        return  # Python says it better, when it runs
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
