"""Pools in a real Jupyter kernel: opened without a block, shown, interrupted, bound again."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.leftovers import leftover_processes
from tests.support.waiting import until

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
jupyter_client = pytest.importorskip("jupyter_client")

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
    """What is in a cell, as text."""
    return "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") + "\n" for output in outputs)


def displays(outputs: Any) -> list[Any]:
    return [output for output in outputs if output["output_type"] == "display_data"]


class Kernel:
    """A kernel that is interrupted and restarted as Jupyter does it."""

    def __init__(self, directory: Path) -> None:
        self.manager = jupyter_client.KernelManager()
        self.manager.start_kernel(cwd=str(directory))
        self.connect()

    def connect(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def run(self, cell: str, during: Callable[[str], object] = lambda shown: None) -> tuple[str, str]:
        """Runs a cell; returns what it shows at its end, and the name of its error. `during` sees all that comes."""
        id, shown, kept = self.client.execute(cell), list[str](), dict[str, int]()
        error = ""
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return "".join(shown), error
            if kind == "stream":
                shown.append(content["text"])
            elif kind == "display_data":
                kept[content["transient"]["display_id"]] = len(shown)
                shown.append(content["data"]["text/plain"] + "\n")
            elif kind == "update_display_data":
                shown[kept[content["transient"]["display_id"]]] = content["data"]["text/plain"] + "\n"
            elif kind == "error":
                error = content["ename"]
            during("".join(shown))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


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
    assert "old: no name refers to this pool any longer, so it is closed." in text(outputs[2])
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
    assert "talks: open: 2 nodes, 2 slots" in text(outputs[1])
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


SLOW = """
import time

@sky.compute
def slow(n):
    time.sleep(0.1)
    if n == 13:
        raise ValueError("unlucky")
    return n

@sky.compute
def train(steps):
    for step in range(1, steps + 1):
        time.sleep(0.02)
        sky.progress(step, steps, loss=1 / step)
"""

SHOWN = """
import threading

seen = threading.Event()

def shown(event):  # groups that are done sooner are not
    return isinstance(event, sky.events.GroupProgress) and event.seconds >= 0.5

"""


def test_progress_is_html_that_is_updated_in_place_and_its_last_state_stays(run: Run) -> None:
    outputs = run(
        DEFINE + SLOW,
        "pool = sky.ComputePool(nodes=2, name='progress').open()\nprint('opened')",
        "results = sky.gather(*(slow(n) for n in range(12))) >> pool\nprint('gathered')",
        "results = pool.map(slow, range(12))",
        "results = sky.gather(*(slow(n) for n in range(12)), progress=False) >> pool",
        "train(20) @ pool\nprint('trained')",
        "results = sky.gather(*(slow(n) for n in range(8, 40)), return_exceptions=True) >> pool",
        SHOWN + "pool.on_event(lambda event: shown(event) and seen.set())\n"
        "later = sky.gather(*(slow(n) for n in range(20, 50))) > pool\nassert seen.wait(60)",
        "results = later.result()",
        "pool.close()",
    )
    opened = displays(outputs[1])
    assert len(opened) == 1, "opening is one line, which has changed"
    assert "progress: open: 2 nodes" in text(opened)
    assert text(outputs[1]).endswith("opened\n"), "the pool is open before the next line of the program"

    assert re.fullmatch(r"slow: 12/12, [\d.]+ s\n", text(displays(outputs[2])))
    assert "width:100.0%" in displays(outputs[2])[0]["data"]["text/html"]
    assert text(outputs[2]).endswith("gathered\n")
    assert re.fullmatch(r"slow: 12/12, [\d.]+ s\n", text(outputs[3]))
    assert outputs[4] == [], "progress=False"

    assert text(displays(outputs[5])) == "[node-0] 20/20 (100%) loss 0.05\n[node-1] 20/20 (100%) loss 0.05\n"
    assert text(outputs[5]).endswith("trained\n")
    assert re.fullmatch(r"slow: 32/32 \(1 failed\), [\d.]+ s\n", text(displays(outputs[6])))
    assert re.search(r"^skyward: slow\(13\) failed on node [01]: ValueError: unlucky$", text(outputs[6]), re.M)
    assert re.fullmatch(r"slow: 30/30, [\d.]+ s\n", text(outputs[7])), "begun here, ended in the next cell"
    assert outputs[8] == []
    assert "pool closed" in text(outputs[9])


def test_a_group_that_is_interrupted_or_fails_leaves_a_line_that_says_so(run: Run) -> None:
    outputs = run(
        DEFINE + SLOW,
        "pool = sky.ComputePool(nodes=2, name='stops').open()",
        SHOWN + "import os, signal\n"
        "def interrupt(event):  # as Jupyter does\n"
        "    if shown(event) and not seen.is_set():\n"
        "        seen.set()\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "pool.on_event(interrupt)\n"
        "try:\n    sky.gather(*(slow(n) for n in range(100, 1000))) >> pool\n"
        "except KeyboardInterrupt:\n    print('interrupted')",
        "try:\n    sky.gather(*(slow(n) for n in range(1000))) >> pool\nexcept ValueError:\n    print('failed')",
        "print(double(2) >> pool)",
        "pool.close()",
    )
    assert re.fullmatch(r"slow: \d+/900, stopped after [\d.]+ s\ninterrupted\n", text(outputs[2]))
    assert re.fullmatch(r"slow: \d+/1,000 \(1 failed\), stopped after [\d.]+ s\nfailed\n", text(outputs[3]))
    assert text(outputs[4]) == "[node-0] doubling 2\n4\n" or text(outputs[4]) == "[node-1] doubling 2\n4\n"


def of_the_pool() -> list[str]:
    return [process for process in leftover_processes() if "ipykernel" not in process]


def test_a_kernel_is_interrupted_and_restarted(kernel: Kernel) -> None:
    interrupted = list[str]()

    def interrupt(shown: str) -> None:
        if "/900, " in shown and not interrupted:
            interrupted.append(shown)
            kernel.manager.interrupt_kernel()

    assert kernel.run(DEFINE + SLOW) == ("", "")
    kernel.run("pool = sky.ComputePool(nodes=2, name='kernel').open()")
    shown, error = kernel.run("sky.gather(*(slow(n) for n in range(100, 1000))) >> pool", interrupt)
    assert error == "KeyboardInterrupt"
    assert re.fullmatch(r"slow: \d+/900, stopped after [\d.]+ s\n", shown), "one line, which is up to date"
    shown, error = kernel.run("print(double(2) >> pool)")
    assert (shown.endswith("doubling 2\n4\n"), error) == (True, ""), "the pool goes on"
    assert of_the_pool()
    kernel.client.stop_channels()
    kernel.manager.restart_kernel(now=True)
    until(lambda: not of_the_pool())
    kernel.connect()
    assert kernel.run("print(1)") == ("1\n", "")


def test_the_example_of_the_guide_runs_in_cells(run: Run) -> None:
    example = Path(__file__).parents[2] / "examples" / "guides" / "24_notebooks.py"
    _, *cells = example.read_text().split("\n# %%")
    outputs = run(*(cell.partition("\n")[2] for cell in cells))
    assert "notebook: open: 2 nodes" in text(outputs[1])
    assert re.fullmatch(r"simulate: 40/40, [\d.]+ s\n20540\n", text(outputs[2]))
    assert "[node-1] 20/20 (100%) loss 0.1216\n" in text(displays(outputs[3]))
    assert text(outputs[3]).count("UserWarning: the loss is still high") == 1
    assert text(outputs[3]).count("skyward: the same UserWarning") == 1
    assert "[0.122, 0.122]" in text(outputs[3])
    assert text(outputs[5]).endswith("20540\n")
    assert "still high" not in text(outputs[6])
    assert "pool closed" in text(outputs[7])
