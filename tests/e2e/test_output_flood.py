"""A flood of output fills neither the client nor the agent; what is left out is counted and said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward import events
from tests.support.waiting import until

# pyright: reportPrivateUsage=false

MIB = 1 << 20
SIZE = int(os.environ.get("SKYWARD_FLOOD_MB", "40")) << 20
"""How much a body prints, in bytes."""
LINE = b"a short line\n"
NOTE = re.compile(r"\.\.\. ([\d,]+) lines \(([\d,]+) bytes\) of output are omitted here")


@sky.compute
def flood(size: int, line: bytes = LINE) -> int:
    """Prints so many bytes, by default in short lines; returns how many that were."""
    import os

    piece, written = line * (50_000 // len(line)), 0
    while written < size:
        written += os.write(1, piece[: min(len(piece), size - written)])
    return written


class Sizes:
    """The memory of processes, looked at all the time: how much more they had than at first."""

    def __init__(self, pids: list[int]) -> None:
        self._first = {pid: resident(pid) for pid in pids}
        self.most = dict.fromkeys(pids, 0)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Sizes:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.02):
            for pid, first in self._first.items():
                self.most[pid] = max(self.most[pid], resident(pid) - first)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def agent(pool: sky.ComputePool) -> int:
    return pool._engine.greetings()[0]["pid"]


@pytest.fixture
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), nodes=1, console=False) as made:
        assert flood(1 << 20) >> made == 1 << 20  # what is needed for it is loaded
        yield made


class Counted:
    """A listener that counts lines, and what notes say of lines that were left out."""

    def __init__(self, pause: Callable[[int], None] = lambda lines: None) -> None:
        self.lines = self.left_out = 0
        self._pause = pause

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Output):
            note = NOTE.search(event.text)
            if note:
                self.left_out += int(note[1].replace(",", ""))
            elif event.text:
                self.lines += 1
            self._pause(self.lines)


def check(sizes: Sizes) -> None:
    assert all(most < 64 * MIB for most in sizes.most.values()), {
        pid: f"{most / MIB:.0f} MiB" for pid, most in sizes.most.items()
    }


@pytest.mark.timeout(3600)
def test_a_flood_that_nobody_hears_takes_no_memory(pool: sky.ComputePool) -> None:
    with Sizes([os.getpid(), agent(pool)]) as sizes:
        assert flood(SIZE) >> pool == SIZE
    check(sizes)


@pytest.mark.timeout(3600)
def test_a_flood_with_a_listener_takes_no_memory_and_loses_nothing_unsaid(pool: sky.ComputePool) -> None:
    heard = Counted()
    pool.on_event(heard)
    with Sizes([os.getpid(), agent(pool)]) as sizes:
        assert flood(SIZE // 2) >> pool == SIZE // 2
        until(lambda: heard.lines + heard.left_out >= SIZE // 2 // len(LINE), 600)
    check(sizes)


@pytest.mark.timeout(3600)
def test_a_slow_listener_neither_fills_memory_nor_holds_a_body_up_for_long(pool: sky.ComputePool) -> None:
    """It sleeps at every hundredth line: the body waits for a while, then lines are left out and counted."""
    heard = Counted(lambda lines: time.sleep(0.01) if lines % 100 == 0 else None)
    remove = pool.on_event(heard)
    began = time.monotonic()
    with Sizes([os.getpid(), agent(pool)]) as sizes:
        assert flood(SIZE) >> pool == SIZE
    remove()
    assert time.monotonic() - began < 300 + SIZE / MIB
    check(sizes)


def test_what_a_stuck_listener_misses_is_counted_and_said(pool: sky.ComputePool) -> None:
    go_on = threading.Event()
    heard = Counted(lambda lines: None if lines < 10 else go_on.wait(500) and None)
    pool.on_event(heard)
    line, lines = b"a line of 1,000 characters" + b"." * 973 + b"\n", 40_000  # few lines, so that hearing them is quick
    assert flood(lines * len(line), line) >> pool == lines * len(line)
    go_on.set()
    until(lambda: heard.lines + heard.left_out >= lines, 120)
    assert heard.left_out > 0
    assert heard.lines + heard.left_out - lines < 100, "a line may be cut in two each time"


def test_a_body_that_leaves_a_program_behind_that_prints_does_not_hold_the_agent(pool: sky.ComputePool) -> None:
    @sky.compute
    def leave() -> int:
        import subprocess

        return subprocess.Popen(["sh", "-c", "exec yes something"], start_new_session=True).pid

    leave() >> pool
    assert flood(100) >> pool == 100


PROGRAM = """
    import sys
    sys.path.insert(0, {root!r})
    import skyward as sky
    from tests.e2e.test_output_flood import Sizes, agent, flood
    import os

    with sky.ComputePool(provider=sky.Local(), nodes=1, console={console}) as pool:
        flood(1 << 20) >> pool
        with Sizes([os.getpid(), agent(pool)]) as sizes:
            flood({size}) >> pool
    print("MOST", max(sizes.most.values()), file=sys.stderr)
"""


@pytest.mark.timeout(3600)
def test_a_flood_with_the_console_takes_no_memory() -> None:
    program = textwrap.dedent(PROGRAM.format(root=os.getcwd(), console=True, size=SIZE // 2))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: [None for _ in process.stdout or ()])
        reader.start()
        assert process.stderr is not None
        said = process.stderr.read()
        reader.join()
    most = re.search(r"MOST (\d+)", said)
    assert most is not None, said[-2000:]
    assert int(most[1]) < 64 * MIB, f"{int(most[1]) / MIB:.0f} MiB"
