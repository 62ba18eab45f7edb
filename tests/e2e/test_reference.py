"""The examples of docs/pool-methods.md run as they are written, one after the other in one pool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.test_docs import BLOCK, ROOT


def test_the_examples_of_the_methods_of_a_pool_run(tmp_path: Path) -> None:
    """In a program of their own: the page of `pool.view()` is served until its program ends."""
    (tmp_path / "sky.toml").write_text("[pools.gpu]\nnodes = 1\n")
    for folder in ("data", "out"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("a file")
    blocks = [match["body"] for match in BLOCK.finditer((ROOT / "docs" / "pool-methods.md").read_text())]
    program = tmp_path / "program.py"
    program.write_text(
        "import skyward as sky\npool = sky.ComputePool(nodes=2, console=False).open()\n"
        + "".join(blocks)
        + "pool.close()\nassert (losses, word) == ([10.0, 100.0, 1000.0], 'high')\n"
    )
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.relative_to(tmp_path).as_posix() for path in (tmp_path / "results").rglob("*.txt")) == [
        "results/node-0/a.txt",
        "results/node-1/a.txt",
    ]
