"""A package as a page of the docs describes it: its module, and the entry points of its pyproject, on the path."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

__all__ = ["block", "install"]

ROOT = Path(__file__).parent.parent.parent


def block(page: str, language: str, containing: str) -> str:
    """The code block of a guide that contains a text."""
    text = (ROOT / "docs" / "guides" / page).read_text()
    (found,) = [body for body in re.findall(rf"```{language}\n(.*?)```", text, re.S) if containing in body]
    return found


def install(
    module: str,
    page: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    points: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Puts a module of the examples and its entry points, those of the page by default, on the path; also of programs
    that are started."""
    (directory / f"{module}.py").write_text((ROOT / "examples" / "extensions" / f"{module}.py").read_text())
    points = points or tomllib.loads(block(page, "toml", "entry-points"))["project"]["entry-points"]
    lines = [
        line
        for group, named in points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in named.items()))
    ]
    info = directory / f"{module}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("PYTHONPATH", str(directory))
