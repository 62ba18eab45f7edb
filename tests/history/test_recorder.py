"""What is written of a pool, how much, for how long, and that nothing of it holds the pool up."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyward import events
from skyward.errors import InvalidArgument
from skyward.events import Event
from skyward.history import store
from skyward.history.history import read
from skyward.history.lines import Skipped
from skyward.history.recorder import Recorder
from tests.support.waiting import until


def _recorded(root: Path, found: list[Event], limit: int = 1 << 20) -> list[Event]:
    recorder = Recorder("p", root, limit)
    for event in found:
        recorder.record(event)
    recorder.close()
    return list(store.Tail(recorder.path).read())


def test_failed_calls_that_are_kept_go_before_their_history(tmp_path: Path) -> None:
    for number in range(3):
        recorder = Recorder("p", tmp_path, clock=lambda number=number: 1e9 + number)
        recorder.close()
        failed = recorder.path.parent / store.FAILED
        failed.mkdir(mode=0o700)
        (failed / "call").write_bytes(bytes(1000))
        os.utime(recorder.path, (time.time() - 100 + number,) * 2)
    store.prune(tmp_path, limit=2500)
    found = store.entries(tmp_path)
    assert [(entry.path.parent / store.FAILED).exists() for entry in found] == [True, True, False]
    store.prune(tmp_path, now=time.time() + 31 * 86400)
    assert store.entries(tmp_path) == []


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


@pytest.mark.parametrize("act", ["pass", "recorder.flush(); recorder.close()"], ids=["does-nothing", "closes"])
def test_a_forked_child_neither_keeps_a_history_running_nor_writes_to_it(tmp_path: Path, act: str) -> None:
    """The lock says that the program lives; a child that outlives it has a copy."""
    code = (
        "import os, sys; from pathlib import Path; from skyward.history.recorder import Recorder\n"
        "recorder = Recorder('p', Path(sys.argv[1]))\n"
        "if os.fork() == 0:\n"
        "    mine = os.open(os.devnull, os.O_RDONLY)\n"
        f"    {act}\n"
        "    os.fstat(mine)\n"
        "    print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        (entry,) = store.entries(tmp_path)
        assert entry.running
        program.kill()
        program.wait(timeout=120)
        until(lambda: not entry.running)
        assert entry.path.read_bytes().count(b"\n") == 1


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


def test_reports_take_half_of_a_history_and_then_one_a_second(tmp_path: Path) -> None:
    found: list[Event] = [
        events.Progress("p", 0, step / 100, None, {name: 1.0}, "c1", 0, time=step / 100)
        for step in range(1, 3001)
        for name in ("loss", "rare")
    ]
    kept = _recorded(tmp_path, [*found, events.Output("p", 0, "stdout", "printed")], 200_000)
    assert events.Output("p", 0, "stdout", "printed", time=kept[-2].time) == kept[-2]
    assert isinstance(kept[-1], Skipped)
    assert kept[-1].count + sum(isinstance(event, events.Progress) for event in kept) == len(found)
    late = [event for event in kept if isinstance(event, events.Progress) and event.time > 20]
    assert [sum(name in event.metrics for event in late) for name in ("loss", "rare")] == [10, 10]
    assert len(kept) > 500


def test_beyond_the_limit_failures_and_warnings_are_still_written(tmp_path: Path) -> None:
    flood: list[Event] = [events.Output("p", 0, "stdout", "x" * 1000) for _ in range(200)]
    failure, warning = _call(1, outcome="error")[1], events.Notice("p", "mind", "warning")
    kept = _recorded(tmp_path, [*flood, failure, warning, events.PoolClosed("p", 1.0, 1)], 100_000)
    assert failure in kept
    assert warning in kept
    assert any(isinstance(event, events.PoolClosed) for event in kept)
    assert sum(isinstance(event, events.Output) for event in kept) < 110


def test_a_history_that_is_full_says_how_many_calls_it_leaves_out(tmp_path: Path) -> None:
    flood: list[Event] = [events.Output("p", 0, "stdout", "x" * 1000) for _ in range(200)]
    kept = _recorded(tmp_path, [*flood, *(_call(number)[1] for number in range(50))], 100_000)
    assert isinstance(kept[-1], Skipped)
    assert kept[-1].ok == 50
    assert kept[-1].count > 50


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
    assert caplog.text.count("no longer written") == 1


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
    with pytest.raises(InvalidArgument, match=r"no history of a pool 'nobody'.*`sky history` lists pools"):
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


def _facts(event: Event) -> events.EndOfCall:
    return tuple(getattr(event, name) for name in event.__match_args__[1:])  # type: ignore[return-value]


def test_the_end_of_a_call_is_the_same_with_and_without_an_event(tmp_path: Path) -> None:
    ends: list[Event] = [
        events.CallEnded("p", "c1", 'f"\n', 0, "ok", 0.25, 0, "", 0, "'ä', 2", time=5.0),
        events.CallEnded("p", "c2", "f", -1, "lost", 0.0, None, "NodeLost: gone", 3, "", 20, 4, time=6.0),
    ]
    recorder = Recorder("p", tmp_path)
    for end in ends:
        recorder.record_end(_facts(end))
        recorder.record(end)
    recorder.close()
    without_one, with_one, *others = list(store.Tail(recorder.path).read())
    assert with_one == ends[0]
    assert _facts(without_one) == _facts(ends[0])
    assert abs(without_one.time - time.time()) < 60
    assert [_facts(other) for other in others] == [_facts(ends[1])] * 2


def test_a_short_call_without_an_event_of_its_end_takes_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.history.recorder._PAUSE", 60.0)  # nothing is written before the end
    began, ended = _call(7)
    recorder = Recorder("p", tmp_path)
    recorder.record(began)
    recorder.record_end(_facts(ended))
    recorder.close()
    assert [type(event) for event in store.Tail(recorder.path).read()] == [events.CallEnded]


def test_beyond_the_limit_ends_without_an_event_count_as_left_out_unless_they_are_failures(tmp_path: Path) -> None:
    recorder = Recorder("p", tmp_path, 2000)
    for number in range(1000):
        recorder.record_end((f"c{number}", "f", 0, "ok", 0.1, 0, "", 0, "", 1, 0, "", 0.0))
    recorder.record_end(("bad", "f", 0, "error", 0.1, 0, "ValueError", 0, "", 1, 0, "", 0.0))
    recorder.close()
    found = list(store.Tail(recorder.path).read())
    assert len(found) < 50
    (bad,) = [event for event in found if isinstance(event, events.CallEnded) and event.outcome == "error"]
    assert bad.call == "bad"
    assert isinstance(found[-1], Skipped)
    assert found[-1].ok > 950


def test_many_lines_are_written_at_once_and_others_get_their_turn_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder("p", tmp_path)
    sizes: list[int] = []
    write = os.write

    def counted(file: int, data: memoryview) -> int:
        sizes.append(len(data))
        return write(file, data)

    monkeypatch.setattr(os, "write", counted)
    for number in range(5000):
        recorder.record_end((f"c{number}", "f", 0, "ok", 0.1, 0, "", 0, "", 1, 0, "", 0.0))
    recorder.close()
    assert 2 <= len(sizes) <= 40
    assert len(list(store.Tail(recorder.path).read())) == 5000


def test_histories_that_stay_are_not_opened_to_find_those_that_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        Recorder(f"p{number}", tmp_path).close()
    opened: list[object] = []
    monkeypatch.setattr(store, "_entry", opened.append)
    store.prune(tmp_path)
    assert not opened
    store.prune(tmp_path, now=time.time() + 31 * 86_400)
    assert len(opened) == 5
