"""Histories that are damaged, forged or in the way: commands say what they can, and never fail with a traceback."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.cli import main
from skyward.history import store
from skyward.history.history import read
from skyward.history.lines import line, parsed
from skyward.history.recorder import Recorder
from skyward.view.page.server import PageServer

WRONG: tuple[Any, ...] = (
    None,
    "x",
    [],
    {},
    True,
    1e308,
    -1e308,
    10**30,
    "\ud800",
    float("nan"),
    [[[]]],
    {"a": "b"},
    -7,
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def _events() -> list[events.Event]:
    return [
        events.PoolOpening("p", 2, "Local", time=1.0),
        events.PoolOpened("p", 2, 2, 1.0, time=2.0),
        events.PoolCost("p", 3.0, time=2.0),
        events.QueueLength("p", 3, time=2.0),
        events.NodeSample("p", 1, 1.0, 2, 3, (events.GpuSample(0, "A100", 1.0, 2, 3),), time=3.0),
        events.CallStarted("p", "c1", "f", 0, 0, 0, "1", "g", 0.1, time=3.0),
        events.Progress("p", 0, 1.0, 2.0, {"loss": 0.1}, "c1", 0, time=3.5),
        events.Output("p", 0, "stdout", "hello", "c1", rank=0, time=3.6),
        events.Log("p", 0, "app", 20, 1.0, "text", "a.py", 1, "f", time=3.7),
        events.Warned("p", 0, ("builtins:UserWarning",), "text", "a.py", 1, "x", time=3.7),
        events.CallEnded("p", "c1", "f", 0, "error", 1.0, 0, "ValueError: no", time=4.0),
        events.GroupProgress("p", 1, "map", 1, 2_000_000, 1.0, time=4.0),
        events.NodeDown("p", 1, "lost", time=4.0),
        events.NodeLeaving("p", 1, 10.0, time=4.0),
        events.Notice("p", "mind", "warning", time=4.0),
    ]


def _ask_all(entry: store.Entry) -> None:
    server = PageServer(entry)
    try:
        window = {"start": "0", "end": "10", "width": "500"}
        for path in ("summary", "nodes", "lanes", "calls", "output", "metrics", "events"):
            json.dumps(server.answer(path, window), allow_nan=False)
        server.answer("call", {"id": "c1"})
    finally:
        server.close()


def test_every_event_survives_the_check_of_its_fields() -> None:
    for event in _events():
        assert parsed(line(event)) == event


def test_no_value_in_any_field_makes_commands_or_the_page_fail(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SEC-21."""
    recorder = Recorder("forged")
    for event in _events():
        told = json.loads(line(event))
        for name in told:
            for value in WRONG:
                os.write(recorder._file, json.dumps({**told, name: value}).encode() + b"\n")  # pyright: ignore[reportPrivateUsage]
    recorder.close()
    assert main(["history"]) == 0
    assert main(["history", "--json"]) == 0
    assert main(["logs", "forged"]) == 0
    (entry,) = store.entries()
    _ask_all(entry)
    read(entry).trace(root / "trace.json")
    assert "Traceback" not in capsys.readouterr().err


def test_bits_that_flipped_and_a_file_that_was_cut_lose_lines_and_nothing_else(root: Path) -> None:
    recorder = Recorder("flipped")
    for event in _events() * 20:
        recorder.record(event)
    recorder.close()
    whole = recorder.path.read_bytes()
    chance = random.Random(3)
    for _ in range(15):
        broken = bytearray(whole[: chance.randrange(len(whole))])
        first = whole.index(b"\n") + 1
        for _ in range(40):
            if len(broken) > first:
                broken[chance.randrange(first, len(broken))] = chance.randrange(256)
        recorder.path.write_bytes(bytes(broken))
        assert main(["history"]) == 0
        for entry in store.entries():
            assert main(["logs", entry.id]) == 0
            _ask_all(entry)


def test_a_header_that_is_damaged_is_no_history_and_goes_with_the_old_ones(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = (b"", b"\x00" * 100, b"[1]\n", b'{"pool": "x", "began": 1e300}\n', b'{"pool": "x", "began": "soon"}\n')
    for number, header in enumerate(headers):
        recorder = Recorder(f"p{number}")
        recorder.close()
        recorder.path.write_bytes(header)
    Recorder("pipe").close()
    assert main(["history"]) == 0
    assert main(["logs", "p0"]) == 1
    assert "no history of a pool 'p0'" in capsys.readouterr().err
    long_ago = time.time() - 40 * 86_400
    for path in (root / "history").glob("p?-*/*"):
        os.utime(path, (long_ago, long_ago))
    store.prune()
    assert {folder.name.partition("-")[0] for folder in (root / "history").iterdir()} == {"pipe"}


def test_a_pipe_in_the_place_of_a_history_holds_nobody_up(root: Path) -> None:
    recorder = Recorder("pipe")
    recorder.close()
    recorder.path.unlink()
    os.mkfifo(recorder.path)
    assert main(["history"]) == 0


def test_a_directory_that_is_not_writable_keeps_no_history_and_the_pool_goes_on(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.mkdir(mode=0o700)
    (root / "history").write_text("in the way")
    pool = sky.ComputePool(console=False, name="unkept")
    with pool:
        assert (_three() >> pool) == 3
    assert "no history of this pool is kept" in caplog.text
    with pytest.raises(sky.errors.InvalidArgument, match="no history of unkept"):
        pool.history()


def test_two_pools_of_one_name_have_a_history_each(root: Path) -> None:
    first, second = Recorder("same"), Recorder("same")
    first.record(events.Output("same", 0, "stdout", "first"))
    second.record(events.Output("same", 0, "stdout", "second"))
    first.close()
    second.close()
    texts = [[each.text for each in read(entry).output()] for entry in store.entries()]
    assert sorted(texts) == [["first"], ["second"]]


@sky.compute
def _three() -> int:
    return 3
