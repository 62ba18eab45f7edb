"""What functions of the user may refer to: over forty kinds of definitions, wherever they are written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parents[1] / "support" / "definitions.py"
RUN = """
import json, sys
import skyward as sky
{load}
wrong = {{}}
with sky.ComputePool(console=False) as pool:
    for name, use in USES.items():
        try:
            there = sky.compute(use)() >> pool
        except Exception as exc:
            there = repr(exc)
        if there != use():
            wrong[name] = [repr(there), repr(use())]
print(json.dumps([len(USES), wrong]))
"""


def run(program: Path, cwd: Path) -> list[object]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(program)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_definitions_of_the_program_itself_travel(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SAMPLE.read_text() + RUN.format(load=""))
    assert run(program, tmp_path) == [44, {}]


def test_definitions_of_a_module_beside_the_program_travel(tmp_path: Path) -> None:
    shutil.copy(SAMPLE, tmp_path / "my_definitions.py")
    (tmp_path / "program.py").write_text(RUN.format(load="from my_definitions import USES"))
    assert run(tmp_path / "program.py", tmp_path) == [44, {}]


def test_definitions_of_a_package_in_src_travel(tmp_path: Path) -> None:
    package = tmp_path / "src" / "my_package"
    (package / "deep").mkdir(parents=True)
    shutil.copy(SAMPLE, package / "deep" / "definitions.py")
    (package / "__init__.py").write_text("from .deep import USES\n")
    (package / "deep" / "__init__.py").write_text("from .definitions import USES\n")
    (tmp_path / "program.py").write_text(
        RUN.format(
            load="sys.path.insert(0, 'src')\nfrom my_package import USES\nimport my_package.deep as deep\nassert deep"
        )
    )
    assert run(tmp_path / "program.py", tmp_path) == [44, {}]


def test_definitions_of_a_notebook_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cells = [nbformat.v4.new_code_cell(text) for text in (SAMPLE.read_text(), RUN.format(load=""))]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "".join(output["text"] for output in book.cells[1].outputs if output.get("name") == "stdout")
    assert json.loads(text.splitlines()[-1]) == [44, {}]
