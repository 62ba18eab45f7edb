"""Pools in a real Jupyter kernel: opened without a block, shown, interrupted, bound again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.leftovers import leftover_processes
from tests.support.waiting import until

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

Run = Callable[..., list[Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs cells in a kernel of their own; returns the outputs of each."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    def run(*cells: str) -> list[Any]:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
        return [cell.outputs for cell in book.cells]

    return run


def text(outputs: Any) -> str:
    return "".join(output.get("text", "") for output in outputs)


DEFINE = """
import gc
import skyward as sky

@sky.compute
def double(n):
    print("doubling", n)
    return 2 * n

def active():
    return sorted(p.name for p in gc.get_objects() if isinstance(p, sky.ComputePool) and p.is_active)
"""


def test_a_pool_lives_over_cells_and_is_shown(run: Run) -> None:
    outputs = run(
        DEFINE,
        "pool = sky.ComputePool(nodes=2, name='first', console=False).open()\npool",
        "print(double(3) >> pool)",
        "double(3)",
        "pool.close()",
    )
    shown = outputs[1][-1]["data"]["text/html"]
    assert "ComputePool first" in shown
    assert "2 of 2 take calls" in shown
    assert "6" in text(outputs[2])
    assert "not sent yet" in outputs[3][-1]["data"]["text/html"]
    until(lambda: not leftover_processes())


def test_a_pool_whose_name_is_bound_again_is_closed(run: Run) -> None:
    outputs = run(
        DEFINE,
        "pool = sky.ComputePool(name='old', console=False).open()\npool",
        "pool = sky.ComputePool(name='new', console=False).open()\npool",
        "print(active(), double(1) >> pool)",
        "kept = [pool]\npool = None",
        "print(active())",
        "kept[0].close()",
    )
    assert "old: no name refers to this pool any more; it is closed." in text(outputs[2])
    assert "['new'] 2" in text(outputs[3])
    assert "['new']" in text(outputs[5])


def test_what_nodes_say_is_in_the_cell_that_caused_it(run: Run) -> None:
    outputs = run(
        DEFINE,
        "pool = sky.ComputePool(nodes=2, name='talks').open()",
        "print('before')\nx = double(1) @ pool\nprint('after')",
        "print('another cell')",
        "pool.close()",
        "print('the end')",
    )
    assert "pool open" in text(outputs[1])
    assert text(outputs[2]).count("doubling 1") == 2
    assert text(outputs[3]) == "another cell\n"
    assert "pool closed" in text(outputs[4])
    assert text(outputs[5]) == "the end\n"


def test_html_shows_names_as_they_are_and_runs_nothing(run: Run) -> None:
    outputs = run(
        DEFINE,
        "double('<script>alert(1)</script>')",
    )
    assert "<script>" not in outputs[1][-1]["data"]["text/html"]
