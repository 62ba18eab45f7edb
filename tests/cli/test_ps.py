"""`sky ps`: every pool that is open or has left something, each in one row."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import events
from skyward.api.provider import Leftover
from skyward.cli.ps import lines, merged
from skyward.history.history import read
from skyward.history.recorder import Recorder
from skyward.history.store import entries
from skyward.machines.reaper import Found
from skyward.pool.inspect_socket import Silent, Summary, spent

OPEN = Summary("sweep", 77, "sweep.py", "open", "Local", "", "", 100.0, 4, 4, 3, 9, 120, 1, 0.0, 0.0)
RENTED = replace(OPEN, pool="train", provider="Local", region="eu-1", machines="train-4f09a1", cost=1.5, hourly=3.0)
MACHINE = Leftover("train-4f09a1", "i-1", "machine", "g5.xlarge, running", 1.5)


def _found(pool: str, condition: Any, **more: Any) -> Found:
    return Found(pool, "eu-1", condition, sky.Local(), **more)


def test_an_open_pool_and_what_its_provider_lists_of_it_are_one_row() -> None:
    found = [_found("train-4f09a1", "in use", leftovers=(MACHINE,)), _found("old-1", "abandoned", opened=40.0)]
    rows = merged([OPEN, RENTED], [], [], found, now=160.0)
    assert [(row.pool, row.state) for row in rows] == [("sweep", "open"), ("train", "open"), ("old-1", "abandoned")]
    assert rows[1].left == ("i-1 (g5.xlarge, running)",)
    assert (rows[0].running, rows[0].waiting, rows[0].done, rows[0].failed) == (3, 9, 120, 1)
    assert [row.age for row in rows] == [60.0, 60.0, 120.0]


def test_a_pool_that_is_opening_is_one_row_too(tmp_path: Path) -> None:
    """It does not answer yet: its history is known, and its machines by their ledger."""
    recorder = Recorder("train", tmp_path)
    recorder.record(events.PoolOpening("train", 2, "AWS"))
    recorder.flush()
    (entry,) = entries(tmp_path)
    mine = _found("train-4f09a1", "in use", pid=os.getpid(), host=socket.gethostname(), leftovers=(MACHINE,))
    other = _found("train-9f09a1", "in use", pid=1, host=socket.gethostname())
    rows = merged([], [], [(entry, read(entry))], [mine, other], now=entry.began + 5)
    recorder.close()
    assert [(row.pool, row.state, row.machines) for row in rows] == [
        ("train", "opening", "train-4f09a1"),
        ("train-9f09a1", "in use", "train-9f09a1"),
    ]
    assert (rows[0].provider, rows[0].nodes, rows[0].age) == ("AWS", 2, 5.0)


def test_a_pool_that_answers_is_not_listed_again_from_its_history(tmp_path: Path) -> None:
    recorder = Recorder("sweep", tmp_path)
    recorded = [(entry, read(entry)) for entry in entries(tmp_path)]
    recorder.close()
    assert [row.state for row in merged([replace(OPEN, pid=os.getpid())], [], recorded, [], 160.0)] == ["open"]
    two = merged([replace(OPEN, pid=os.getpid())], [], recorded * 2, [], 160.0)
    assert [row.state for row in two] == ["open", "opening"], "one that opens has the name of one that is open"


def test_a_program_that_does_not_answer_is_listed_with_what_its_history_knows(tmp_path: Path) -> None:
    recorder = Recorder("sweep", tmp_path)
    recorded = [(entry, read(entry)) for entry in entries(tmp_path)]
    recorder.close()
    rows = merged([], [Silent(os.getpid(), "stopped"), Silent(5, "stopped")], recorded, [], 160.0)
    assert [(row.pool, row.state, row.pid) for row in rows] == [
        ("sweep", "no answer", os.getpid()),
        ("unknown", "no answer", 5),
    ]


def test_a_pool_without_a_price_has_none_also_if_it_does_not_answer(tmp_path: Path) -> None:
    recorder = Recorder("sweep", tmp_path)
    recorder.record(events.PoolOpening("sweep", 2, "Local"))
    recorder.record(events.PoolOpened("sweep", 2, 2, 1.0))
    recorder.flush()
    recorded = [(entry, read(entry)) for entry in entries(tmp_path)]
    recorder.close()
    _, row = lines(merged([], [Silent(os.getpid(), "stopped")], recorded, [], 160.0))
    assert "no answer" in row
    assert "no price" in row


def test_cost_follows_the_price_and_is_unknown_where_a_price_is() -> None:
    assert spent([], 100.0) == 0
    assert spent([(0.0, 1.0), (3600.0, 2.0)], 5400.0) == 2.0
    assert spent([(0.0, float("inf"))], 5400.0) is None
    assert spent([(7200.0, 1.0)], 3600.0) == 0, "a clock that was set back makes no pool cost less than nothing"


@sky.compute
def add(x: int, y: int) -> int:
    return x + y


def double(x: Any) -> Any:
    return x * 2


def _listed(*words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "skyward", "ps", "--here", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [row for row in rows if row["pid"] == os.getpid()]


def test_open_pools_are_listed_from_another_terminal_with_and_without_a_history() -> None:
    with (
        sky.ComputePool(nodes=1, name="kept", console=False) as kept,
        sky.ComputePool(nodes=1, name="unkept", console=False, history=False),
    ):
        assert add(1, 2) >> kept == 3
        assert kept.map(double, [1, 2, None], return_exceptions=True)[:2] == [2, 4]
        with pytest.raises(TypeError):
            _ = add(1, None) >> kept  # pyright: ignore[reportArgumentType] - it fails there
        rows = {row["pool"]: row for row in _listed()}
        assert len(_listed()) == len(rows)
    assert {name: row["state"] for name, row in rows.items() if name in ("kept", "unkept")} == {
        "kept": "open",
        "unkept": "open",
    }
    row = rows["kept"]
    assert {**row, "began": 0, "age": 0, "program": ""} == {
        **dict.fromkeys(("began", "age", "running", "waiting", "cost", "hourly"), 0),
        **dict.fromkeys(("program", "machines", "region"), ""),
        **dict.fromkeys(("nodes", "up"), 1),
        **dict(zip(("done", "failed"), (3, 2), strict=True)),
        "kind": "pool",
        "pool": "kept",
        "state": "open",
        "provider": "Local",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "left": [],
        "notes": [],
    }
    assert row["age"] > 0
    assert not {"kept", "unkept"} & {row["pool"] for row in _listed()}, "closed ones are in `sky history`"


def test_the_table_has_a_head_and_says_what_ends_a_pool() -> None:
    found = [_found("old-4f09a1", "abandoned", leftovers=(MACHINE,), pid=9, host="here")]
    head, first, second, *rest = lines(merged([OPEN], [], [], found, 160.0))
    assert head.split() == "POOL STATE PROVIDER NODES RUNNING WAITING DONE FAILED COST AGE PROGRAM".split()
    assert first.split() == [*"sweep open Local 4/4 3 9 120 1 no price 1.0 min sweep.py (77)".split()]
    assert second.split() == [*"old-4f09a1 abandoned Local eu-1 1 process 9".split()]
    assert rest == ["  i-1 (g5.xlarge, running); $1.50 an hour", "  `sky down old-4f09a1 --yes` ends it"]
    assert lines([]) == ["no pools"]
