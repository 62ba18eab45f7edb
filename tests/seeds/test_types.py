"""A type checker finds nothing wrong with the documents' code blocks, nor with our examples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.seeds.blocks import blocks
from tests.seeds.fillings import FILLINGS

ROOT = Path(__file__).resolve().parents[2]
PYRIGHT = shutil.which("pyright", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def write_blocks(directory: Path) -> dict[Path, range]:
    """Each block as a file, with the names that it leaves open; and which lines are the block's own, from 0."""
    lines: dict[Path, range] = {}
    for block in blocks():
        if block.language == "python" and block.name in FILLINGS:
            start = f"import skyward as sky\n{FILLINGS[block.name].before}\n"
            path = directory / f"{block.name.replace('.', '_')}.py"
            path.write_text(start + block.text)
            first = start.count("\n")
            lines[path] = range(first, first + block.text.count("\n"))
    return lines


def report(directory: Path) -> dict[str, Any]:
    """What the checker finds; frameworks are unknown to it, whose types are theirs and take a minute to read."""
    assert PYRIGHT is not None
    shutil.copytree(ROOT / "examples", directory / "examples")
    unknown = {"reportMissingImports": "none", "reportMissingModuleSource": "none", "extraPaths": [str(ROOT / "src")]}
    settings = {"typeCheckingMode": "basic", "pythonVersion": "3.11", **unknown}
    (directory / "pyrightconfig.json").write_text(json.dumps(settings))
    bare = venv.EnvBuilder().ensure_directories(directory / ".bare").env_exe
    venv.create(directory / ".bare")
    command = [PYRIGHT, "--outputjson", "--project", str(directory), "--pythonpath", bare]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    return json.loads(done.stdout)


@pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed")
def test_a_type_checker_accepts_the_blocks_and_the_examples(tmp_path: Path) -> None:
    """Without the documents, the examples alone."""
    own = write_blocks(tmp_path)
    found = report(tmp_path)
    assert found["summary"]["filesAnalyzed"] >= len(own) + len(list((ROOT / "examples").rglob("*.py")))
    wrong: list[str] = []
    for diagnostic in found["generalDiagnostics"]:
        path, line = Path(diagnostic["file"]), diagnostic["range"]["start"]["line"]
        text = path.read_text().splitlines()[line]
        if diagnostic["severity"] == "error" and line in own.get(path, range(line, line + 1)):
            wrong.append(f"{path.name}: {text.strip()}: {diagnostic['message']}")
    assert wrong == []
