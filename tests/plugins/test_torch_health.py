"""A call to one node that waits in a collective is told so, before the group's time limit; no torch here."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from skyward.api.info import InstanceInfo, Peer
from skyward.plugins._torch_health import Singles
from tests.support.waiting import until

INFO = InstanceInfo(
    node=1,
    total_nodes=2,
    head_addr="127.0.0.1",
    head_port=1,
    job_id="p",
    peers=(Peer(0, "127.0.0.1"), Peer(1, "127.0.0.1")),
)


def body(path: str) -> tuple[Any, threading.Event, threading.Event]:
    """A function of the file `path` that waits, with what says that it does and what ends it."""
    entered, done = threading.Event(), threading.Event()
    names: dict[str, Any] = {"entered": entered, "done": done}
    source = "def wait():\n    entered.set()\n    while not done.is_set():\n        pass\n"
    exec(compile(source, path, "exec"), names)
    return names["wait"], entered, done


@pytest.mark.parametrize(
    ("path", "told"), [("/lib/torch/distributed/distributed_c10d.py", True), ("/home/me/train.py", False)]
)
def test_a_single_call_in_a_collective_is_told_so_once(
    path: str, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    singles = Singles(INFO, step=0.01)
    wait, entered, done = body(path)
    heard: list[str] = []

    def run() -> None:
        thread = singles.begin()
        try:
            wait()
        finally:
            singles.end(thread)

    caller = threading.Thread(target=run)
    caller.start()
    assert entered.wait(30)
    watcher = next((t for t in threading.enumerate() if t.name == "skyward-torch-singles"), None)
    if told:
        until(lambda: heard.append(capsys.readouterr().err) or "@ pool" in "".join(heard))
    done.set()
    caller.join()
    if watcher is not None:
        watcher.join(30)
    text = "".join(heard) + capsys.readouterr().err
    assert text.count("@ pool") == int(told)
    assert ("node 1 waits in a collective" in text) is told
