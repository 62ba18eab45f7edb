"""How busy a node's processes are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyward.node import usage
from skyward.node.usage import UsageMeter
from tests.support.waiting import until

HEAVY = "x = bytearray(b'x') * (60 << 20); print('up', flush=True); import sys; sys.stdin.read()"


@contextmanager
def process(source: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that has said something, until the block ends."""
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline()
        yield started
        started.kill()


def test_memory_is_that_of_the_process_and_its_children() -> None:
    before = UsageMeter().sample([os.getpid()])[1]
    assert before > 10 << 20
    with process(HEAVY) as child:
        assert UsageMeter().sample([child.pid])[1] > 55 << 20
        assert UsageMeter().sample([os.getpid()])[1] - before > 40 << 20


def test_children_of_any_thread_count() -> None:
    """With several slots bodies run in threads, and start processes from there."""
    before = UsageMeter().sample([os.getpid()])[1]
    started, over = threading.Event(), threading.Event()

    def work() -> None:
        with process(HEAVY):
            started.set()
            over.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert started.wait(60)
        grown = UsageMeter().sample([os.getpid()])[1] - before
    finally:
        over.set()
        thread.join()
    assert grown > 40 << 20


def test_cpu_is_in_per_cent_of_a_core() -> None:
    busy = "import sys\nprint('up', flush=True)\nwhile True: pass"
    with process(busy) as child:
        meter = UsageMeter()
        assert meter.sample([child.pid])[0] == 0.0
        deadline = time.monotonic() + 60
        used = 0.0
        # a sample that is interrupted between its two clocks may say too much
        while not 20 <= used <= 150 and time.monotonic() < deadline:
            time.sleep(0.2)
            used = meter.sample([child.pid])[0]
        assert 20 <= used <= 150


def test_an_idle_process_uses_nothing() -> None:
    with process("print('up', flush=True); import sys; sys.stdin.read()") as child:
        meter = UsageMeter()
        meter.sample([child.pid])

        def idle() -> bool:
            time.sleep(0.2)
            return meter.sample([child.pid])[0] < 20

        until(idle)


def test_processes_that_are_gone_count_nothing() -> None:
    with process("print('up', flush=True)") as child:
        child.wait()
        pid = child.pid
    assert UsageMeter().sample([pid]) == (0.0, 0)
    assert UsageMeter().sample([]) == (0.0, 0)


def test_out_of_memory_is_told_once_for_each_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 4\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr(usage, "_oom_counters", lambda: [counter])
    meter = UsageMeter()
    assert not meter.out_of_memory()
    counter.write_text("low 0\noom 5\noom_kill 3\n")
    assert meter.out_of_memory()
    assert not meter.out_of_memory()
    counter.unlink()
    assert not meter.out_of_memory()


def test_nobody_has_run_out_of_memory_here() -> None:
    assert not UsageMeter().out_of_memory()
