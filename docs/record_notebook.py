"""Takes the pictures of a notebook, from a real kernel that runs its cells: `python docs/record_notebook.py`."""

from __future__ import annotations

import copy
import os
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from nbconvert import HTMLExporter
from photograph import photograph

__all__ = ["CELLS", "run", "shown"]

CELLS = [
    """\
import random, time
import skyward as sky

@sky.compute
def train(rate: float, steps: int = 40) -> float:
    loss = 1.0
    for step in range(steps):
        time.sleep(0.02)
        loss *= 1 - rate
        sky.progress(step + 1, steps, loss=loss)
    print(f"rate {rate}: {loss:.4f}")
    return loss

@sky.compute
def trial(number: int) -> float:
    time.sleep(random.uniform(0.02, 0.1))
    if number % 50 == 7:
        raise ValueError(f"trial {number}: the loss is not a number")
    return random.random()""",
    """\
pool = sky.ComputePool(nodes=4, name="notebook").open()""",
    """\
losses = train(0.1) @ pool        # on every node at once""",
    """\
found = sky.gather(*(trial(n) for n in range(200)), return_exceptions=True) >> pool""",
    """\
pool""",
    """\
later = sky.gather(*(trial(n) for n in range(1000, 1800)), return_exceptions=True) > pool
later.result();""",
]
STYLE = """
body { padding: 12px 0 !important; } #notebook-container, .jp-Notebook { padding: 0 12px !important; }
"""


def run(cells: list[str], at: float = 0.6) -> Any:
    """The notebook after its cells but the last one, which is as it was when its bar had passed the part `at`."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = str(Path(folder, "ipython"))
        client = nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": folder}})
        ends = threading.Thread(target=client.execute, daemon=True)
        ends.start()
        seen = None
        while ends.is_alive() and seen is None:
            time.sleep(0.05)
            if _part(book.cells[-1].get("outputs", [])) >= at:
                seen = copy.deepcopy(book)
        ends.join()
    if seen is None:
        raise SystemExit("the last cell was never in the middle of its work: are its calls too short?")
    return seen


def _part(outputs: list[Any]) -> float:
    """How far a bar below the cell is, as a part of 1."""
    for output in outputs:
        if found := re.search(r"(\d+)/(\d+)", output.get("data", {}).get("text/plain", "")):
            return int(found[1]) / int(found[2])
    return 0.0


def shown(book: Any, dark: bool) -> str:
    """The notebook as a page that loads nothing from elsewhere."""
    exporter = HTMLExporter(theme="dark" if dark else "light", require_js_url="", mathjax_url="", jquery_url="")
    body, _ = exporter.from_notebook_node(book)
    body = re.sub(r"<script\b.*?</script>", "", body, flags=re.S)
    return body.replace("</head>", f"<style>{STYLE}</style></head>")


def main() -> None:
    """Runs the cells once and takes a light and a dark picture."""
    from tests.support.browser import browser

    book = run(CELLS)
    with tempfile.TemporaryDirectory() as folder:
        for dark, name in ((False, "notebook.png"), (True, "notebook-dark.png")):
            page = Path(folder, f"{name}.html")
            page.write_text(shown(book, dark))
            with browser(1000, 1400, dark) as driver:
                driver.get(page.as_uri())
                height = driver.execute_script("return Math.ceil(document.querySelector('main').scrollHeight)")
                photograph(driver, name, height + 24)


if __name__ == "__main__":
    main()
