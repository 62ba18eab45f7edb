"""What is written of a pool, how much, for how long, and that nothing of it holds the pool up."""

from __future__ import annotations

import os
import resource
import signal
import stat
import time
from pathlib import Path

import pytest

from skyward import events
from skyward.errors import InvalidArgument
from skyward.events import Event
from skyward.history import store
from skyward.history.history import read
from skyward.history.recorder import Recorder


def _recorded(root: Path, found: list[Event], limit: int = 1 << 20) -> list[Event]:
    recorder = Recorder("p", root, limit)
    for event in found:
        recorder.record(event)
    recorder.close()
    return list(store.Tail(recorder.path).read())


def _call(number: int, seconds: float = 0.1, outcome: str = "ok") -> list[Event]:
    return [
        events.CallStarted("p", f"c{number}", "f", 0, 0, 0, str(number)),
        events.CallEnded("p", f"c{number}", "f", 0, outcome, seconds, 0, "", 0, str(number)),  # type: ignore[arg-type]
    ]


def test_a_history_is_for_its_user_alone(tmp_path: Path) -> None:
    """SEC-21."""
    recorder = Recorder("p", tmp_path)
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(recorder.path.parent.stat().st_mode) == 0o700
    recorder.close()


def test_a_short_call_takes_one_line(tmp_path: Path) -> None:
    (ended,) = _recorded(tmp_path, _call(7))
    assert isinstance(ended, events.CallEnded)
    assert ended.arguments == "7"


def test_states_of_progress_bars_are_not_kept(tmp_path: Path) -> None:
    bar = events.Output("p", 0, "stderr", "10%", progress=True)
    last = events.Output("p", 0, "stderr", "100%")
    assert _recorded(tmp_path, [bar, last]) == [last]


def test_samples_of_many_nodes_are_thinned_out(tmp_path: Path) -> None:
    found: list[Event] = [
        events.NodeSample("p", node, 1.0, 1, 0, time=float(second)) for second in range(1, 101) for node in range(100)
    ]
    kept = _recorded(tmp_path, found, 1 << 30)
    assert 1000 <= len(kept) <= 1400


def test_beyond_the_limit_failures_and_warnings_are_still_written(tmp_path: Path) -> None:
    flood: list[Event] = [events.Output("p", 0, "stdout", "x" * 1000) for _ in range(200)]
    failure, warning = _call(1, outcome="error")[1], events.Notice("p", "mind", "warning")
    kept = _recorded(tmp_path, [*flood, failure, warning, events.PoolClosed("p", 1.0, 1)], 100_000)
    assert failure in kept
    assert warning in kept
    assert isinstance(kept[-1], events.PoolClosed)
    assert sum(isinstance(event, events.Output) for event in kept) < 110


def test_nothing_makes_a_history_grow_far_beyond_its_limit(tmp_path: Path) -> None:
    recorder = Recorder("p", tmp_path, 100_000)
    for number in range(5_000):
        recorder.record(events.Notice("p", f"warning {number}", "warning"))
    recorder.close()
    assert recorder.path.stat().st_size < 150_000
    assert b'"Skipped"' in recorder.path.read_bytes()


def test_a_full_disk_ends_the_history_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder("p", tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # else the kernel ends this process
    resource.setrlimit(resource.RLIMIT_FSIZE, (recorder.path.stat().st_size, limit[1]))
    try:
        recorder.record(events.NodeUp("p", 0))
        recorder.flush()
        recorder.record(events.NodeUp("p", 1))
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert caplog.text.count("not written any more") == 1


def test_a_pool_that_is_open_is_known_by_its_lock(tmp_path: Path) -> None:
    recorder = Recorder("p", tmp_path)
    (entry,) = store.entries(tmp_path)
    assert entry.running
    assert read(entry).state == "opening"
    recorder.close()
    assert not entry.running
    assert read(entry).state == "killed"  # nobody has said that it was closed


def test_histories_are_found_by_name_and_by_the_beginning_of_their_id(tmp_path: Path) -> None:
    old = Recorder("train", tmp_path, clock=lambda: 1_000_000.0)
    new = Recorder("train", tmp_path, clock=lambda: 2_000_000.0)
    other = Recorder("sweep", tmp_path)
    for recorder in (old, new, other):
        recorder.close()
    assert store.find("train", tmp_path).id == new.id
    assert store.find(old.id, tmp_path).id == old.id
    assert store.find(other.id[:-3], tmp_path).id == other.id
    with pytest.raises(InvalidArgument, match=r"no history of a pool 'nobody'.*sweep, train"):
        store.find("nobody", tmp_path)


def test_old_histories_are_removed_and_those_of_open_pools_stay(tmp_path: Path) -> None:
    gone, kept, open_one = (Recorder(name, tmp_path) for name in ("gone", "kept", "open"))
    gone.close()
    kept.close()
    long_ago = time.time() - 40 * 86_400
    os.utime(gone.path, (long_ago, long_ago))
    os.utime(open_one.path, (long_ago, long_ago))
    store.prune(tmp_path)
    assert {entry.pool for entry in store.entries(tmp_path)} == {"kept", "open"}
    open_one.close()


def test_the_oldest_go_when_all_together_are_too_large(tmp_path: Path) -> None:
    size = 0
    for number in range(4):
        recorder = Recorder(f"p{number}", tmp_path, clock=lambda number=number: 1000.0 + number)
        for _ in range(100):
            recorder.record(events.Output("p", 0, "stdout", "x" * 100))
        recorder.close()
        size = recorder.path.stat().st_size
    store.prune(tmp_path, limit=2 * size + size // 2)
    assert {entry.pool for entry in store.entries(tmp_path)} == {"p2", "p3"}


def test_whoever_follows_a_history_gets_each_event_once_and_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"pool": "p", "began": 1}\n{"event":"NodeUp","pool":"p","no')
    tail = store.Tail(path)
    assert list(tail.read()) == []
    with path.open("ab") as file:
        file.write(b'de":3,"time":1.0}\n')
    assert list(tail.read()) == [events.NodeUp("p", 3, time=1.0)]
    assert list(tail.read()) == []
